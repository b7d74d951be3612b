"""FSDP2's collectives without other ranks: each takes as long as a network would.

A collective copies this rank's shard, then sleeps, on the network's one stream: as NCCL's on one
communicator, all run in the order in which they were issued, and the stream that issued one waits
for it. Values are those of N equal ranks: finite, and no training. It holds one multiprocessor.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as defaults

from parallel import memory_pool

LATENCY = 30e-6  # seconds of a collective without bytes


def timed(launch: Callable[[], Any]) -> list[torch.cuda.Event]:
    """Launches on the current stream, between two events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    launch()
    events[1].record()
    return events


def seconds_of(events: list[torch.cuda.Event]) -> float:
    return events[0].elapsed_time(events[1]) / 1e3


class Network:
    """The only communicator of a rank of so many."""

    def __init__(self, ranks: int, device: torch.device):
        self.ranks = ranks
        self.on_gpu = device.type == "cuda"
        self.bus = 0.0  # GB/s that a rank sends: nccl-tests' bus bandwidth; 0: takes no time
        self.asked: list[float] = []  # seconds that each collective should take
        self.events: list[list[torch.cuda.Event]] = []  # around each
        if self.on_gpu:
            self.stream = torch.cuda.Stream(priority=-1)
            rows = torch.empty(ranks, 2**27 // ranks, device=device)
            for _ in range(2):  # the first warms up
                slept = timed(lambda: torch.cuda._sleep(10**8))
                copied = timed(lambda: rows[1:].copy_(rows[0].expand(ranks - 1, -1)))
                torch.cuda.synchronize()
            self.cycles = 10**8 / seconds_of(slept)  # of _sleep(), per second
            self.copied = rows.nbytes / seconds_of(copied)  # bytes per second

    def run(self, move: Callable[[], Any], size: int, written: int, async_op: bool) -> Any:
        """move() writes so many bytes. size: bytes of the larger buffer."""
        share = (self.ranks - 1) / self.ranks
        seconds = LATENCY + size * share / (self.bus * 1e9) if self.bus else 0.0
        self.asked.append(seconds)
        if not self.on_gpu:
            move()
            time.sleep(seconds)
            return None

        def occupy() -> None:
            move()
            remaining = seconds - written / self.copied
            if remaining > 0:
                torch.cuda._sleep(int(remaining * self.cycles))

        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            events = timed(occupy)
        self.events.append(events)
        if async_op:
            return Pending(events[1])
        caller.wait_event(events[1])
        return None

    def end_step(self) -> dict[str, float]:
        """Of a step that is done: its collectives, the seconds that they should have taken, and
        took. Adapts to the GPU's clock, which falls under load."""
        number, asked = len(self.asked), sum(self.asked)
        took = sum(map(seconds_of, self.events))
        if asked and took:
            self.cycles *= min(1.1, max(0.9, asked / took))
        self.asked, self.events = [], []
        return {"collectives": number, "asked": asked, "took": took}


class Pending(dist._Work):
    """A collective that its caller's stream does not wait for yet."""

    def __init__(self, end: torch.cuda.Event):
        super().__init__()
        self.end = end

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self.end)
        return True


def attach(network: Network, unit: Any, pooled: bool) -> None:
    """Has an FSDP2 unit communicate over the network. Allocations stay torch's, or the pool's."""
    bases: Any = (defaults.DefaultAllGather, ()), (defaults.DefaultReduceScatter, ())
    if pooled:
        compute = torch.cuda.current_stream()
        bases = (memory_pool.AllGather, (compute,)), (memory_pool.ReduceScatter, (compute, unit))
    (gather_base, of_gather), (reduce_base, of_reduce) = bases

    class Gather(gather_base):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):  # torch's names
            others = output_tensor.view(group.size(), -1)[1:]  # row 0 is the input
            copy = lambda: others.copy_(input_tensor.expand_as(others))  # noqa: E731
            return network.run(copy, output_tensor.nbytes, output_tensor.nbytes, async_op)

    class Reduce(reduce_base):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            shard = input_tensor[: output_tensor.numel()]
            factor = group.size() if op == dist.ReduceOp.SUM else 1  # else a mean of equal ones
            reduce = lambda: torch.mul(shard, factor, out=output_tensor)  # noqa: E731
            return network.run(reduce, input_tensor.nbytes, output_tensor.nbytes, async_op)

    unit.set_custom_all_gather(Gather(*of_gather))
    unit.set_custom_reduce_scatter(Reduce(*of_reduce))
