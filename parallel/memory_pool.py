"""FSDP2's communication buffers in the memory pool of the stream that computes.

torch's caching allocator keeps a pool of memory for each stream, and a stream cannot take memory
from another's pool. FSDP2 allocates what it all-gathers on one stream and reduced gradients on
another, so the GPU must hold the sum of three peaks, which come at different times. In one pool it
must hold only the peak of the sum.

In a pool, memory is free as soon as the host drops the last reference. The pool's own stream may
reuse it at once, as its kernels run in the order in which the host launches them. Two things can
go wrong if another stream uses the memory:

1. It writes a new buffer while the computing stream still reads what was there before. So before
   each allocation, the other stream waits for all that the computing stream has been given.
2. The computing stream overwrites a buffer, after the host has dropped it, while the other stream
   still uses it. So the host may drop a buffer only once the computing stream has to wait for, or
   itself is, the last to use it:
   - An all-gathered buffer is last read by the copy into the parameters, on the computing stream.
   - A reduced gradient is a parameter's .grad until the optimizer has read it, on the computing
     stream, which at the end of backward waits for all reductions.
   - But if a gradient exists already, FSDP2 adds the new one to it and drops that at once, while
     its own stream still reads it; likewise where it casts the reduced gradient. These stay in
     the pool of FSDP2's stream.

tests/fake_cuda/test_races.py checks both, and finds the races of code that breaks one of them.

The price: an all-gather that is issued ahead starts when the computing stream is done with what
was launched before it. With prefetch of one unit it still overlaps with a unit's computation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


def share_pool(units: list[list[nn.Module]]) -> None:
    """Has the units, by their modules, allocate in the pool of the current stream. Call it after
    fully_shard()."""
    compute = torch.cuda.current_stream()
    for modules in units:
        # FSDP2 attaches a unit's state to the first of its modules
        modules[0].set_custom_all_gather(AllGather(compute))
        modules[0].set_custom_reduce_scatter(ReduceScatter(compute, modules[0]))


class AllGather(DefaultAllGather):
    """FSDP2's all-gather, of which the buffer is allocated on the computing stream."""

    def __init__(self, compute: torch.cuda.Stream):
        super().__init__()
        self.compute = compute

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        torch.cuda.current_stream().wait_stream(self.compute)  # rule 1
        with torch.cuda.stream(self.compute):
            return super().allocate(size, dtype=dtype, device=device)


class ReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, of which gradients are allocated on the computing stream.

    FSDP2's own stream waits for that one before it allocates (rule 1). It allocates the buffer to
    reduce on the computing stream anyway.
    """

    def __init__(self, compute: torch.cuda.Stream, module: nn.Module):
        """module: the first of a unit's."""
        super().__init__()
        self.compute = compute
        self.module = module

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # the shards: the modules' own parameters are the unsharded ones meanwhile
        # pyrefly: ignore[not-callable]  # a sharded module
        group = self.module._get_fsdp_state()._fsdp_param_group
        shards = [param.sharded_param for param in group.fsdp_params]
        is_gradient = all(becomes_gradient(shard, dtype) for shard in shards)
        stream = self.compute if is_gradient else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            return super().allocate(size, dtype=dtype, device=device)


def becomes_gradient(shard: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether what FSDP2 reduces in this dtype becomes the shard's .grad as it is (rule 2)."""
    if not shard.requires_grad:
        return True  # it has no gradient
    return shard.grad is None and shard.dtype == dtype
