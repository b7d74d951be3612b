"""Loading runs no code and reads no file outside the checkpoint; a checkpoint of another model is refused."""

import io
import os
import pathlib
import pickle
import re
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


def load(folder: pathlib.Path, **model: object) -> None:
    restore(folder, Llama(make_config(model=model).model), None)


# pickles; CANARY: a file that none of them may make
NO_PART = "refusing to unpickle .*no part of a checkpoint"
GETATTR = "cbuiltins\ngetattr\n("
FORMAT = "ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
PICKLES = {
    "function": ("cposix\nsystem\n(S'touch CANARY'\ntR.", NO_PART),
    "builtin": ('cbuiltins\neval\n(S\'open("CANARY", "w")\'\ntR.', NO_PART),
    # protocol 4's nested names reach os.system through an allowed module
    "dotted": (
        "\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93(S'touch CANARY'\ntR.",
        NO_PART,
    ),
    "torch.load": ("ctorch\nload\n(S'CANARY'\ntR.", NO_PART),
    "getattr": (f"{GETATTR}cpathlib\nPath\nS'touch'\ntR.", NO_PART),
    "getattr of an enum": (f"{GETATTR}{FORMAT}S'__init_subclass__'\ntR.", NO_PART),
    "empty": ("", "expected DCP's metadata"),
    "cut": ("\x80", "expected DCP's metadata"),
    "None": ("\x80\x04N.", "expected DCP's metadata"),
    "too long": ("X\xff\xff\xff\x7fa", "expected DCP's metadata"),
    "marks": ("(" * 10**6, "expected DCP's metadata"),
}


@pytest.mark.quick
@pytest.mark.parametrize(("pickled", "words"), PICKLES.values(), ids=PICKLES)
def test_metadata_that_runs_code_or_is_none_is_refused(folder, tmp_path, pickled, words):
    canary = tmp_path / "canary"
    (folder / ".metadata").write_bytes(pickled.replace("CANARY", str(canary)).encode("latin-1"))
    seal(folder)
    assert catalog.problems_of(folder) == []  # its hashes are right
    with refuses(words):
        load(folder)
    assert not canary.exists()


def change(folder: pathlib.Path, how: Callable) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata, next(iter(metadata.storage_data.values())))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)


def of_first(**values: object) -> Callable:
    return lambda metadata, first: [setattr(first, key, value) for key, value in values.items()]


def of_embedding(value: object) -> Callable:
    return lambda metadata, first: metadata.state_dict_metadata.update({EMBEDDING: value})


EMBEDDING = "model.embedding.weight"
NOT_LISTED = "is not in the manifest"
WRONG = {
    "absolute path": (of_first(relative_path="/etc/passwd"), f"'/etc/passwd' {NOT_LISTED}"),
    "missing file": (of_first(relative_path="__9_9.distcp"), NOT_LISTED),
    "negative offset": (of_first(offset=-1), "cannot be read"),
    "beyond the end": (of_first(length=10**12), "cannot be read"),
    "text for a number": (of_first(offset="0"), "cannot be read"),
    "transformed": (of_first(transform_descriptors=["zstd"]), "cannot be read"),
    "bytes": (of_embedding(BytesStorageMetadata()), "BytesStorageMetadata"),
    "number": (of_embedding(5), "is not a tensor"),
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


class Touch(str):
    """Unpickling it makes a file of this name."""

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self}",)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["bomb", "another shape"])
def test_wrong_tensor_is_refused(folder, tmp_path, kind):
    canary = tmp_path / "canary"
    file = io.BytesIO()
    torch.save(Touch(str(canary)) if kind == "bomb" else torch.zeros(3), file)
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


def test_model_may_say_which_parameters_are_saved():
    model = torch.nn.Linear(2, 3)
    assert tensors_of(model, None).keys() == {"model.weight", "model.bias"}
    model.saved = "b*"
    assert tensors_of(model, None).keys() == {"model.bias"}


(SNIPPET,) = re.findall(
    r"```python full-state\n(.*?)```", (REPO / "docs/fsdp2.md").read_text(), re.DOTALL
)
UNEVEN = {"dim": 52, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 331}


@pytest.mark.parametrize("model", [UNEVEN, {"tie_embeddings": True}], ids=["uneven", "tied"])
@pytest.mark.parametrize("ranks", [1, 2])
@distributed()
def test_documented_snippet_gathers_and_scatters_the_full_model(world, ranks, model):
    gather, call, scatter = SNIPPET.partition("set_model_state_dict(")
    cfg = make_config(model=model, parallel={"recompute": "full"})
    sharded = build(cfg, mesh_for(cfg, world))
    before = hashes(dict(named_parameters(sharded)))
    scope: dict = {"model": sharded}
    exec(gather, scope)
    full = scope["full"] = {name: tensor.clone() for name, tensor in scope["full"].items()}
    assert full.keys() == (Llama(cfg.model).state_dict().keys() if world.rank == 0 else set())
    assert world.rank or hashes({name: full[name] for name in before}) == before
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    exec(call + scatter, scope)
    assert hashes(dict(named_parameters(sharded))) == before
