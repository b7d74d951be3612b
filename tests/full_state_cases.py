"""What tests/test_full_state.py runs on several ranks."""

import os
import resource
import signal
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from config import ConfigError
from parallel import full_state
from parallel.full_state import read_full, write_full
from parallel.materialize import named_parameters
from tests.cases import build, digests, process_group, world_for
from tests.conftest import make_config


def clear(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(float("nan"))


def write_all(cases: dict[str, dict], folder: str, dtype: torch.dtype | None = None) -> dict[str, dict[str, str]]:
    """Writes <folder>/<case>.safetensors of every case; hashes of all parameters."""
    found = {}
    with process_group() as world:
        for name, sections in cases.items():
            cfg = make_config(**sections)
            model = build(cfg, world_for(cfg, world))
            # a rank other than 0 has no use for the path
            target = Path(folder) if world.rank == 0 else Path("/nowhere/at/all")
            write_full(model, target / f"{name}.safetensors", dtype)
            found[name] = digests(dict(named_parameters(model)))
            del model
    return found


def read_all(cases: dict[str, dict], folders: list[str], block: int) -> dict[str, list[dict[str, str]]]:
    """Hashes of what this number of ranks reads from each folder, by case; ranks other than 0 are given no file."""
    full_state.BLOCK = block
    found = {}
    with process_group() as world:
        for name, sections in cases.items():
            cfg = make_config(**sections)
            ours = world_for(cfg, world)
            model, found[name] = build(cfg, ours), []
            for folder in folders:
                clear(model)
                read_full(model, (Path(folder) if world.rank == 0 else Path("/nowhere")) / f"{name}.safetensors", ours)
                found[name].append(digests(dict(named_parameters(model))))
            del model
    return found


def read_refused(paths: list[str]) -> list[str]:
    """The error of read_full for each path; every one must leave the model as it was."""
    found = []
    with process_group() as world:
        model = build(make_config(), world)
        before = [p.to_local().clone() for p in model.parameters()]
        for path in paths:
            try:
                read_full(model, Path(path), world)
                found.append("none")
            except ConfigError as error:
                found.append(str(error))
            assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before))
        del model
    return found


def write_refused(folder: str) -> list[str]:
    """The errors of write_full below a missing folder, onto a folder, and on a disk that fills up (a limit)."""
    found = []
    with process_group() as world:
        model = build(make_config(), world)
        # the second matrix does not fit any more; Python ignores the signal, so that the write fails with an error
        for path, limit in (("missing/a", None), ("", None), ("full", 100_000)):
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit or unlimited[0], unlimited[1]))
            try:
                write_full(model, Path(folder) / path)
                found.append("none")
            except ConfigError as error:
                found.append(str(error))
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        del model
    return found


def write_killed(path: str) -> None:
    """Rank 0 is killed after its third parameter."""
    original, calls = full_state._append, []

    def append(*arguments):
        original(*arguments)
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    full_state._append = append
    with process_group() as world:
        write_full(build(make_config(), world), Path(path))


def shapes_and_plain(path: str) -> bool:
    """A model of plain tensors, a scalar, an empty one and a mixture of dtypes among them, comes back as it was."""
    with process_group() as world:
        model = torch.nn.Module()
        for name, value in {"short": torch.randn(3).bfloat16(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4),
                            "matrix": torch.randn(5, 3), "line": torch.randn(3, 5).half()}.items():
            model.register_parameter(name, torch.nn.Parameter(value))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        write_full(model, Path(path))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        read_full(model, Path(path), world)
        same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return same


class LargestBytes(TorchDispatchMode):
    """The largest storage in bytes that anything within it had, what DTensor does inside included."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: what it does with its local tensors comes back to us
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.found = max(self.found, tensor.untyped_storage().nbytes())
        return result


def largest(path: str, block: int) -> dict[str, int]:
    """Bytes of the largest storages that writing and reading touched, of the largest shard and parameter."""
    full_state.BLOCK = block
    with process_group() as world:
        model = build(make_config(model={"vocab_size": 4001}), world)
        with LargestBytes() as write:
            write_full(model, Path(path))
        with LargestBytes() as read:
            read_full(model, Path(path), world)
        found = {"write": write.found, "read": read.found, "full": max(p.nbytes for p in model.parameters()),
                 "shard": max(p.to_local().untyped_storage().nbytes() for p in model.parameters())}
        del model
    return found
