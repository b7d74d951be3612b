"""Traces steps and breaks down their time: profile/rank-N.json and .txt, on a GPU also memory-rank-N.pickle."""

import contextlib
import functools
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

import config
import files
from metrics import log
from parallel.mesh import World

STEPS = "traced steps"  # our record_function range in the trace: the time to break down
HOST, DEVICE = (
    ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"),
    ("kernel", "gpu_memcpy", "gpu_memset"),
)

# The rows of the table, each with a pattern for the start of its operators', ranges' and kernels' names. Inductor names
# fused elementwise kernels after all operators around them, even matmul and attention: only templates (tem) are those.
ELEMENTWISE, COMMUNICATION, IDLE = "elementwise, copies", "communication, exposed", "idle"
ROWS = {
    "matrix products": r"\w+::(\w*mm_?|linear|matmul|_linear_pointwise)$|triton_tem|.*(gemm|nvjet|cutlass)",
    "attention": r"(?!autograd|FSDP|triton_(?!tem))(?i:.*(scaled_?dot_?product|attention|flash|fmha|sdpa))",
    "loss": r"\w*CrossEntropy|aten::(cross_entropy|nll_loss|_?log_softmax)",
    "optimizer": r"Optimizer\.",
    ELEMENTWISE: r"(?!FSDP)\w+::\w+$|## Call CompiledFxGraph|triton_",
    COMMUNICATION: r"nccl|gloo:|_?c10d",
    IDLE: r"",
}
HIDDEN = "communication, hidden"
# also cover what is called within them
OUTER = (COMMUNICATION, "loss", "optimizer", "attention", "matrix products")


