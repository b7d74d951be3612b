"""torch's CUDA allocator in a plan: what it reserves of a GPU's memory for what is allocated.

The allocator never returns memory during a step, and keeps a pool of it for each stream. FSDP2
all-gathers and reduces on streams of its own, so what a run reserves, and runs out of, is what each
pool held at its own peak, with the holes between its blocks. counted.py tells a Pool of every
allocation, and pool_of() says which pool.
"""

import torch

import config
from model.llama import Llama

COMPUTATION = "computation"
REDUCE_SCATTER = "reduce-scatter"
# the streams of FSDP2's FSDPCommContext, by attribute
STREAMS = {
    "all_gather_copy_in_stream": "all-gather",
    "all_gather_stream": "all-gather",
    "reduce_scatter_stream": REDUCE_SCATTER,
    "all_reduce_stream": "all-reduce",
}
# The rules of c10/cuda/CUDACachingAllocator.cpp with expandable segments (launch/command.py):
ROUNDED_TO = 512  # bytes
SMALL = 2**20  # up to so many bytes, a block comes from the small segment of its pool
GRANULE_OF_SMALL = 2 * 2**20  # by which that segment grows
GRANULE = 20 * 2**20  # by which the other grows


def pool_of(stream: str, p: config.Parallel) -> str:
    """The pool of what is allocated on a stream.

    The one place that says so: an option that allocates FSDP2's buffers elsewhere belongs here.
    """
    return stream


def stream_now(model: Llama) -> str:
    """The stream that FSDP2 has made current: it does so on a CPU, too."""
    now = torch.cpu.current_stream()
    # pyrefly: ignore[not-callable]  # a sharded model
    communication = model._get_fsdp_state()._comm_ctx
    for attribute, name in STREAMS.items():
        # FSDP2 makes the streams in its first forward
        if getattr(communication, attribute, None) is now:
            return name
    return COMPUTATION


class Segment:
    """An expandable segment: addresses from 0 on, of which the first `reserved` bytes are mapped.

    A block goes into the smallest hole that is large enough, else behind the last block.
    """

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.reserved = 0
        self.end = 0  # of the last block
        self.holes: dict[int, int] = {}  # size by address

    def allocate(self, size: int) -> int:
        """The address of a new block."""
        fitting = [(room, address) for address, room in self.holes.items() if room >= size]
        if not fitting:
            address = self.end
            self.end += size
            self.reserved = max(self.reserved, rounded_up(self.end, self.granule))
            return address
        room, address = min(fitting)
        del self.holes[address]
        if room > size:
            self.holes[address + size] = room - size
        return address

    def free(self, address: int, size: int) -> None:
        """Frees a block, which becomes one hole with those next to it."""
        for hole, room in self.holes.items():
            if hole + room == address:
                address = hole
                size += room
                break
        self.holes.pop(address, None)
        size += self.holes.pop(address + size, 0)
        if address + size == self.end:
            self.end = address
        else:
            self.holes[address] = size


class Pool:
    """The memory of one stream."""

    def __init__(self) -> None:
        self.small = Segment(GRANULE_OF_SMALL)
        self.large = Segment(GRANULE)

    def segment(self, size: int) -> Segment:
        return self.small if size <= SMALL else self.large

    def allocate(self, size: int) -> int:
        return self.segment(size).allocate(size)

    def free(self, address: int, size: int) -> None:
        self.segment(size).free(address, size)

    @property
    def reserved(self) -> int:
        """Bytes; they never become fewer."""
        return self.small.reserved + self.large.reserved


def rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
