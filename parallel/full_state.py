"""The whole model in one safetensors file, written from its shards and read into them, parameter by parameter.

Rank 0 alone touches the disk. A fault of the file or of the disk is a ConfigError on every rank, so that none waits for
another.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import ConfigError
from model.safetensors import BLOCK, CODES, DTYPES, differences, memory, read_exactly, read_header, render_header
from parallel.materialize import first_row, named_parameters
from parallel.mesh import World, on_rank_zero


@torch.no_grad()
def write_full(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """Writes every parameter, converted to `dtype` if given. On all ranks together; no rank holds more than one full
    parameter beside its shards. The file is written beside under another name and renamed when all of it is on disk.

    Raises ConfigError on every rank where it cannot be written.
    """
    # wide dtypes first, so that every tensor lies at a multiple of its element's size
    named = sorted(named_parameters(model), key=lambda item: -(dtype or item[1].dtype).itemsize)
    for name, parameter in named:
        if (kind := dtype or parameter.dtype) not in CODES:
            raise ConfigError(f"{path}: {name} is {kind}; only {', '.join(map(str, CODES))} can be written")
    head = render_header((name, dtype or parameter.dtype, parameter.shape) for name, parameter in named)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _disk(path, lambda: _begin(path, temporary, head))
        for _, parameter in named:
            _gather_and_append(temporary, path, parameter.detach(), dtype or parameter.dtype)
        _disk(path, lambda: _finish(path, temporary))
    except ConfigError:
        if dist.get_rank() == 0:
            temporary.unlink(missing_ok=True)
        raise


def _disk(path: Path, work: Callable[[], Any]) -> Any:
    """on_rank_zero, where what the file system refuses is a ConfigError too."""

    def told() -> Any:
        try:
            return work()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None

    return on_rank_zero(told)


def _begin(path: Path, temporary: Path, head: bytes) -> None:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is there and no regular file")
    temporary.write_bytes(head)


def _gather_and_append(temporary: Path, path: Path, parameter: Tensor, dtype: torch.dtype) -> None:
    """A function of its own, so that one full parameter is gone before the next is gathered."""
    parameter = parameter.to(dtype)  # before it travels: a shard is smaller than the whole
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    _disk(path, lambda: _append(temporary, full.contiguous().view(-1)))


def _append(temporary: Path, flat: Tensor) -> None:
    with temporary.open("ab") as file:
        for part in flat.split(BLOCK // flat.itemsize):
            part = part.cpu()
            file.write(memory(part))


def _finish(path: Path, temporary: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


@torch.no_grad()
def read_full(model: nn.Module, path: Path, world: World) -> None:
    """Fills every parameter from a file of any of DTYPES, converted to the parameter's own. On all ranks together:
    rank 0 reads and sends blocks, each rank keeps what lies in its rows and holds no more than its shards and a block.

    Raises ConfigError on every rank, naming all that is wrong; the model is untouched unless the disk fails meanwhile.
    """
    named = dict(named_parameters(model))
    layout = _disk(path, lambda: read_layout(path, {name: list(p.shape) for name, p in named.items()}))
    for name, parameter in named.items():
        sharded = isinstance(parameter, DTensor)
        out = (parameter.to_local() if sharded else parameter).view(-1)
        first = 0  # of our elements; those of a run of rows are a run in the file too
        if sharded:
            first = first_row(parameter.shape[0], world.shards, world.shard_rank) * math.prod(parameter.shape[1:])
        dtype, begin = DTYPES[layout[name][0]], layout[name][1]
        step = BLOCK // dtype.itemsize
        for start in range(0, parameter.numel(), step):
            end = min(start + step, parameter.numel())
            block = _read_and_send(path, begin + start * dtype.itemsize, end - start, dtype, out.device)
            low, high = max(start, first), min(end, first + len(out))
            if low < high:
                out[low - first : high - first] = block[low - start : high - start]
            del block  # before the next is made


def _read_and_send(path: Path, offset: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    block = torch.empty(count, dtype=dtype, device=device)

    def read() -> None:
        host = torch.empty(count, dtype=dtype) if device.type != "cpu" else block
        with path.open("rb") as file:
            read_exactly(file.fileno(), path, offset, memory(host))
        if host is not block:
            block.copy_(host)

    _disk(path, read)
    dist.broadcast(block, src=0)
    return block


def read_layout(path: Path, wanted: dict[str, list[int]]) -> dict[str, tuple[str, int]]:
    """(dtype, first byte in the file) by name. Raises ConfigError naming all that is missing, unexpected or wrong."""
    found, problems = read_header(path)
    if problems := problems + differences(path, found, wanted):
        raise ConfigError(*sorted(problems))
    return {name: (stored.code, stored.offset) for name, stored in found.items()}
