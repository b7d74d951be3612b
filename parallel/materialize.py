"""From meta to device: every rank draws or reads the rows that it owns; the model is the same for any number of ranks.

FSDP2 on its own would not give that: random initialisation of sharded tensors gives every CPU rank the same shard,
and another model for each number of ranks.
"""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import ConfigError
from parallel.mesh import World, all_gather_objects

BLOCK = 65536  # elements drawn by one generator, in whole rows
CHECKED = 2**24  # elements looked at at a time
Distribution = Callable[[str], tuple[float, float] | None]  # name -> (standard deviation, cut-off), None: ones


def materialize(model: nn.Module, distribution: Distribution, seed: int, world: World, device: torch.device) -> None:
    """Gives every tensor of a sharded meta model its storage on `device` and its initial value.

    Each block of about 65,536 elements (whole rows) of each parameter has a generator of its own, seeded by (seed,
    name, block). A rank draws the blocks that its rows touch whole and keeps its part: its work is its share of the
    parameters, its memory its shards and one block. Values are equal across numbers of ranks on one type of device.

    Raises RuntimeError naming the tensors that were left without a value (a forgotten buffer, say): all storage is
    filled with NaN first.
    """
    def draw(name: str, out: Tensor, first: int, shape: torch.Size) -> None:
        draw_rows(out, first, shape, distribution(name), seed, name)

    if empty := _fill(model, draw, world, device):
        raise RuntimeError(f"no initial value for {', '.join(empty)}: give it a distribution (model/llama.py: "
                           "init_distribution), or compute it in forward if it is a constant")


def materialize_from(model: nn.Module, read: Callable[[str, int, Tensor], None], world: World, device: torch.device
                     ) -> None:
    """The same from weights that there are: read(name, first row, out) fills `out` with rows of a parameter, and may
    raise ConfigError, which is raised on every rank then. Each rank reads the rows that it owns and nothing else."""
    problems: tuple[str, ...] = ()
    try:
        empty = _fill(model, lambda name, out, first, shape: read(name, first, out), world, device)
        problems = tuple(f"{name}: holds values that are not numbers (NaN), or was not read" for name in empty)
    except ConfigError as error:
        problems = error.problems
    if problems := [problem for rank in all_gather_objects({"problems": problems}) for problem in rank["problems"]]:
        raise ConfigError(*dict.fromkeys(problems))


def _fill(model: nn.Module, fill: Callable[[str, Tensor, int, torch.Size], None], world: World, device: torch.device
          ) -> list[str]:
    """Storage for every tensor, then fill(name, this rank's rows, the first of them, whole shape) for each parameter.
    Returns the tensors that are left with a NaN: all storage is filled with it first."""
    model.to_empty(device=device)
    tensors = dict(local_tensors(model))
    with torch.no_grad():
        for local in tensors.values():
            if local.is_floating_point():
                local.fill_(math.nan)
        for name, parameter in named_parameters(model):
            sharded = isinstance(parameter, DTensor)
            first = first_row(parameter.shape[0], world.shards, world.shard_rank) if sharded else 0
            fill(name, tensors[name], first, parameter.shape)
        # piece by piece: the answers for a whole tensor would take a quarter of its memory
        return [name for name, local in tensors.items() if local.is_floating_point()
                and any(part.isnan().any() for part in local.view(-1).split(CHECKED))]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """named_parameters() under the names of the plain model: recomputation puts a wrapper's name into them."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def local_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part) of each parameter and buffer."""
    for name, parameter in named_parameters(model):
        yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter
    yield from model.named_buffers()


def first_row(rows: int, shards: int, shard_rank: int) -> int:
    """First row of a shard: FSDP2 deals rows in equal runs of ceil(rows / shards), the last ranks may get fewer."""
    return min(rows, shard_rank * math.ceil(rows / shards))


def draw_rows(out: Tensor, first: int, shape: torch.Size, spread: tuple[float, float] | None, seed: int,
              name: str) -> None:
    """Fills `out`, rows `first` ... of a parameter of this shape."""
    if spread is None:
        out.fill_(1.0)
        return
    std, cut = spread
    width = math.prod(shape[1:])
    per_block = max(1, BLOCK // width)
    generator = torch.Generator(out.device)
    row = first
    while row < first + len(out):
        block, offset = divmod(row, per_block)
        count = min(per_block - offset, first + len(out) - row)
        generator.manual_seed(block_seed(seed, name, block))
        values = torch.empty((min(per_block, shape[0] - block * per_block), *shape[1:]), device=out.device)
        if math.isinf(cut):
            values.normal_(0.0, std, generator=generator)
        else:
            nn.init.trunc_normal_(values, 0.0, std, -cut * std, cut * std, generator=generator)
        out[row - first : row - first + count] = values[offset : offset + count]
        row += count


def block_seed(seed: int, name: str, block: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest(), "big") >> 1
