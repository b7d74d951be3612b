"""No checkpoint runs code, and none reads or writes outside its folder: bombs, paths, links, wrong metadata."""

import io
import os
import pathlib
import pickle
import shutil
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from checkpoint import catalog
from checkpoint.load import Reader, restore
from checkpoint.manifest import hash_files, render_manifest
from config import ConfigError
from model.llama import Llama
from tests.cases import digests
from tests.conftest import REPO, make_config, seal
from tests.warm import warm_python


@pytest.fixture
def folder(saved_by_two, tmp_path):
    return shutil.copytree(saved_by_two[0], tmp_path / "step-00000003")


class Bomb:
    """Unpickling it calls a function, by the path of names that is given."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


def by_name(module: str, name: str, argument: str) -> bytes:
    """A protocol-0 pickle that calls module.name(argument)."""
    return f"c{module}\n{name}\n(S'{argument}'\ntR.".encode()


def nested(canary) -> bytes:
    """By protocol 4's dotted names: torch.serialization's own os.system."""
    text = f"touch {canary}".encode()
    return (
        b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c"
        + bytes([len(text)])
        + text
        + b"\x85R."
    )


BOMBS = {
    "os.system": lambda canary: pickle.dumps(Bomb(os.system, f"touch {canary}")),
    "global": lambda canary: by_name("posix", "system", f"touch {canary}"),
    "eval": lambda canary: by_name("builtins", "eval", f'open("{canary}", "w")'),
    "getattr": lambda canary: pickle.dumps(Bomb(getattr, pathlib.Path, "touch"), 2),
    "getattr of an enum": lambda canary: pickle.dumps(
        Bomb(getattr, _MEM_FORMAT_ENCODING, "__init_subclass__"), 2
    ),
    "getattr of an enum, by its name today": lambda canary: pickle.dumps(
        Bomb(getattr, _MEM_FORMAT_ENCODING, "__init_subclass__")
    ),
    "torch.load": lambda canary: by_name("torch", "load", f"{canary}"),
    "dotted": nested,
    "Path.touch": lambda canary: pickle.dumps(Bomb(pathlib.Path.touch, canary)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_in_the_metadata_are_refused(folder, tmp_path, bomb):
    canary = tmp_path / "canary"
    (folder / ".metadata").write_bytes(BOMBS[bomb](canary))
    seal(folder)
    assert not catalog.problems_of(folder)  # its hashes are right
    with pytest.raises(ConfigError, match=r"refusing to unpickle [\w.]+: no part of a checkpoint"):
        restore(folder, Llama(make_config().model), None)
    assert not canary.exists()
    if "getattr" not in bomb and bomb != "torch.load":
        # steps of one, and a second pickle: no canary
        pickle.loads((folder / ".metadata").read_bytes())
        assert canary.exists()


def test_enums_as_python_3_11_0_pickles_them(folder, monkeypatch):
    """And as 3.11.3 still does: by getattr."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    change(folder, lambda metadata: None)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    restore(folder, Llama(make_config().model), None)


def change(folder: pathlib.Path, how) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)


def first(metadata):
    return next(iter(metadata.storage_data.values()))


def set_first(**values):
    return lambda metadata: [setattr(first(metadata), key, value) for key, value in values.items()]


def bytes_entry(metadata):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata["model.embedding.weight"] = BytesStorageMetadata()


def number(metadata):
    metadata.state_dict_metadata["model.embedding.weight"] = 5


def gap(metadata):
    metadata.state_dict_metadata["model.embedding.weight"].chunks.pop()


def outside(metadata):
    chunk = metadata.state_dict_metadata["model.embedding.weight"].chunks[0]
    chunk.offsets = torch.Size([10**6, 0])


WRONG = {
    "absolute path": (
        set_first(relative_path="/etc/passwd"),
        "is said to lie at bytes 0 to .* of '/etc/passwd'",
    ),
    "path that climbs": (
        set_first(relative_path="../step-00000003/.metadata"),
        "is said to lie at bytes 0 to",
    ),
    "missing file": (
        set_first(relative_path="__9_9.distcp"),
        "of '__9_9.distcp', which has 0 in the manifest",
    ),
    "negative offset": (set_first(offset=-1), "is said to lie at bytes -1"),
    "beyond the end": (set_first(length=10**12), "is said to lie at bytes"),
    "text for a number": (set_first(offset="0"), "TypeError"),
    "transformed": (set_first(transform_descriptors=["zstd"]), "is stored transformed"),
    "an object": (bytes_entry, "BytesStorageMetadata"),
    "a number": (number, "model.embedding.weight is not a tensor"),
    "a gap": (gap, "the chunks of model.embedding.weight do not make up its shape"),
    "a chunk outside": (outside, "the chunks of model.embedding.weight do not make up its shape"),
    "no metadata": (lambda metadata: metadata.__dict__.clear(), "expected DCP's metadata"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_metadata_is_refused(folder, wrong):
    how, told = WRONG[wrong]
    change(folder, how)
    with pytest.raises(ConfigError, match=told):
        restore(folder, Llama(make_config().model), None)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"\x80\x04N.", b"X\xff\xff\xff\x7fa", b"(" * 10**6, b"\x8e" + b"\xff" * 8],
)
def test_a_wrong_pickle_is_refused(folder, content):
    (folder / ".metadata").write_bytes(content)
    seal(folder)
    with pytest.raises(ConfigError, match=r"\.metadata: expected DCP's metadata"):
        restore(folder, Llama(make_config().model), None)


