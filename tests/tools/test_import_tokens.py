"""Token files of other programs, written here by their published layouts, as a run reads them."""

import itertools
import os
import pathlib
import struct
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import config
import minimal
from data.dataset import PreparedDataset
from tests.conftest import content, make_config, refuses
from tools import import_tokens

pytestmark = pytest.mark.quick
EOS = 2
RAW = "--dtype uint16 --eos 2"


def documents(seed: int, count: int = 60) -> list[list[int]]:
    """Of random ids, each with EOS at its end; the second is empty."""
    draw = np.random.default_rng(seed)
    texts = [[*draw.integers(3, 320, draw.integers(1, 90)).tolist(), EOS] for _ in range(count)]
    return [texts[0], [], *texts[1:]]


TEXTS = documents(0)


def flat(texts: list[list[int]]) -> list[int]:
    return list(itertools.chain(*texts))


def raw(path: pathlib.Path, texts: list[list[int]] = TEXTS, dtype: str = "<u2") -> None:
    """nanoGPT's data/openwebtext/prepare.py; `dolma tokens`, in a file that is called .npy."""
    np.array(flat(texts), dtype).tofile(path)


def numpy_save(path: pathlib.Path, texts: list[list[int]] = TEXTS, dtype: str = "<i8") -> None:
    np.save(path, np.array(flat(texts), dtype))


def llmc(path: pathlib.Path, texts=TEXTS, magic: int = 20240520, more: int = 0) -> None:
    """dev/data/data_common.py: a header of 256 numbers, of which three are used."""
    ids = np.array(flat(texts), "<u4" if magic == 20240801 else "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids) + more
    path.write_bytes(header.tobytes() + ids.tobytes())


def megatron(path: pathlib.Path, texts=TEXTS, order: Any = list, sentences=1) -> None:
    """core/datasets/indexed_dataset.py. order: of the sequences in the index. sentences: of a document."""
    raw(path, texts)
    lengths = [len(part) for text in texts for part in np.array_split(text, sentences)]
    named = order([*zip(lengths, np.cumsum([0, *lengths[:-1]]) * 2)])
    borders = np.arange(0, len(named) + 1, sentences, dtype="<i8")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(named), len(borders))
    index += np.array([length for length, _ in named], "<i4").tobytes()
    index += np.array([begin for _, begin in named], "<i8").tobytes() + borders.tobytes()
    path.with_suffix(".idx").write_bytes(index)


def datatrove(path: pathlib.Path) -> None:
    """pipeline/tokens/tokenizer.py: the ends of documents, in ids, are in a file of their own."""
    raw(path)
    np.cumsum([len(text) for text in TEXTS]).astype("<u8").tofile(f"{path}.index")


def run(*words: object, options: str = "") -> int:
    return import_tokens.main([*map(str, words), *options.split()])


def dataset(folder: pathlib.Path) -> PreparedDataset:
    data = {"source": str(folder), "document_mask": True}
    return PreparedDataset(make_config(data=data, train={"seq_len": 1}))


def streams(folder: pathlib.Path) -> tuple[Any, Any]:
    """The training and the validation text of a folder, as a run opens it."""
    [source] = dataset(folder).sources
    return source.stream, source.validation


@pytest.mark.parametrize(
    "name, write, options",
    [
        ("nanogpt.bin", raw, RAW),
        ("olmo.npy", partial(raw, dtype="<u4"), "--dtype uint32 --eos 2"),
        ("int64.npy", numpy_save, "--eos 2"),
        ("llmc.bin", llmc, "--eos 2"),
        ("llama3.bin", partial(llmc, magic=20240801), "--eos 2"),
        ("megatron.bin", megatron, ""),
        ("sentences.bin", partial(megatron, sentences=2), ""),
        ("datatrove.ds", datatrove, ""),
    ],
)
def test_each_format_has_its_ids_and_documents(tmp_path, prepared, name, write, options):
    write(tmp_path / name)
    llmc(tmp_path / "validation.bin")
    out = tmp_path / "out"
    out.mkdir()
    words = ("--validation", tmp_path / "validation.bin", "--tokenizer", prepared)
    run(tmp_path / name, out, *words, options=options)
    stream, _ = streams(out)
    assert stream.read(0, stream.length).tolist() == flat(TEXTS)
    begins = sorted({0, *itertools.accumulate(map(len, TEXTS))})
    assert stream.documents(0, stream.length) == [*itertools.pairwise(begins)]
    first, border = begins[3] + 1, begins[4]
    assert stream.documents(first, border + 1) == [(first, border), (border, border + 1)]
    assert [path.name for path in dataset(out).tokenizer_files] == ["tokenizer.model"]
    cfg = make_config(data={"source": str(out)})
    (tokens,) = minimal.open_data(SimpleNamespace(data=cfg.data, model=cfg.model))
    assert tokens.tolist() == flat(TEXTS)


@pytest.mark.parametrize("write", [llmc, megatron])
def test_last_hundredth_of_the_first_file_is_held_out(tmp_path, write):
    texts = documents(0, 300)
    write(tmp_path / "a.bin", texts)
    run(tmp_path / "a.bin", tmp_path / "out", options="--eos 2")
    stream, validation = streams(tmp_path / "out")
    border = len(flat(texts)) - len(flat(texts)) // 100
    assert stream.read(0, stream.length).tolist() == flat(texts)[:border]
    assert validation.read(0, validation.length).tolist() == flat(texts)[border:]
    begins = [n for n in itertools.accumulate(map(len, texts)) if border < n < len(flat(texts))]
    held_out = [0, *(n - border for n in begins), validation.length]
    assert validation.documents(0, validation.length) == [*itertools.pairwise(held_out)]