class Profiler:
    def __init__(self, settings: config.Profile, folder: pathlib.Path, world: World, first: int):
        """first: the first step of this launch."""
        if settings.at_step < first:
            log.info(
                "[profile] at_step = %d was before this launch, which makes no trace",
                settings.at_step,
            )
        self.settings, self.folder, self.rank = settings, folder / "profile", world.rank
        self.trace: torch.profiler.profile | None = None
        self.on_gpu = world.device.type == "cuda"

    @contextlib.contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Around each step: traces those of [profile]."""
        self.before_step(step)
        yield
        self.after_step(step)

    def before_step(self, step: int) -> None:
        if step != self.settings.at_step:
            return
        if self.on_gpu:
            torch.cuda.memory._record_memory_history(stacks="python")
            torch.cuda.synchronize()  # here and at the end: the device work in the range is that of these steps
        self.trace, self.range = torch.profiler.profile(), torch.profiler.record_function(STEPS)
        self.trace.start()
        self.range.__enter__()

    def after_step(self, step: int) -> None:
        if not self.trace or step != self.settings.at_step + self.settings.steps - 1:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        self.range.__exit__(None, None, None)
        self.trace.stop()
        try:
            self._write(self.trace, f"steps {self.settings.at_step} to {step}, rank {self.rank}")
        except (
            OSError,
            ValueError,
            StopIteration,
        ) as error:  # torch's trace is not valid JSON, or lacks our range
            log.warning("the profile is incomplete: %r", error)
        if self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        self.trace = None

    def _write(self, trace: torch.profiler.profile, title: str) -> None:
        self.folder.mkdir(exist_ok=True)
        if self.on_gpu:
            memory = self.folder / f"memory-rank-{self.rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(memory))
            log.info(
                "memory in %s: %s, to be opened at https://pytorch.org/memory_viz", title, memory
            )
        path = self.folder / f"rank-{self.rank}.json"
        trace.export_chrome_trace(str(path))
        log.info("trace of %s: %s, to be opened at https://ui.perfetto.dev", title, path)
        text = f"{title}, a step:\n{table(time_by_row(read(path)), self.settings.steps)}"
        files.write_atomic(path.with_suffix(".txt"), f"{text}\n")
        log.info(text)


class Event(NamedTuple):
    """A trace event; times in microseconds."""

    name: str
    category: str
    thread: float
    begin: float
    end: float
    launch: int | None  # correlation id, shared by a kernel and the call that launched it


def read(path: pathlib.Path) -> list[Event]:
    """The events of a Chrome trace that time_by_row() needs. Drops the rest while parsing: there may be millions."""

    def slim(item: dict) -> Any:
        if "ph" not in item:
            return item
        if item["ph"] != "X" or item["cat"] not in HOST + DEVICE:
            return None
        begin, launch = item["ts"], item.get("args", {}).get("correlation")
        return Event(item["name"], item["cat"], item["tid"], begin, begin + item["dur"], launch)

    with path.open(errors="replace") as file:
        return [event for event in json.load(file, object_hook=slim)["traceEvents"] if event]


def time_by_row(events: list[Event]) -> dict[str, float]:
    """Milliseconds of the range STEPS by row; the rows add up to its length. HIDDEN is communication that overlapped
    with other work, time that the other rows already include.

    If the trace has kernels, time is device time, else that of the operators on the host's threads. Overlapping events
    count once, for the first of their rows.
    """
    window = next(event for event in events if event.name == STEPS)
    stretches, launches = follow_threads(event for event in events if event.category in HOST)
    if kernels := [event for event in events if event.category in DEVICE]:
        stretches = [
            (k.begin, k.end, row_of(k.name, k.category, launches.get(k.launch, IDLE)))
            for k in kernels
        ]
    changes = [(window.end, 0, IDLE)]
    for begin, end, row in stretches:
        begin, end = max(begin, window.begin), min(end, window.end)
        if begin < end and row != IDLE:
            changes += [(begin, 1, row), (end, -1, row)]
    now, running, spent = window.begin, Counter(), dict.fromkeys([*ROWS, HIDDEN], 0.0)
    for time, change, row in sorted(changes):
        first = next((r for r in ROWS if running[r]), IDLE)
        spent[first] += (time - now) / 1000
        if running[COMMUNICATION] and first != COMMUNICATION:
            spent[HIDDEN] += (time - now) / 1000
        running[row] += change
        now = time
    return spent


def follow_threads(
    events: Iterable[Event],
) -> tuple[list[tuple[float, float, str]], dict[int | None, str]]:
    """(begin, end, row) of each interval in which one operator or range was innermost on its thread; and the row of
    each launch."""
    stretches, launches, stack, now = [], {}, [], 0.0  # stack: open events with their rows
    last = Event("", "", math.inf, math.inf, math.inf, None)
    for event in sorted([*events, last], key=lambda e: (e.thread, e.begin, -e.end)):
        # callers before callees
        while stack and (stack[-1][0].end <= event.begin or stack[-1][0].thread != event.thread):
            inner, row = stack.pop()
            stretches.append((now, inner.end, row))
            now = inner.end
        outer = stack[-1][1] if stack else IDLE
        stretches.append((now, event.begin, outer))
        now, row = event.begin, row_of(event.name, event.category, outer)
        stack.append((event, row))
        if event.launch is not None:
            launches[event.launch] = row
    return stretches, launches


@functools.cache
def row_of(name: str, category: str, outer: str) -> str:
    """The row of an event nested in, or launched by, an event of row `outer`."""
    if outer in OUTER and not re.match(ROWS[COMMUNICATION], name):
        return outer
    row = next(row for row in (*OUTER, ELEMENTWISE, IDLE) if re.match(ROWS[row], name))
    return ELEMENTWISE if row == IDLE and category in DEVICE else row


def table(spent: dict[str, float], steps: int) -> str:
    """The result of time_by_row() as text, per step."""
    total = sum(spent[row] for row in ROWS)
    rows = {**{row: spent[row] for row in ROWS}, "step": total, HIDDEN: spent[HIDDEN]}
    lines = [f"{row:<24}{ms / steps:>12.3f} ms{ms / total:>8.1%}" for row, ms in rows.items()]
    return "\n".join(lines) + "  (beside the rows above, not in the sum)"
