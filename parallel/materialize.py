"""From meta to device: each rank initializes or loads only its local shards. Initial values do not depend on the mesh.

With FSDP2 alone all CPU ranks would draw the same random shard, and the model would depend on the number of ranks.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import config
from config import ConfigError
from model.llama import Linear, Llama, after_weight_update, named_parameters
from parallel.ranks import on_each_rank

RNG_BLOCK = 65536  # elements drawn from one generator, rounded to full rows
CHECK_CHUNK = 2**24  # elements checked at a time, for NaN and between replicas
# where a rectangle begins in its full parameter, one number per dimension
Offsets = tuple[int, ...]


def materialize(
    model: Llama,
    seed: int,
    device: torch.device,
    read: Callable[[str, Offsets, Tensor], bool | None] | None = None,
) -> None:
    """Gives every tensor of a meta model, sharded or not, storage on `device` and values, read or randomly initialized.

    read(name, offsets, out) fills `out` with the rectangle of a parameter that begins at `offsets`. It returns False
    for a name that it does not have, such as a new adapter's; that parameter is initialized. Each block of about 65,536
    elements (full rows) of each parameter has its own generator, seeded by (seed, name, block). A rank draws the blocks
    that overlap its shard and keeps the shard. On one type of device, values do not depend on the mesh. Raises
    ConfigError on all ranks if `read` raises it on any, or if a tensor is left without a value or a distribution.
    """
    allocate(model, device)
    on_each_rank(lambda: initialize(model, seed, read))
    after_weight_update(model)  # may be a collective: not before all ranks have their values


@torch.no_grad()
def initialize(
    model: Llama, seed: int, read: Callable[[str, Offsets, Tensor], bool | None] | None
) -> None:
    """Gives this rank's part of every tensor its values. A module that computes its stored parameters from others, such
    as NF4's, does so in a method `quantize` of its own, which calls `read_or_draw` for them. Raises ConfigError naming
    the tensors that are left without values: all begin as NaN."""

    def read_or_draw(name: str, offsets: Offsets, out: Tensor, shape: torch.Size) -> None:
        if read is None or read(name, offsets, out) is False:
            draw(out, offsets, shape, model.init_distribution(name), seed, name)

    tensors = dict(local_tensors(model))
    for local in filter(torch.is_floating_point, tensors.values()):
        local.fill_(math.nan)
    for name, parameter in named_parameters(model):
        offsets, module = (
            local_rectangle(parameter)[1],
            model.get_submodule(name.rpartition(".")[0]),
        )
        if isinstance(module, Linear) and module.quantize:
            module.quantize(name, offsets, tensors[name], read_or_draw)
        else:
            read_or_draw(name, offsets, tensors[name], parameter.shape)
    lacks = (
        (
            "no initial value: give it a distribution (model/llama.py: init_std), or compute it in forward if it is a "
            "constant"
        )
        if read is None
        else "holds values that are not finite (NaN, infinity), or was not read"
    )
    # in chunks: isfinite() of an entire tensor would take a quarter of its memory
    if problems := [
        f"{name}: {lacks}"
        for name, local in tensors.items()
        if local.is_floating_point()
        and not all(part.isfinite().all() for part in local.view(-1).split(CHECK_CHUNK))
    ]:
        raise ConfigError(*problems)


def allocate(model: nn.Module, device: torch.device) -> None:
    """model.to_empty(), after which tied weights are tied again: it makes one new parameter per module."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    model.to_empty(device=device)
    made: dict[Tensor, nn.Parameter] = {}
    for module, name, before in places:
        setattr(module, name, made.setdefault(before, getattr(module, name)))


def local_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, local tensor) of each parameter and buffer."""
    for name, parameter in named_parameters(model):
        yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter
    yield from model.named_buffers()


def local_rectangle(tensor: Tensor) -> tuple[tuple[int, ...], Offsets]:
    """(shape, offsets) of a tensor's local shard, from its placements. The last ranks' may be smaller or empty."""
    if isinstance(tensor, DTensor):
        return compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(tensor.shape), (0,) * tensor.ndim


def draw(
    out: Tensor,
    offsets: Offsets,
    shape: torch.Size,
    distribution: tuple[float, float] | None,
    seed: int,
    name: str,
) -> None:
    """Initializes `out`, the rectangle at `offsets` of a parameter. distribution: from Llama.init_distribution()."""
    if distribution is None:
        out.fill_(1.0)
        return
    std, cutoff = distribution
    rows_per_block = max(1, RNG_BLOCK // math.prod(shape[1:]))
    columns = tuple(slice(begin, begin + size) for begin, size in zip(offsets[1:], out.shape[1:]))
    generator = torch.Generator(out.device)
    row, end = offsets[0], offsets[0] + len(out)
    while row < end and out.numel():
        block, within = divmod(row, rows_per_block)
        count = min(rows_per_block - within, end - row)
        key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(key, "big") >> 1)
        values = torch.empty(
            (min(rows_per_block, shape[0] - block * rows_per_block), *shape[1:]), device=out.device
        )
        if math.isinf(cutoff):
            values.normal_(0.0, std, generator=generator)
        else:
            nn.init.trunc_normal_(
                values, 0.0, std, -cutoff * std, cutoff * std, generator=generator
            )
        out[row - offsets[0] :][:count] = values[(slice(within, within + count), *columns)]
        row += count


def open_pretrained(cfg: config.Config, step: int) -> Any:
    """The weights of the Hugging Face folder model.init_from, as far as a run that resumes after `step` reads them
    (extras/huggingface/weights.py: Weights); None without that option."""
    if not cfg.model.init_from:
        return None
    from extras.huggingface.weights import open_weights

    return open_weights(cfg, step)