def test_files_are_read_in_the_order_of_their_names_hashes(tmp_path):
    texts = {}
    for seed, name in enumerate(["a/part.bin", "b/part.bin", "c.bin", "d.bin"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        texts[name] = [*documents(seed)[:-1], [7, 8, 9]]  # the last document has no EOS
        raw(tmp_path / name, texts[name])
    raw(tmp_path / "validation.npy")
    words = (tmp_path / "**/*.bin", tmp_path / "out", "--validation", tmp_path / "validation.npy")
    run(*words, options=RAW)
    stream, _ = streams(tmp_path / "out")
    # sorted by the SHA-256 of these names, as sha256sum prints it
    expected = [flat(texts[name]) for name in ("c.bin", "b/part.bin", "d.bin", "a/part.bin")]
    assert stream.read(0, stream.length).tolist() == flat(expected)
    border = len(expected[0])
    assert stream.documents(border - 3, border + 2) == [(border - 3, border), (border, border + 2)]


@pytest.mark.parametrize("name", ["a.bin", "validation.bin"])
def test_a_file_written_anew_is_refused_and_one_touched_is_not(tmp_path, name):
    raw(tmp_path / "a.bin")
    raw(tmp_path / "validation.bin")
    out = tmp_path / "out"
    run(tmp_path / "a.bin", out, "--validation", tmp_path / "validation.bin", options=RAW)
    os.utime(tmp_path / name, (1, 1))
    dataset(out)
    np.fromfile(tmp_path / name, "<u2")[::-1].tofile(tmp_path / name)
    with refuses(name, "written anew", "import"):
        dataset(out)


def test_identity_is_that_of_the_ids_and_documents_not_of_their_paths(tmp_path):
    """What a checkpoint keeps, to compare it at a resume."""

    def identity(name: str, seed: int = 0, eos: int = EOS, joined: bool = False) -> list[dict]:
        folder = tmp_path / name
        folder.mkdir()
        raw(folder / "a.bin", documents(seed))
        megatron(folder / "b.bin", [flat(documents(1))] if joined else documents(1))
        options = f"--dtype uint16 --eos {eos}"
        run(folder / "a.bin", folder / "b.bin", folder / "out", options=options)
        return dataset(folder / "out").identities()

    first = identity("first")
    assert identity("moved") == first
    assert first not in [
        identity("ids", seed=5),
        identity("eos", eos=7),
        identity("d", joined=True),
    ]


@pytest.mark.parametrize("wrong", [320, config.IGNORE])
def test_an_id_outside_the_vocabulary_is_named_when_it_is_read(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(import_tokens, "LOOKED_AT", 3)
    raw(tmp_path / "a.npy", [[1, 2, 3, wrong, 4] + [5] * 500], "<i4")
    run(tmp_path / "a.npy", tmp_path / "out", options="--dtype int32")
    stream, _ = streams(tmp_path / "out")
    assert stream.read(0, 3).tolist() == [1, 2, 3]
    with refuses(rf"a\.npy: token 3 has id {wrong}", "vocab_size = 320"):
        stream.read(2, 5)


def cut(write: Callable, suffix: str) -> Callable[[pathlib.Path], None]:
    def write_and_cut(path: pathlib.Path) -> None:
        write(path)
        os.truncate(path.with_suffix(suffix), 400)

    return write_and_cut


def linked(path: pathlib.Path) -> None:
    raw(path.with_name("b.bin"))
    path.symlink_to("b.bin")


@pytest.mark.parametrize(
    "name, write, options, words",
    [
        ("a.bin", lambda path: path.write_text("abc"), RAW, "a.bin: .*multiple.*uint16"),
        ("a.bin", partial(raw, dtype="<i4"), RAW, "a.bin: every second id .*--dtype uint32"),
        ("a.npy", raw, "--dtype uint16 --eos 1", "a.npy: .* is 1, the --eos"),
        ("a.npy", partial(numpy_save, texts=[[1, -100]]), "", "a.npy: id 1 is -100, negative"),
        ("a.npy", partial(numpy_save, dtype=">u2"), "", "a.npy: holds >u2, not little"),
        ("a.bin", partial(llmc, more=1), "", "a.bin: holds .* header says"),
        ("a.bin", cut(megatron, ".bin"), "", r"a.bin: holds 200 ids.*a\.idx names"),
        ("a.bin", cut(megatron, ".idx"), "", r"a\.idx: was cut"),
        ("a.bin", partial(megatron, order=lambda n: n[::-1]), "", "idx: selects .*or reorders"),
        ("a.ds", cut(datatrove, ".ds.index"), "", "a.ds: .*cut"),
        ("?.bin", linked, RAW, "is named 2 times"),
        ("a.bin", linked, f"{RAW} --validation TMP/b.bin", "is named 2 times"),
    ],
)
def test_wrong_files_are_refused_and_nothing_is_left(tmp_path, name, write, options, words):
    write(tmp_path / name.replace("?", "a"))
    before = content(tmp_path)
    with refuses(words):
        run(tmp_path / name, tmp_path / "out", options=options.replace("TMP", str(tmp_path)))
    assert content(tmp_path) == before
