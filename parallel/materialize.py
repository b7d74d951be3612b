"""From the meta device to a real one: each rank initializes or reads only its local shards.

Initial values do not depend on the mesh. If every rank drew its shards from one seed instead, all
shards would be equal, and the model would depend on the number of ranks.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import config
from config import ConfigError
from model.init import Fill
from model.llama import Linear, Llama, after_weight_update, named_parameters, plain_name
from parallel.random_numbers import seed_generators
from parallel.ranks import on_each_rank

RNG_BLOCK = 65536  # elements drawn with one seed, rounded to full rows
CHECK_CHUNK = 2**24  # elements checked at a time, for NaN and between replicas

# The index of a shard's first element in the full parameter, one number per dimension.
ShardOffset = tuple[int, ...]
# read(name, shard_offset, out) fills `out` with the parameter's shard that begins at the offset. It
# returns False for a parameter that it does not have, such as a new adapter's.
ReadShard = Callable[[str, ShardOffset, Tensor], bool | None]


def materialize(
    model: Llama, seed: int, device: torch.device, read: ReadShard | None = None
) -> None:
    """Gives every tensor of a meta model, sharded or not, storage on `device` and values.

    Parameters that `read` does not have, and buffers, get the values that their module declares
    (model/init.py). The generators are seeded by (seed, name, block) for each block of about 65,536
    elements (full rows). A rank draws the blocks that overlap its shard, so the values do not depend
    on the mesh. They may depend on the type of device.

    Raises ConfigError on all ranks if `read` raises it on any rank, or if a tensor remains without
    values.
    """
    allocate(model, device)
    on_each_rank(lambda: initialize(model, seed, read))
    # This may communicate, so it comes after all ranks have their values.
    after_weight_update(model)


def open_pretrained(cfg: config.Config, step: int) -> Any:
    """Opens the Hugging Face folder model.init_from, from which materialize() reads the weights.

    Returns an extras.huggingface.weights.Weights, or None if the folder is not needed: without
    model.init_from, and if a run resumes after `step` and stores all weights.
    """
    if not cfg.model.init_from:
        return None
    from extras.huggingface.weights import open_weights

    return open_weights(cfg, step)


def allocate(model: nn.Module, device: torch.device) -> None:
    """model.to_empty(), but tied weights stay tied: torch creates a parameter for each module."""
    before = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            before.append((module, name, parameter))
    model.to_empty(device=device)
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in before:
        shared = allocated.setdefault(parameter, getattr(module, name))
        setattr(module, name, shared)


@torch.no_grad()
def initialize(model: Llama, seed: int, read: ReadShard | None) -> None:
    """Fills this rank's shard of every tensor.

    A quantized layer computes its stored parameters itself, from the weight that read_or_draw()
    fills in. Raises ConfigError naming the tensors that remain without values.
    """

    def read_or_draw(name: str, shard_offset: ShardOffset, out: Tensor, shape: torch.Size) -> None:
        if read is None or read(name, shard_offset, out) is False:
            draw(out, shard_offset, shape, partial(call_fill, model, name), seed, name)

    tensors = dict(local_tensors(model))
    for local in tensors.values():
        if local.is_floating_point():
            local.fill_(math.nan)  # the check below finds what nothing replaces

    for name, parameter in named_parameters(model):
        module = model.get_submodule(name.rpartition(".")[0])
        _, shard_offset = shard_shape_and_offset(parameter)
        if is_quantized(module):
            module.quantize(name, shard_offset, tensors[name], read_or_draw)
        else:
            read_or_draw(name, shard_offset, tensors[name], parameter.shape)
    initialize_buffers(model, seed)

    problem = "holds values that are not finite (NaN, infinity)"
    if read is not None:
        problem += ", or was not read"
    problems = [f"{name}: {problem}" for name, local in tensors.items() if not is_finite(local)]
    if problems:
        raise ConfigError(*problems)


@torch.no_grad()
def initialize_buffers(model: Llama, seed: int) -> None:
    """Fills every buffer, on each rank. Checkpoints store no buffers."""
    for wrapped_name, buffer in model.named_buffers():
        path, _, attribute = wrapped_name.rpartition(".")
        name = plain_name(wrapped_name)
        if attribute not in model.get_submodule(path)._non_persistent_buffers_set:
            raise ConfigError(
                f"{name}: a persistent buffer, but checkpoints store parameters only: "
                f'register_buffer("{attribute}", ..., persistent=False) if it is constant, else '
                "make it a parameter with requires_grad=False"
            )
        seed_generators(buffer.device, seed, name)
        call_fill(model, name, buffer, 0)


def call_fill(model: Llama, name: str, rows: Tensor, first_row: int) -> None:
    """Fills rows of the parameter or buffer of this name, as its module declares.

    Raises ConfigError if it declares nothing.
    """
    path, _, attribute = name.rpartition(".")
    fills = getattr(model.get_submodule(path), "init", {})
    if attribute not in fills:
        raise ConfigError(
            f"{name}: nothing declares its initial values (one given to nn.Parameter is not kept); add "
            f'them to the dict `init` in __init__ of its module, as "{attribute}": normal(0.02), or '
            "constant(0.1), or a function of your own (model/init.py)"
        )
    fills[attribute](rows, first_row)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module computes its stored parameters from a weight, as NF4Linear does."""
    return isinstance(module, Linear) and module.quantize is not None


def is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # In chunks: isfinite() of the full tensor would take a quarter of its memory.
    return all(chunk.isfinite().all() for chunk in tensor.view(-1).split(CHECK_CHUNK))


def local_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, local tensor) of each parameter."""
    for name, parameter in named_parameters(model):
        yield name, local_tensor(parameter)


def local_tensor(t: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself if it is none."""
    return t.to_local() if isinstance(t, DTensor) else t


def shard_shape_and_offset(tensor: Tensor) -> tuple[tuple[int, ...], ShardOffset]:
    """The shape of a tensor's local shard, and its offset in the full tensor, from the placements.

    Shards of the last ranks may be smaller than others, or empty.
    """
    if isinstance(tensor, DTensor):
        return compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(tensor.shape), (0,) * tensor.ndim


def draw(
    out: Tensor, shard_offset: ShardOffset, shape: torch.Size, fill: Fill, seed: int, name: str
) -> None:
    """Fills `out`, a shard of a parameter whose full shape is `shape`."""
    if not out.numel():
        return
    rows_per_block = max(1, RNG_BLOCK // math.prod(shape[1:]))
    first_row = shard_offset[0]
    end_row = first_row + len(out)
    columns = tuple(
        slice(first, first + size) for first, size in zip(shard_offset[1:], out.shape[1:])
    )
    for block in range(first_row // rows_per_block, math.ceil(end_row / rows_per_block)):
        seed_generators(out.device, seed, name, block)
        block_begin = block * rows_per_block
        block_end = min(block_begin + rows_per_block, shape[0])
        values = torch.full((block_end - block_begin, *shape[1:]), math.nan, device=out.device)
        fill(values, block_begin)
        # Copy the rows that the block and the shard share.
        begin = max(block_begin, first_row)
        end = min(block_end, end_row)
        rows = slice(begin - block_begin, end - block_begin)
        out[begin - first_row : end - first_row] = values[(rows, *columns)]
