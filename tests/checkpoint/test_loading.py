"""Loading runs no code and reads no file outside the checkpoint; a checkpoint of another model is refused."""

import io
import os
import pathlib
import pickle
import re
import shutil
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

from checkpoint import catalog
from checkpoint.load import Reader, restore, tensors_of
from checkpoint.manifest import entry_of, read_manifest, render_manifest
from checkpoint.newest import read_newest
from model.llama import Llama, named_parameters
from optim import build_optimizer
from tests.checkpoint.conftest import flip_last_byte
from tests.conftest import REPO, build, hashes, make_config, mesh_for, refuses, seal
from tests.distributed import distributed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[2][0], tmp_path / "step-00000003")


def load(folder: pathlib.Path, **model: object) -> None:
    restore(folder, Llama(make_config(model=model).model), None)


class Call:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable, *arguments: object):
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def dotted(canary: pathlib.Path) -> bytes:
    """Protocol 4's nested names reach os.system through an allowed module."""
    command = f"touch {canary}".encode()
    name = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c"
    return name + bytes([len(command)]) + command + b"\x85R."


BOMBS = {
    "function": lambda canary: pickle.dumps(Call(os.system, f"touch {canary}")),
    "builtin": lambda canary: f"cbuiltins\neval\n(S'open({str(canary)!r}, 1)'\ntR.".encode(),
    "dotted": dotted,
    "torch.load": lambda canary: f"ctorch\nload\n(S'{canary}'\ntR.".encode(),
    "getattr": lambda canary: pickle.dumps(Call(getattr, pathlib.Path, "touch"), 2),
    "getattr of an enum": lambda canary: pickle.dumps(
        Call(getattr, _MEM_FORMAT_ENCODING, "__init_subclass__"), 2
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_metadata_that_runs_code_is_refused(folder, tmp_path, bomb):
    canary = tmp_path / "canary"
    (folder / ".metadata").write_bytes(bomb(canary))
    seal(folder)
    assert catalog.problems_of(folder) == []  # its hashes are right
    with refuses("refusing to unpickle", "no part of a checkpoint"):
        load(folder)
    assert not canary.exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"\x80\x04N.", b"X\xff\xff\xff\x7fa", b"(" * 10**6]
)
def test_malformed_metadata_is_refused(folder, content):
    (folder / ".metadata").write_bytes(content)
    seal(folder)
    with refuses(r"\.metadata: expected DCP's metadata"):
        load(folder)


def change(folder: pathlib.Path, how: Callable) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata, next(iter(metadata.storage_data.values())))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)


def of_first(**values: object) -> Callable:
    return lambda metadata, first: [setattr(first, key, value) for key, value in values.items()]


def of_embedding(how: Callable) -> Callable:
    return lambda metadata, first: how(metadata.state_dict_metadata, "model.embedding.weight")


WRONG = {
    "absolute path": (
        of_first(relative_path="/etc/passwd"),
        "'/etc/passwd' is not in the manifest",
    ),
    "missing file": (of_first(relative_path="__9_9.distcp"), "is not in the manifest"),
    "negative offset": (of_first(offset=-1), "cannot be read"),
    "beyond the end": (of_first(length=10**12), "cannot be read"),
    "text for a number": (of_first(offset="0"), "cannot be read"),
    "transformed": (of_first(transform_descriptors=["zstd"]), "cannot be read"),
    "bytes": (of_embedding(lambda d, n: d.update({n: BytesStorageMetadata()})), "BytesStorage"),
    "number": (of_embedding(lambda d, n: d.update({n: 5})), "is not a tensor"),
    "nothing": (lambda metadata, first: metadata.__dict__.clear(), "expected DCP's metadata"),
}


@pytest.mark.quick
@pytest.mark.parametrize("how, words", WRONG.values(), ids=WRONG)
def test_wrong_metadata_is_refused(folder, how, words):
    change(folder, how)
    with refuses(words):
        load(folder)


@pytest.mark.quick
def test_enums_are_read_as_python_3_11_0_pickles_them(folder, monkeypatch):
    """And as 3.11.3 still does: by getattr."""
    by_getattr = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_getattr)
    change(folder, lambda metadata, first: None)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    load(folder)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["bomb", "another shape"])
def test_wrong_tensor_is_refused(folder, tmp_path, kind):
    canary = tmp_path / "canary"
    value = Call(os.system, f"touch {canary}") if kind == "bomb" else torch.zeros(3)
    file = io.BytesIO()
    torch.save(value, file)
    (folder / "__7_0.distcp").write_bytes(file.getvalue())
    change(folder, of_first(relative_path="__7_0.distcp", offset=0, length=file.tell()))
    with refuses("cannot be read: rank 0: ", "[Ww]eights.only" if kind == "bomb" else ""):
        load(folder)
    assert not canary.exists()


