"""Finds memory that one stream uses while another still may: races that torch's caching allocator makes possible, by
giving a freed block to the next who asks. The host says which operators it launches on which stream, and which events
the streams record and wait for. Unlike torch.cuda._sanitizer, whose clocks it uses, it remembers the uses of memory
that was freed since. Eager mode only: what Inductor compiles launches its kernels past torch's dispatcher.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

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
        self.number = 0  # of operators so far
        self.last: dict[Use, int] = {}  # number of the operator that last used it so
        self.clocks = clocks = StreamSynchronizations()
        torch._C._activate_gpu_trace()
        for event, note in {
            "stream_creation": clocks.create_stream,
            "event_creation": clocks.create_event,
            "event_deletion": clocks.delete_event,
            "event_record": clocks.record_state,
            "event_wait": lambda event, stream: clocks.stream_wait_for_event(stream, event),
            "event_synchronization": clocks.all_streams_wait_for_event,
            "stream_synchronization": clocks.all_streams_wait_for_stream,
            "device_synchronization": clocks.sync_all_streams,
        }.items():
            getattr(gpu_trace, f"register_callback_for_{event}")(note)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            stream = torch.cuda.current_stream().cuda_stream
            self.number += 1
            self.clocks.update_seq_num(stream, self.number)
            for tensor, writes in uses(operator, args, kwargs or {}, out):
                elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
                end = tensor.data_ptr() + elements * tensor.itemsize
                use = Use(tensor.data_ptr(), end, stream, writes, str(operator))
                self.found += self.races_of(use)
                self.last[use] = self.number
        return out

    def races_of(self, use: Use) -> Iterator[str]:
        for earlier, number in self.last.items():
            overlap = earlier.start < use.end and use.start < earlier.end
            if earlier.stream == use.stream or not overlap or not (earlier.writes or use.writes):
                continue
            if not self.clocks.is_ordered_after(use.stream, number, earlier.stream):
                yield f"{use.operator} does not wait for {earlier.operator} on another stream"


def uses(operator: Any, args: tuple, kwargs: dict, out: Any) -> Iterator[tuple[Tensor, bool]]:
    """(tensor, whether it is written) for each tensor on a GPU that an operator reads or writes."""
    given = {argument.name: value for argument, value in zip(operator._schema.arguments, args)}
    values = []
    for argument in operator._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        values.append(((given | kwargs).get(argument.name), writes))
    if "empty" not in operator._schema.name:  # which only allocates
        values.append((out, True))
    for value, writes in values:
        for tensor in tree_iter(value):
            if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.numel():
                yield tensor, writes
