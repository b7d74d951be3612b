"""Finds memory that one stream uses while another still may: races that torch's caching allocator
makes possible, by giving a freed block to the next who asks.

No kernel runs on the fake, but the host says which operators it launches on which stream, and which
events the streams record and wait for. This is enough to know, for two uses of the same memory,
whether a GPU would be free to run them at the same time. Unlike torch.cuda._sanitizer, whose clocks
it uses, it remembers the uses of memory that was freed since.

Eager mode only: what Inductor compiles launches its kernels past torch's dispatcher.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as gpu_trace
from torch.cuda._sanitizer import StreamSynchronizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Use(NamedTuple):
    start: int  # address of the first byte
    end: int
    stream: int
    writes: bool
    operator: str


class Races(TorchDispatchMode):
    """Within it, `found` grows by a line for each race. For one process, once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.clocks = StreamSynchronizations()
        self.number = 0  # of operators so far
        self.last: dict[Use, int] = {}  # number of the operator that last used it so
        self.follow_streams()

    def follow_streams(self) -> None:
        """Has torch report what streams and events do from now on."""
        clocks = self.clocks
        torch._C._activate_gpu_trace()
        gpu_trace.register_callback_for_stream_creation(clocks.create_stream)
        gpu_trace.register_callback_for_event_creation(clocks.create_event)
        gpu_trace.register_callback_for_event_deletion(clocks.delete_event)
        gpu_trace.register_callback_for_event_record(clocks.record_state)
        gpu_trace.register_callback_for_event_wait(
            lambda event, stream: clocks.stream_wait_for_event(stream, event)
        )
        gpu_trace.register_callback_for_event_synchronization(clocks.all_streams_wait_for_event)
        gpu_trace.register_callback_for_stream_synchronization(clocks.all_streams_wait_for_stream)
        gpu_trace.register_callback_for_device_synchronization(clocks.sync_all_streams)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        if not operator.is_view:
            self.note(operator, args, kwargs, out)
        return out

    def note(self, operator: Any, args: tuple, kwargs: dict, out: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.number += 1
        self.clocks.update_seq_num(stream, self.number)
        for tensor, writes in uses(operator, args, kwargs, out):
            start = tensor.data_ptr()
            elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
            end = start + elements * tensor.itemsize
            use = Use(start, end, stream, writes, str(operator))
            self.check(use)
            self.last[use] = self.number

    def check(self, use: Use) -> None:
        for earlier, number in self.last.items():
            if earlier.stream == use.stream or not (earlier.writes or use.writes):
                continue
            if earlier.end <= use.start or use.end <= earlier.start:
                continue
            if not self.clocks.is_ordered_after(use.stream, number, earlier.stream):
                self.found.append(
                    f"{use.operator} on stream {use.stream:#x} does not wait for "
                    f"{earlier.operator} on stream {earlier.stream:#x}"
                )


def uses(operator: Any, args: tuple, kwargs: dict, out: Any) -> Iterator[tuple[Tensor, bool]]:
    """(tensor, whether it is written) for each tensor on a GPU that an operator reads or writes."""
    given = {argument.name: value for argument, value in zip(operator._schema.arguments, args)}
    given |= kwargs
    for argument in operator._schema.arguments:
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        for tensor in tree_iter(given.get(argument.name)):
            if on_gpu(tensor):
                yield tensor, writes
    if "empty" in operator._schema.name:  # which only allocates
        return
    for tensor in tree_iter(out):
        if on_gpu(tensor):
            yield tensor, True


def on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda and x.numel() > 0


# Faults of parallel/memory_pool.py, by the rule that they break


def gather_without_waiting() -> None:
    from parallel import memory_pool

    def allocate(comm: Any, size: tuple, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.stream(comm.compute):
            return torch.empty(size, dtype=dtype, device=device)

    mock.patch.object(memory_pool.AllGather, "allocate", allocate).start()


def pool_what_is_freed_at_once() -> None:
    from parallel import memory_pool

    mock.patch.object(memory_pool, "becomes_gradient", lambda param, dtype: True).start()


FAULTS = {
    "gather-without-waiting": gather_without_waiting,
    "pool-what-is-freed-at-once": pool_what_is_freed_at_once,
}