@pytest.mark.quick
def test_file_elsewhere_is_refused_even_if_the_manifest_lists_it(folder, tmp_path):
    (folder / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")

    def move(metadata, first) -> None:
        for info in metadata.storage_data.values():
            if "__0_" in info.relative_path:
                info.relative_path = "../__0_0.distcp"

    change(folder, move)
    entries = read_manifest(folder)
    entries["../__0_0.distcp"] = entry_of((tmp_path / "__0_0.distcp").read_bytes())
    (folder / "manifest.json").write_bytes(render_manifest(entries))
    assert "is no name of a file in it" in catalog.problems_of(folder)[0]
    with refuses("is no name of a file in it"):
        load(folder)


@pytest.mark.quick
@pytest.mark.parametrize("name", [".metadata", "state.json", "__1_0.distcp"])
def test_file_that_the_manifest_does_not_list_is_not_read(folder, name):
    load(folder)
    entries = read_manifest(folder)
    del entries[name]
    (folder / "manifest.json").write_bytes(render_manifest(entries))
    with refuses("is not in the manifest|its own hash or form is wrong"):
        load(folder)


def test_tool_refuses_a_corrupt_checkpoint(folder, capsys):
    assert Reader(folder).metadata.storage_meta.checkpoint_id is None  # no path of this machine
    flip_last_byte(folder / "__0_0.distcp")
    with refuses("no good checkpoint"):
        read_newest(folder, load)
    assert "corrupt, skipped" in capsys.readouterr().err


# Another model


@pytest.mark.parametrize(
    "model, words",
    [
        ({"n_layers": 3}, r"has no model\.blocks\.2"),
        ({"n_layers": 1}, r"has model\.blocks\.1.*which this model does not"),
        ({"ffn_dim": 96}, r"gate_proj.weight is torch.float32 .*80, 48.*this model's is .*96, 48"),
    ],
)
def test_another_model_is_refused(folder, model, words):
    with refuses(words):
        load(folder, **model)
    with refuses("embedding.weight is torch.float32", "this model's is torch.bfloat16"):
        restore(folder, Llama(make_config().model).to(torch.bfloat16), None)


def test_another_optimizer_is_refused(folder):
    model = Llama(make_config().model)
    other = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        other.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    with refuses(r"has no optim\.\S+\.momentum_buffer"):
        restore(folder, model, other)
    model.embedding.weight.requires_grad_(False)
    with refuses(r"has optim\.embedding\.weight\.exp_avg, which this model does not"):
        restore(folder, model, build_optimizer(model, make_config().optim))


@pytest.mark.quick
def test_plain_model_reads_it(saved):
    folder, wanted = saved[2]
    model = Llama(make_config().model)
    optimizer = build_optimizer(model, make_config().optim)
    restore(folder, model, optimizer)
    assert hashes(tensors_of(model, optimizer)) == wanted


def test_model_may_say_which_parameters_are_saved():
    model = torch.nn.Linear(2, 3)
    assert tensors_of(model, None).keys() == {"model.weight", "model.bias"}
    model.saved = "b*"
    assert tensors_of(model, None).keys() == {"model.bias"}


GUIDE = (REPO / "docs/fsdp2.md").read_text()
(SNIPPET,) = re.findall(r"```python full-state\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dim": 52, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 331}},
        {"model": {"tie_embeddings": True}, "parallel": {"recompute": "full"}},
    ],
    ids=["uneven", "tied"],
)
@pytest.mark.parametrize("ranks", [1, 2])
@distributed()
def test_documented_snippet_gathers_and_scatters_the_full_model(world, ranks, sections):
    gather, call, scatter = SNIPPET.partition("set_model_state_dict(")
    cfg = make_config(**sections)
    model = build(cfg, mesh_for(cfg, world))
    before = hashes(dict(named_parameters(model)))
    scope = {"model": model}
    exec(gather, scope)
    scope["full"] = {name: tensor.clone() for name, tensor in scope["full"].items()}
    if world.rank == 0:
        assert set(scope["full"]) == set(Llama(cfg.model).state_dict())
        assert hashes({name: scope["full"][name] for name in before}) == before
    else:
        assert not scope["full"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    exec(call + scatter, scope)
    assert hashes(dict(named_parameters(model))) == before