def test_a_state_that_is_too_long_is_not_read(folder):
    state = (folder / "state.json").read_bytes()
    for size, problems in ((2**20, 0), (2**20 + 1, 1)):
        (folder / "state.json").write_bytes(state.ljust(size))
        seal(folder)
        found = catalog.problems_of(folder)
        assert len(found) == problems and all(
            "state.json: expected at most 1048576 bytes" in text for text in found
        )


def test_a_linked_shard_is_refused(folder, tmp_path):
    (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"__1_0\.distcp: expected a regular file"):
        restore(folder, Llama(make_config().model), None)


def test_a_bomb_for_a_tensor_is_refused(folder, tmp_path):
    canary, bomb = tmp_path / "canary", io.BytesIO()
    torch.save(Bomb(os.system, f"touch {canary}"), bomb)
    (folder / "__7_0.distcp").write_bytes(bomb.getvalue())
    change(folder, set_first(relative_path="__7_0.distcp", offset=0, length=len(bomb.getvalue())))
    with pytest.raises(
        ConfigError, match=r"cannot be read: rank 0: UnpicklingError: .*[Ww]eights.only"
    ):
        restore(folder, Llama(make_config().model), None)
    assert not canary.exists()


def test_a_tensor_of_another_shape_is_refused(folder):
    other = io.BytesIO()
    torch.save(torch.zeros(3), other)
    (folder / "__7_0.distcp").write_bytes(other.getvalue())
    change(folder, set_first(relative_path="__7_0.distcp", offset=0, length=len(other.getvalue())))
    with pytest.raises(ConfigError, match="cannot be read: rank 0"):
        restore(folder, Llama(make_config().model), None)


def test_the_metadata_that_is_written_can_be_read(folder):
    assert Reader(folder).metadata.storage_meta.checkpoint_id is None
    reference = pickle.loads((folder / ".metadata").read_bytes())
    assert Reader(folder).metadata.state_dict_metadata == reference.state_dict_metadata


def test_a_file_elsewhere_is_refused_though_the_manifest_lists_it(folder, tmp_path):
    (folder / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    change(
        folder,
        lambda metadata: [
            setattr(info, "relative_path", "../__0_0.distcp")
            for info in metadata.storage_data.values()
            if "__0_" in info.relative_path
        ],
    )
    names = [".metadata", "__1_0.distcp", "state.json"]
    entry = hash_files(tmp_path, ["__0_0.distcp"])["__0_0.distcp"]
    (folder / "manifest.json").write_bytes(
        render_manifest(hash_files(folder, names) | {"../__0_0.distcp": entry})
    )
    assert "is no name of a file in it" in catalog.problems_of(folder)[0]
    with pytest.raises(ConfigError, match=r"'\.\./__0_0\.distcp' is no name of a file in it"):
        restore(folder, Llama(make_config().model), None)


@pytest.mark.parametrize("name", [".metadata", "state.json", "__0_0.distcp", "__1_0.distcp"])
def test_a_file_that_the_manifest_does_not_list_is_not_read(folder, name):
    """Nothing would notice that it is not what was written."""
    restore(folder, Llama(make_config().model), None)
    listed = {path.name for path in folder.iterdir()} - {"manifest.json", name}
    (folder / "manifest.json").write_bytes(render_manifest(hash_files(folder, sorted(listed))))
    told = (
        f"'{name}', which has 0 in the manifest"
        if "distcp" in name
        else "its own hash or form is wrong"
    )
    with pytest.raises(ConfigError, match=told):
        restore(folder, Llama(make_config().model), None)
    assert "distcp" in name or told in catalog.problems_of(folder)[0]


def test_torchs_own_tool_reads_a_checkpoint(saved_by_two, tmp_path):
    subprocess.run(
        [
            warm_python(),
            "-m",
            "torch.distributed.checkpoint.format_utils",
            "dcp_to_torch",
            saved_by_two[0],
            tmp_path / "out.pt",
        ],
        check=True,
        capture_output=True,
    )
    assert digests(torch.load(tmp_path / "out.pt")) == saved_by_two[1]


@pytest.mark.parametrize("spoil", ["bomb", "flip", "deep state", "listed state"])
def test_commands_refuse_it_without_a_traceback(folder, tmp_path, spoil):
    canary = tmp_path / "canary"
    if spoil == "bomb":
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(os.system, f"touch {canary}")))
    elif spoil == "deep state":
        (folder / "state.json").write_text("[" * 10**6)
    elif spoil == "listed state":
        (folder / "state.json").write_text('{"step": 3, "config": {"model": [1, 2]}}')
    if spoil != "flip":
        seal(folder)
    else:
        data = bytearray((folder / "__0_0.distcp").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "__0_0.distcp").write_bytes(data)
    done = subprocess.run(
        [warm_python(), "-m", "generate", folder, "--prompt", "x"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) < 30 and not canary.exists()
