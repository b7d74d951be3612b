"""Loading runs no code and reads no file outside the checkpoint; a checkpoint of another model is refused."""

import io
import os
import pathlib
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from checkpoint import catalog
from checkpoint.load import Reader, check_tensors, restore
from checkpoint.manifest import read_file, read_manifest, render_manifest
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
# protocol 4's nested names reach os.system through an allowed module
DOTTED = "\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93(S'touch CANARY'\ntR."
PICKLES = {
    "function": ("cposix\nsystem\n(S'touch CANARY'\ntR.", NO_PART),
    "dotted": (DOTTED, NO_PART),
    "getattr": (f"{GETATTR}cpathlib\nPath\nS'touch'\ntR.", NO_PART),
    "getattr of an enum": (f"{GETATTR}{FORMAT}S'__init_subclass__'\ntR.", NO_PART),
    "cut": ("\x80", "expected DCP's metadata"),
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


def hold_bytes(metadata, first) -> None:
    metadata.state_dict_metadata["model.embedding.weight"] = BytesStorageMetadata()


WRONG = {
    "absolute path": (
        of_first(relative_path="/etc/passwd"),
        "'/etc/passwd' is not in the manifest",
    ),
    "bytes": (hold_bytes, "BytesStorageMetadata"),
}


@pytest.mark.quick
@pytest.mark.parametrize("how, words", WRONG.values(), ids=WRONG)
def test_wrong_metadata_is_refused(folder, how, words):
    change(folder, how)
    with refuses(words):
        load(folder)


class Touch(str):
    """Unpickling it makes a file of this name."""

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self}",)


@pytest.mark.quick
def test_tensor_that_runs_code_is_refused(folder, tmp_path):
    canary = tmp_path / "canary"
    file = io.BytesIO()
    torch.save(Touch(str(canary)), file)
    (folder / "__7_0.distcp").write_bytes(file.getvalue())
    change(folder, of_first(relative_path="__7_0.distcp", offset=0, length=file.tell()))
    with refuses("cannot be read: rank 0: ", "[Ww]eights.only"):
        load(folder)
    assert not canary.exists()


@pytest.mark.quick
@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_file_that_the_manifest_does_not_list_is_not_read(folder, name):
    load(folder)
    entries = read_manifest(folder)
    del entries[name]
    (folder / "manifest.json").write_bytes(render_manifest(entries))
    with refuses("is not in the manifest|its own hash or form is wrong"):
        load(folder)
    with refuses("is no name of a file in it"):
        read_file(folder, f"../{folder.name}/{name}")


def test_tool_refuses_a_corrupt_checkpoint(folder, capsys):
    assert Reader(folder).metadata.storage_meta.checkpoint_id is None  # no path of this machine
    flip_last_byte(folder / "__0_0.distcp")
    with refuses("no good checkpoint"):
        read_newest(folder, load)
    assert "corrupt, skipped" in capsys.readouterr().err


# Another model


def test_another_model_is_refused(folder):
    for model in ({"n_layers": 1}, {"ffn_dim": 96}):
        with refuses("of another model"):
            load(folder, **model)
    with refuses("embedding.weight is torch.float32", "this model's is torch.bfloat16"):
        restore(folder, Llama(make_config().model).to(torch.bfloat16), None)


def test_state_of_a_parameter_that_is_frozen_now_is_refused(folder):
    model = Llama(make_config().model)
    model.embedding.weight.requires_grad_(False)
    with refuses(r"has optim\.embedding\.weight\.exp_avg, which this model does not"):
        restore(folder, model, build_optimizer(model, make_config().optim))


@pytest.mark.quick
def test_an_optimizer_without_state_resumes_and_one_that_lost_it_does_not(folder):
    stored = Reader(folder)
    tables = stored.metadata.state_dict_metadata
    stored.metadata.state_dict_metadata = {k: v for k, v in tables.items() if "model." in k}
    model = Llama(make_config().model)
    weights = check_tensors(stored, model, torch.optim.SGD(model.parameters()))
    assert weights.keys() == stored.metadata.state_dict_metadata.keys()
    with refuses("holds weights without the state of an optimizer"):
        check_tensors(stored, model, build_optimizer(model, make_config().optim))


(SNIPPET,) = re.findall(
    r"```python full-state\n(.*?)```", (REPO / "docs/fsdp2.md").read_text(), re.DOTALL
)
UNEVEN = {"dim": 52, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 331}


@pytest.mark.parametrize("model", [UNEVEN, {"tie_embeddings": True}], ids=["uneven", "tied"])
@distributed(ranks=2)
def test_documented_snippet_gathers_and_scatters_the_full_model(world, model):
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
