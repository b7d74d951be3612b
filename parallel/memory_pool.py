"""FSDP2's communication buffers, in the memory pool of the computing stream.

torch's caching allocator has a pool of memory for each stream, and a stream cannot take memory from
another stream's pool. FSDP2 allocates all-gathered parameters on one stream and reduced gradients on
another. So the GPU must hold the sum of three peaks, which come at different times. With a single
pool it must hold only the peak of the sum.

In a pool, memory is free as soon as the host drops the last reference. The pool's own stream may
reuse it at once, since its kernels run in the order in which the host launches them. Two things can
go wrong if another stream uses the memory:

1. The other stream writes a new buffer while the computing stream still reads the old content. So
   before each allocation, the other stream waits for everything launched on the computing stream.
2. The host drops a buffer, and the computing stream overwrites it while the other stream still uses
   it. So the host may drop a buffer only if the computing stream is the last to use it, or is bound
   to wait for the last use:
   - The last use of an all-gathered buffer is the copy into the parameters, on the computing stream.
   - A reduced gradient is a parameter's .grad until the optimizer has read it, on the computing
     stream, which waits for all reductions at the end of backward.
   - But if a gradient exists already, FSDP2 adds the new one to it and drops the new one at once,
     while FSDP2's stream still reads it. The same holds if FSDP2 casts the reduced gradient. These
     buffers stay in the pool of FSDP2's stream.

tests/fake_cuda/test_races.py checks both rules, and finds the races of code that breaks one of them.

The price: a prefetched all-gather starts only when the computing stream has finished what was
launched before it. With a prefetch of one unit it still overlaps with a unit's computation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


def share_pool(units: list[list[nn.Module]]) -> None:
    """Makes the units, given by their modules, allocate in the current stream's pool. Call it after
    fully_shard()."""
    compute = torch.cuda.current_stream()
    for modules in units:
        # FSDP2 attaches a unit's state to the first of its modules
        modules[0].set_custom_all_gather(AllGather(compute))
        modules[0].set_custom_reduce_scatter(ReduceScatter(compute, modules[0]))


class AllGather(DefaultAllGather):
    """FSDP2's all-gather, with its buffer allocated on the computing stream."""

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
    """FSDP2's reduce-scatter, with the gradients allocated on the computing stream.

    FSDP2's stream waits for the computing stream before it allocates (rule 1). FSDP2 allocates the
    reduction's input on the computing stream anyway.
    """

    def __init__(self, compute: torch.cuda.Stream, module: nn.Module):
        """module: the first of a unit's modules."""
        super().__init__()
        self.compute = compute
        self.module = module

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # Read from FSDP2's state: at this point the modules hold the unsharded parameters.
        # pyrefly: ignore[not-callable]  # a sharded module
        group = self.module._get_fsdp_state()._fsdp_param_group
        shards = [param.sharded_param for param in group.fsdp_params]
        is_gradient = all(becomes_gradient(shard, dtype) for shard in shards)
        stream = self.compute if is_gradient else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            return super().allocate(size, dtype=dtype, device=device)


def becomes_gradient(shard: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether a gradient reduced in this dtype becomes the shard's .grad as it is (rule 2)."""
    return not shard.requires_grad or (shard.grad is None and shard.dtype == dtype)
