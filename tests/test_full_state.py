"""The whole model in one file: between any numbers of ranks, with the safetensors package, and what is refused."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.llama import Llama
from parallel.materialize import named_parameters
from tests import cases, full_state_cases
from tests.conftest import make_config
from tests.test_parallel import MODELS

CASES = {**MODELS, "uneven-tied": {**MODELS["uneven"], "model": {**MODELS["uneven"]["model"], "tie_embeddings": True}}}
WRAPPED = {**MODELS["uneven"], "parallel": {"recompute": "full"}}
REPLICAS = {**MODELS["uneven"], "parallel": {"dp_replicate": 2}}


def sections_for(ranks: int) -> dict[str, dict]:
    return {**CASES, "wrapped": WRAPPED, **({"replicas": REPLICAS} if ranks == 4 else {})}


@pytest.fixture(scope="module")
def written(on_ranks, tmp_path_factory):
    """(folder, hashes of all parameters by case) of what 1, 3 and 4 ranks wrote."""
    found = {}
    for ranks in (1, 3, 4):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        found[ranks] = folder, on_ranks(ranks, full_state_cases.write_all, sections_for(ranks), str(folder))[0]
    return found


@pytest.mark.parametrize("ranks", [2])
def test_any_number_of_ranks_reads_what_any_wrote(on_ranks, written, ranks):
    folders = [str(folder) for folder, _ in written.values()]
    names = {name: sections for name, sections in sections_for(ranks).items() if name != "replicas"}
    for found in on_ranks(ranks, full_state_cases.read_all, names, folders, 9999):  # blocks that end within rows
        for name in names:
            assert found[name] == [written[1][1][name]] * len(written)


def test_replicas(on_ranks, written):
    folder, hashes = written[4]
    assert hashes["replicas"] == hashes["uneven"]
    assert (folder / "replicas.safetensors").read_bytes() == (folder / "uneven.safetensors").read_bytes()
    for found in on_ranks(4, full_state_cases.read_all, {"replicas": REPLICAS}, [str(folder)], 4096):
        assert found["replicas"] == [hashes["uneven"]]


def test_the_file_is_the_same_for_any_number_of_ranks(written):
    for name in CASES:
        assert len({(folder / f"{name}.safetensors").read_bytes() for folder, _ in written.values()}) == 1
    assert not [p for folder, _ in written.values() for p in folder.glob(".*")]


@pytest.mark.parametrize("name", CASES)
def test_a_plain_model_takes_it(written, name):
    folder, hashes = written[3]
    cfg = make_config(**CASES[name])
    model, tensors = Llama(cfg.model), load_file(folder / f"{name}.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == (["head.weight"] if cfg.model.tie_embeddings else []) and not unexpected  # tied: written once
    assert cases.digests(dict(named_parameters(model))) == hashes[name] == cases.digests(tensors)


def test_a_file_of_the_package_is_read(on_ranks, written, tmp_path):
    folder, hashes = written[1]
    save_file(load_file(folder / "uneven.safetensors"), tmp_path / "uneven.safetensors", metadata={"format": "pt"})
    uneven = {"uneven": MODELS["uneven"]}
    for found in on_ranks(2, full_state_cases.read_all, uneven, [str(tmp_path)], 4096):
        assert found["uneven"] == [hashes["uneven"]]


def test_bfloat16(on_ranks, written, tmp_path):
    uneven = {"uneven": MODELS["uneven"]}
    on_ranks(3, full_state_cases.write_all, uneven, str(tmp_path), torch.bfloat16)
    tensors = load_file(tmp_path / "uneven.safetensors")
    rounded = {name: t.bfloat16() for name, t in load_file(written[1][0] / "uneven.safetensors").items()}
    assert tensors.keys() == rounded.keys()
    assert all(t.dtype is torch.bfloat16 and torch.equal(t, rounded[name]) for name, t in tensors.items())
    found = on_ranks(2, full_state_cases.read_all, uneven, [str(tmp_path)], 4096)[1]
    assert found["uneven"] == [cases.digests({name: t.float() for name, t in tensors.items()})]


def test_plain_tensors_of_any_shape(on_ranks, tmp_path):
    assert on_ranks(1, full_state_cases.shapes_and_plain, str(tmp_path / "plain")) == [True]
    assert {t.dtype for t in load_file(tmp_path / "plain").values()} == {torch.float32, torch.float16, torch.bfloat16}


@pytest.mark.parametrize("ranks", [3])
def test_no_rank_holds_more_than_a_parameter_or_its_shards(on_ranks, tmp_path, ranks):
    for found in on_ranks(ranks, full_state_cases.largest, str(tmp_path / "file"), 1000):
        padded = math.ceil(4001 / ranks) * ranks * 48 * 4  # a gathered parameter, rows of equal shards
        assert found["full"] == 4001 * 48 * 4 <= found["write"] <= padded
        assert found["read"] <= found["shard"] < found["full"]


def header_of(data: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def file_of(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def damaged(good: bytes, change) -> bytes:
    header, data = header_of(good)
    change(header)
    return file_of(header, data)


NORM, EMBEDDING = "blocks.0.attention_norm.weight", "embedding.weight"
HEADERS = {  # a change of the header, and what is said of it
    "no tensor": (lambda h: h.update(other=h.pop(NORM)), [f"has no {NORM}", "has other, which this model"]),
    "shapes": (lambda h: (h[NORM].update(shape=[2, 24]), h[EMBEDDING].update(shape=[48, 320])),
               ["norm.weight has shape [2, 24]", "embedding.weight has shape [48, 320], this model's is [320, 48]"]),
    "dtype": (lambda h: h[NORM].update(dtype="I32"), ["attention_norm.weight has dtype I32; only F32, BF16, F16"]),
    "dtype of another size": (lambda h: h[NORM].update(dtype="BF16"), ["norm.weight: has 192 bytes"]),
    "overlap": (lambda h: h[NORM].update(data_offsets=[0, 192]), ["begins at byte 0 of", "ends at 192"]),
    "out of range": (lambda h: h[NORM].update(data_offsets=[10**15, 10**15 + 192]), ["cut short", "begins at byte 1"]),
    "backwards": (lambda h: h[NORM].update(data_offsets=[192, 0]), ["norm.weight: has -192 bytes"]),
    "negative": (lambda h: h[NORM].update(data_offsets=[-192, 0]), ["norm.weight: needs a dtype"]),
    "no offsets": (lambda h: h[NORM].pop("data_offsets"), ["norm.weight: needs a dtype"]),
    "no entry": (lambda h: h.update({NORM: 3}), ["norm.weight: needs a dtype"]),
    "shape of words": (lambda h: h[NORM].update(shape=["a"]), ["norm.weight: needs a dtype"]),
}


@pytest.fixture(scope="module")
def refused(on_ranks, written, tmp_path_factory):
    """{what is wrong: (each rank's error, what it should say)}, all in one process group: none hangs."""
    folder = tmp_path_factory.mktemp("refused")
    good = (written[1][0] / "plain.safetensors").read_bytes()
    files = {name: (damaged(good, change), said) for name, (change, said) in HEADERS.items()}
    torch.save({"w": torch.zeros(3)}, folder / "zip")
    torch.save({"w": torch.zeros(3)}, folder / "legacy", _use_new_zipfile_serialization=False)
    pickled = ["is no safetensors file", "pickled files"]
    files |= {
        "truncated": (good[:-100], ["cut short"]),
        "longer": (good + b"1234", ["goes on for 4 bytes"]),
        "header longer than the file": (good[:100], ["is no safetensors file, or cut short: 100 bytes"]),
        "empty": (b"", ["0 bytes cannot hold"]),
        "five bytes": (b"12345", ["5 bytes cannot hold"]),
        "not JSON": (file_of(b"{]", b""), ["not JSON"]),
        "not text": (file_of(b"\xff\xfe\x00x", b""), ["not JSON"]),
        "nested": (file_of(b"[" * 200_000, b""), ["not JSON"]),
        "a list": (file_of([1], b""), ["no JSON object"]),
        "nothing in it": (file_of({}, b""), [f"has no {NORM}", "has no embedding.weight"]),
        "pickled zip": ((folder / "zip").read_bytes(), pickled),
        "pickled": ((folder / "legacy").read_bytes(), pickled),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    expected = {name: said for name, (_, said) in files.items()}
    expected |= {"pipe": ["no regular file"], ".": ["no regular file"], "absent": ["is not there"]}
    found = on_ranks(2, full_state_cases.read_refused, [str(folder / name) for name in expected], timeout=100)
    return {name: ([errors[i] for errors in found], said) for i, (name, said) in enumerate(expected.items())}


@pytest.mark.parametrize("name", [*HEADERS, "truncated", "longer", "header longer than the file", "empty", "five bytes",
                                  "not JSON", "not text", "nested", "a list", "nothing in it", "pickled zip", "pickled",
                                  "pipe", ".", "absent"])
def test_what_is_wrong_is_refused_on_every_rank(refused, name):
    (first, second), said = refused[name]
    assert first == second
    for words in said:
        assert words in first


def test_a_failed_write_is_told_on_every_rank_and_leaves_nothing(on_ranks, tmp_path):
    first, second = on_ranks(2, full_state_cases.write_refused, str(tmp_path))
    assert first == second
    assert [error.split(": ")[-1] for error in first] == [
        "No such file or directory", "is there and no regular file", "File too large"]
    assert not list(tmp_path.iterdir())


def test_a_killed_write_leaves_no_file_of_its_name(on_ranks, tmp_path):
    path = tmp_path / "plain.safetensors"
    with pytest.raises(AssertionError):
        on_ranks(2, full_state_cases.write_killed, str(path), timeout=60)
    assert [p.name for p in tmp_path.iterdir()] == [".plain.safetensors.tmp"]
    on_ranks(1, full_state_cases.write_all, {"plain": {}}, str(tmp_path))  # and the next one is not disturbed by it
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and load_file(path)
