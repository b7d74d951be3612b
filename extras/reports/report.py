"""A page about one or several runs: curves, evaluation, sample text, environment, configuration.

    ./run_train.sh -m report outputs/tiny                       writes outputs/tiny/report.html
    ./run_train.sh -m report outputs/a outputs/b --out compared.html

A run writes its own page at its end. The page is one file that loads nothing and runs no script.
"""

import argparse
import array
import contextlib
import datetime
import functools
import html
import itertools
import json
import math
import pathlib
import re
import shlex
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import numpy as np

import config
from config import ConfigError, run_tool
from system.files import write_atomic
from system.processes import print_line

FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second_per_device",
    "step_seconds",
    "peak_memory_gib",
)


class Chart(NamedTuple):
    """A quantity that the page draws over steps."""

    title: str
    unit: str
    field: str  # one of FIELDS
    from_zero: bool = False
    logarithmic: bool = False  # where the values span more than two powers of ten


CHARTS = (
    Chart("Loss", "nats per token", "loss"),
    Chart("Learning rate", "", "lr", from_zero=True),
    Chart("Gradient norm", "before clipping", "grad_norm", logarithmic=True),
    Chart(
        "Throughput",
        "tokens per second and device",
        "tokens_per_second_per_device",
        from_zero=True,
    ),
    Chart(
        "Peak memory",
        "GiB of the device; on a CPU, of the process",
        "peak_memory_gib",
        from_zero=True,
    ),
)
BUCKETS = 1000  # a curve's width in units of its drawing: about the pixels of a wide screen
COLORS = 4  # of the style sheet; further runs have the same ones, dashed

# The start of a record in rank 0's log, and the messages that the page reads.
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
LAUNCHED = re.compile(r".*: ([\d,]+ parameters on .*), [a-z]+[0-9]+$")
RESUMED = re.compile(r".* tokens per step = .*; resuming after step (\d+)$")
SAVED = re.compile(r"saved .*step-(\d+)$")

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5f6b76; --line: #d9dee3; --page: #fff }
.c0 { color: #1f6feb } .c1 { color: #d9480f } .c2 { color: #0b8457 } .c3 { color: #a626a4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa5b1; --line: #353c44; --page: #14171a }
  .c0 { color: #62a8ff } .c1 { color: #ff9455 } .c2 { color: #45c992 } .c3 { color: #d98ae6 } }
body { margin: 0 auto; padding: 1rem; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.charts { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
figure { margin: 0; padding: 0 14px 40px 54px } figure:first-child { grid-column: 1 / -1 }
figcaption { margin: 0 0 10px -54px; font-weight: 600 }
small { font: 13px system-ui, sans-serif; margin-left: .4em }
small, .note, td:first-child { color: var(--soft) } svg text { font-size: 12px; fill: var(--soft) }
figure > svg { display: block; width: 100%; height: 190px; overflow: visible }
figure:first-child > svg { height: 300px }
.grid { stroke: var(--line) } .axis { stroke: var(--soft) }
path { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-opacity: .85;
  stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke }
path.dots { stroke-width: 7; stroke-opacity: 1 }
.dashed { stroke-dasharray: 6 4; border-style: dashed } .thin { stroke-width: 1; opacity: .5 }
.saved { stroke: currentColor; stroke-width: 2 }
.resumed { stroke: currentColor; stroke-dasharray: 2 3 }
.key { display: inline-block; width: 1.6em; border-width: 3px 0 0; vertical-align: middle;
  margin-right: .4em }
.key:not(.dashed) { border-style: solid } .names span { margin-right: 1.2em; white-space: nowrap }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; min-width: 50% }
td { vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line) }
td + td { min-width: 8.5em; overflow-wrap: anywhere }
@media (max-width: 600px) { table { font-size: 12px; min-width: 100% }
  td { padding-right: 8px } td:first-child { overflow-wrap: anywhere; min-width: 5em }
  td + td { min-width: 5.5em } }
pre { overflow-x: auto; padding: 10px; border: 1px solid var(--line); font-size: 13px }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""


class Run:
    """What a run's folder holds. Raises ConfigError if there are no rows."""

    def __init__(self, folder: pathlib.Path):
        if not folder.is_dir():
            raise ConfigError(f"{folder}: is not a folder; name a run's, such as outputs/tiny")
        self.folder = folder
        self.name = folder.resolve().name

        # from metrics.jsonl
        self.last: dict[str, dict] = {}  # the last row of each kind
        self.evaluations: list[list[float]] = []  # step, loss
        try:
            self.train = self._read_rows(folder / "metrics.jsonl")
        except OSError as error:
            raise ConfigError(
                f"{folder}: is not a run's folder: metrics.jsonl: {error.strerror}"
            ) from None
        if not self.last.keys() & {"train", "eval"}:
            raise ConfigError(f"{folder}: metrics.jsonl has no rows yet")

        self.status = read_object(folder / "status.json")
        self.environment = read_object(folder / "environment.json")
        self.config: dict[str, str] = {}  # options by their dotted names, as TOML writes them
        with contextlib.suppress(ConfigError):
            options = config.flatten(config.read_toml(str(folder / "config.toml")))
            self.config = {name: config.toml(value) for name, value in options.items()}

        # Steps of checkpoints. The log also names those that were deleted since.
        self.saved: set[int] = set()
        for checkpoint in folder.glob("checkpoints/step-*"):
            digits = checkpoint.name.removeprefix("step-")
            if re.fullmatch("[0-9]+", digits):
                self.saved.add(int(digits))

        # from rank 0's log
        self.launches = 0
        self.resumed: set[int] = set()  # the steps after which launches resumed
        self.size = ""  # parameters and devices, of the newest launch
        self.sample = ""  # the newest launch's last sample text
        with contextlib.suppress(OSError):
            self._read_log(folder / "logs" / "rank-0.log")

    def _read_rows(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        """Returns FIELDS of the training rows, ascending by step. Sets `last` and `evaluations`.

        A value is NaN where a row has no finite number. "loss" is `loss_mean` in rows that have it.
        Skips invalid lines, such as a last one that a kill truncated.

        json.loads() of a million rows takes five seconds. So a regular expression reads each row
        that has the keys of the previous one and a number in each of FIELDS.
        """
        values = array.array("d")  # FIELDS of one row after another
        pattern = row_pattern(())
        last_line = b""  # of the training rows
        with path.open("rb") as file:
            for line in file:
                is_complete = line.endswith(b"}\n")
                match = pattern.match(line) if is_complete else None
                if match:
                    values.extend(map(float, match.group(*FIELDS)))
                    last_line = line
                    continue
                row = as_row(line)
                if not row:
                    continue
                self.last[row["kind"]] = row
                if row["kind"] == "train":
                    values.extend(as_number(row.get(key_of(field, row))) for field in FIELDS)
                    last_line = line
                    pattern = row_pattern(tuple(row))
                elif row["kind"] == "eval":
                    self.evaluations.append([as_number(row["step"]), as_number(row.get("loss"))])
        last_row = as_row(last_line)
        if last_row:
            self.last["train"] = last_row

        table = np.array(values).reshape(-1, len(FIELDS))  # [rows, fields]
        table[~(np.abs(table) < 1e300)] = math.nan
        table = table[np.argsort(table[:, 0], kind="stable")]
        return dict(zip(FIELDS, table.T))

    @property
    def last_train(self) -> dict:
        return self.last.get("train", {})

    def steps_of_rows(self) -> np.ndarray:
        """The steps that each training row counts: those since the row before."""
        steps = self.train["step"]
        return np.diff(steps, prepend=0 if not len(steps) or steps[0] == 1 else steps[0] - 1)

    def steps_of_loss(self) -> np.ndarray:
        """Where the loss of each training row is drawn: a mean in the middle of its steps, so that
        it stands beside the validation loss of the same steps."""
        steps = self.train["step"]
        if key_of("loss", self.last_train) == "loss":
            return steps
        return steps - (self.steps_of_rows() - 1) / 2

    def _read_log(self, path: pathlib.Path) -> None:
        """Counts launches and saves and keeps the sample text. Only rank 0's log, to which each
        launch appends, has them."""
        in_sample = False
        with path.open(errors="replace") as file:
            for line in file:
                if in_sample and not RECORD.match(line):
                    self.sample += line
                    continue
                message = line[24:].rstrip("\n")  # after the time
                in_sample = message == "a sample:"
                if in_sample:
                    self.sample = ""
                elif not message.startswith("step "):  # as most messages do
                    self._read_message(message)

    def _read_message(self, message: str) -> None:
        launched = LAUNCHED.match(message)
        if launched:
            self.launches += 1
            self.size = launched[1]
            self.sample = ""
        resumed = RESUMED.match(message)
        if resumed:
            self.resumed.add(int(resumed[1]))
        saved = SAVED.match(message)
        if saved:
            self.saved.add(int(saved[1]))


def read_object(path: pathlib.Path) -> dict:
    """The JSON object in a file; {} if there is none."""
    return as_object(path.read_bytes()) if path.is_file() else {}


def as_object(text: bytes) -> dict:
    """A JSON object; {} if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def as_row(line: bytes) -> dict:
    """A row of metrics.jsonl; {} if the line is not one."""
    row = as_object(line)
    is_valid = isinstance(row.get("kind"), str) and 0 <= as_number(row.get("step")) < 2**53
    return row if is_valid else {}


def as_number(value: Any) -> float:
    """NaN if the value is not a finite number, or a bool."""
    if type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    return math.nan


def key_of(field: str, keys: Container[str]) -> str:
    """The key that has a field's value in a row with these keys."""
    if field == "loss" and "loss_mean" in keys:
        return "loss_mean"
    return field


@functools.cache
def row_pattern(keys: tuple[str, ...]) -> re.Pattern[bytes]:
    """A pattern of the training rows with these keys, with a group for each of FIELDS. It reads no
    further than the last of them. It matches nothing if a field is missing."""
    field_of = {key_of(field, keys): field for field in FIELDS}
    if not {*field_of, "kind"} <= {*keys}:
        return re.compile(b"(?!)")
    last = max(keys.index(key) for key in field_of)
    columns = []
    for key in keys[: last + 1]:
        if key in field_of:
            value = rb"(?P<%s>-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)" % field_of[key].encode()
        elif key == "kind":
            value = b'"train"'
        else:
            value = b"[^,]+"
        columns.append(re.escape(json.dumps(key).encode()) + b": " + value)
    pattern = rb"\{" + b", ".join(columns) + b"[,}]"
    if "loss_mean" not in keys:
        pattern += b'(?!.*"loss_mean")'  # json.loads() has to read such a row
    return re.compile(pattern)


# Drawing. A curve is drawn in a square of BUCKETS x BUCKETS units, which stretches to the page.
# Text keeps its size.


class Curve(NamedTuple):
    css_class: str
    steps: np.ndarray  # [points]
    values: np.ndarray  # [points], NaN where the curve has a gap


class Scale(NamedTuple):
    """Which steps and values a chart shows. Positions are fractions of its width and height."""

    first: float  # step at the left
    last: float  # step at the right
    low: float  # value at the bottom, of its logarithm if `logarithmic`
    high: float  # at the top
    logarithmic: bool

    def across(self, steps: Any) -> Any:
        """The positions of steps, from the left."""
        return (steps - self.first) / (self.last - self.first)

    def down(self, values: Any) -> Any:
        """The positions of values, from the top."""
        if self.logarithmic:
            values = np.log10(values)
        return (self.high - values) / (self.high - self.low)


def draw_chart(chart: Chart, runs: list[Run]) -> str:
    """A figure of one quantity over steps; "" if no run has it."""
    curves = []
    for i, run in enumerate(runs):
        steps = run.steps_of_loss() if chart.field == "loss" else run.train["step"]
        curves.append(Curve(run_class(i), steps, run.train[chart.field]))
        if chart.field == "loss":
            steps, losses = np.array(run.evaluations).reshape(-1, 2).T  # [2, evaluations]
            curves.append(Curve(f"{run_class(i)} thin", steps, losses))
            curves.append(Curve(f"{run_class(i)} dots", steps, losses))
    if all(np.isnan(curve.values).all() for curve in curves):
        return ""

    scale = scale_of(chart, curves, [run.train["step"] for run in runs])
    shapes = draw_axes(scale)
    for i, run in enumerate(runs):
        shapes += draw_marks(scale, run.saved, f"{run_class(i)} saved", top="97%")
        shapes += draw_marks(scale, run.resumed, f"{run_class(i)} resumed", top="0")
    paths = [draw_curve(scale, curve) for curve in curves]
    unit = f"{chart.unit}, logarithmic" if scale.logarithmic else chart.unit
    return (
        f"<figure><figcaption>{chart.title}<small>{unit}</small></figcaption>"
        f'<svg role="img" aria-label="{chart.title} over steps">{"".join(shapes)}'
        f'<svg width="100%" height="100%" viewBox="0 0 {BUCKETS} {BUCKETS}" '
        f'preserveAspectRatio="none" overflow="visible">{"".join(paths)}</svg>'
        "</svg></figure>"
    )


def run_class(i: int) -> str:
    """The CSS classes of run i."""
    if i < COLORS:
        return f"c{i}"
    return f"c{i % COLORS} dashed"


def scale_of(chart: Chart, curves: list[Curve], rows: list[np.ndarray]) -> Scale:
    """A scale that shows all points of the curves, of which at least one has a value, and the steps
    of all rows."""
    steps = np.concatenate([*rows, *(curve.steps for curve in curves)])
    first = steps.min() if steps.min() > 1 else 0
    last = max(steps.max(), first + 1)

    values = np.concatenate([curve.values for curve in curves])
    low = np.nanmin(values)
    high = np.nanmax(values)
    logarithmic = bool(chart.logarithmic and low > 0 and high > 100 * low)
    if logarithmic:
        low = math.log10(low)
        high = math.log10(high)
    elif chart.from_zero:
        low = min(low, 0)
    margin = 0.05 * (high - low)
    if margin == 0:  # a constant
        margin = 0.05 * abs(high) if high else 1
    if not chart.from_zero:
        low -= margin
    return Scale(first, last, low, high + margin, logarithmic)


def draw_axes(scale: Scale) -> list[str]:
    """The line under the curves, a horizontal line for each tick's value, and the numbers."""
    shapes = ['<line class="axis" x2="100%" y1="100%" y2="100%"/>']
    # on a logarithmic scale only powers of ten
    for tick in ticks(scale.low, scale.high, 6, least=1 if scale.logarithmic else 0):
        value = 10.0**tick if scale.logarithmic else tick
        y = f"{scale.down(value):.2%}"
        shapes.append(
            f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text x="-8" y="{y}" dy="4" '
            f'text-anchor="end">{short(value)}</text>'
        )
    for step in ticks(scale.first, scale.last, 5, least=1):
        x = f"{scale.across(step):.2%}"
        shapes.append(f'<text x="{x}" y="100%" dy="18" text-anchor="middle">{short(step)}</text>')
    shapes.append('<text x="100%" y="100%" dy="34" text-anchor="end">step</text>')
    return shapes


def ticks(low: float, high: float, count: int, least: float) -> list[float]:
    """At most count + 1 round numbers from low to high, at least `least` apart."""
    smallest = (high - low) / count
    power = 10.0 ** math.floor(math.log10(smallest))
    round_numbers = [power * factor for factor in (1, 2, 5, 10)]
    spacing = next(number for number in round_numbers if number >= smallest * 0.999)
    spacing = max(least, spacing)
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    return [i * spacing for i in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's number: 0.3, 2.5k, 4M, 1e-05."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9999:
            return f"{value / size:.6g}{suffix}"
    return f"{value:.6g}"


def draw_marks(scale: Scale, steps: Iterable[int], css_class: str, top: str) -> list[str]:
    """A vertical line from `top` to the axis at each step that the scale shows. Steps so close that
    they share a position share a line."""
    visible = [step for step in steps if scale.first <= step <= scale.last]
    positions = {f"{scale.across(step):.1%}" for step in visible}
    lines = []
    for x in sorted(positions):
        lines.append(f'<line class="{css_class}" x1="{x}" x2="{x}" y1="{top}" y2="100%"/>')
    return lines


def draw_curve(scale: Scale, curve: Curve) -> str:
    """A path through the finite points, broken at NaN. The class "dots" draws only the points."""
    x = scale.across(curve.steps) * BUCKETS
    y = scale.down(curve.values) * BUCKETS
    connected = "dots" not in curve.css_class
    commands = []
    pen_down = False
    for i in thinned(x, y):
        if math.isnan(y[i]):
            pen_down = False
            continue
        point = f"{x[i]:.1f},{y[i]:.1f}"
        # h0 draws a dot, which shows where no line follows
        commands.append(f"L{point}" if pen_down else f"M{point}h0")
        pen_down = connected
    if not commands:
        return ""
    return f'<path class="{curve.css_class}" d="{"".join(commands)}"/>'


def thinned(x: np.ndarray, values: np.ndarray) -> list[int]:
    """Indices of the points to draw. Of many points these are, for each unit of width, the smallest
    and the largest value and the first gap."""
    if len(x) <= 2 * BUCKETS:
        return list(range(len(x)))
    starts = np.flatnonzero(np.diff(x.astype(int))) + 1  # of all units but the first
    indices = []
    for begin, end in itertools.pairwise([0, *starts, len(x)]):
        bucket = values[begin:end]
        is_gap = np.isnan(bucket)
        drawn = set()
        if not is_gap.all():
            drawn |= {np.nanargmin(bucket), np.nanargmax(bucket)}
        if is_gap.any():
            drawn.add(is_gap.argmax())
        indices += sorted(int(begin + i) for i in drawn)
    return indices


# Tables. A column is a run's values by their labels.


def escaped(value: Any) -> str:
    return html.escape(str(value))


def format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if type(value) is int:
        return f"{value:,}"
    return str(value)


def as_column(values: dict) -> dict[str, str]:
    """A column of these values, without the empty ones."""
    column = {}
    for label, value in config.flatten(values).items():
        if value not in (None, "", {}):
            column[label] = format_value(value)
    return column


def all_labels(columns: list[dict[str, str]]) -> list[str]:
    """The labels of all columns, in the order in which they first occur."""
    labels: dict[str, None] = {}
    for column in columns:
        labels |= dict.fromkeys(column)
    return list(labels)


def table(columns: list[dict[str, str]], names: list[str], labels: list[str]) -> str:
    """A column of values for each run, under the runs' names if there are several."""
    rows = []
    if len(names) > 1:
        rows.append(["", *names])
    for label in labels:
        rows.append([label, *(column.get(label, "-") for column in columns)])
    lines = []
    for row in rows:
        cells = [f"<td>{escaped(cell)}</td>" for cell in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def summary(run: Run) -> dict[str, str]:
    """The column at the page's top."""
    train = run.last_train
    evaluation = run.last.get("eval", {})
    reported_steps = (run.status.get("step"), train.get("step"), 0)
    step = max(number for number in reported_steps if type(number) is int)
    state = str(run.status.get("state", "unknown")).replace("preempted", "stopped")
    rates = finite(run.train["tokens_per_second_per_device"])
    peaks = finite(run.train["peak_memory_gib"])
    return as_column(
        {
            "state": f"{state} at step {step} of {run.config.get('train.steps', '?')}",
            "time": run.status.get("time"),
            "training, without saves and evaluations": training_time(run),
            "model": run.size,
            label_of_loss(run): train.get(key_of("loss", train)),
            "validation loss": evaluation.get("loss"),
            "bits per byte": evaluation.get("bits_per_byte"),
            "tokens": train.get("tokens"),
            "epochs": train.get("epochs"),
            "mfu": train.get("mfu"),
            "tokens per second and device, median": round(np.median(rates)) if len(rates) else None,
            "peak memory, GiB": round(float(peaks.max()), 2) if len(peaks) else None,
            "launches": run.launches or None,
            "resumed after steps": sorted(run.resumed)[-5:] or None,
            "saves": len(run.saved),
        }
    )


def training_time(run: Run) -> str | None:
    """Of all launches, as hours, minutes and seconds."""
    seconds = run.train["step_seconds"] * run.steps_of_rows()
    if not len(finite(seconds)):
        return None
    return str(datetime.timedelta(seconds=round(float(np.nansum(seconds)))))


def label_of_loss(run: Run) -> str:
    """Of the last row's loss: over how many steps it is the mean."""
    if key_of("loss", run.last_train) == "loss" or not len(run.train["step"]):
        return "loss"
    return f"loss, mean of the last {run.steps_of_rows()[-1]:.0f} steps"


def finite(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def environment(run: Run) -> dict[str, str]:
    """environment.json, with the size of its diff instead of the diff, and the command as its user
    typed it."""
    diff = str(run.environment.get("uncommitted") or "").splitlines()
    uncommitted = "\n".join(diff)
    if len(diff) > 1:  # else it says that it was left out
        uncommitted = f"a diff of {len(diff)} lines, in environment.json"
    shown = run.environment | {
        "uncommitted": uncommitted,
        "command": typed_command(run.environment),
    }
    for name in ("code", "earlier"):  # hashes of files; the launches before
        shown.pop(name, None)
    return as_column(shown)


def typed_command(launch: dict) -> str:
    """The command of a launch's environment.json, which has that of a rank."""
    words = launch.get("command")
    if not isinstance(words, list):
        return ""
    command = shlex.join(["./run_train.sh", *map(str, words[1:])])
    ranks = launch.get("ranks")
    hosts = launch.get("hosts")
    if type(ranks) is int and isinstance(hosts, list) and hosts and ranks > len(hosts):
        return f"NPROC={ranks // len(hosts)} {command}"
    return command


# The page


def page(runs: list[Run]) -> str:
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    title = escaped(" · ".join(names))
    configs = [run.config for run in runs]
    options = all_labels(configs)
    differing = [name for name in options if len({cfg.get(name) for cfg in configs}) > 1]
    equal = [name for name in options if name not in differing]
    summaries = [summary(run) for run in runs]
    evaluations = [as_column({**run.last.get("eval", {}), "kind": None}) for run in runs]
    charts = [draw_chart(chart, runs) for chart in CHARTS]

    sections = [f"<h1>{title}</h1>"]
    if len(runs) > 1:
        sections.append(legend(names))
    sections += [
        table(summaries, names, all_labels(summaries)),
        section("Options that differ", configs, names, differing),
        "<h2>Curves</h2><p class=note>Dots: validation. A mean loss is drawn in the middle of its "
        "steps. Dotted vertical lines: a launch resumed "
        "there. Small ticks on the axis: saves.</p>"
        f'<div class="charts">{"".join(charts)}</div>',
        section("Last evaluation", evaluations, names),
        section(
            "Plan and measurement", [read_object(run.folder / "plan.json") for run in runs], names
        ),
        *sample_texts(runs, names),
        section("Environment of the newest launch", [environment(run) for run in runs], names),
        section(
            "Options that are equal" if len(runs) > 1 else "Configuration",
            configs[:1],
            names[:1],
            equal,
        ),
    ]
    return PAGE.format(title=title, style=STYLE, body="\n".join(sections))


def legend(names: list[str]) -> str:
    """The color of each run."""
    entries = []
    for i, name in enumerate(names):
        entries.append(f'<span><i class="key {run_class(i)}"></i>{escaped(name)}</span>')
    return f"<p class=names>{''.join(entries)}</p>"


def section(
    heading: str,
    columns: list[dict[str, str]],
    names: list[str],
    labels: list[str] | None = None,
) -> str:
    """A table with a heading, of all labels by default; "" if it would be empty."""
    if labels is None:
        labels = all_labels(columns)
    if not labels:
        return ""
    return f"<h2>{heading}</h2>{table(columns, names, labels)}"


def sample_texts(runs: list[Run], names: list[str]) -> list[str]:
    sections = []
    for name, run in zip(names, runs):
        if run.sample:
            heading = f"Sample text of {escaped(name)}" if len(runs) > 1 else "Sample text"
            sections.append(f"<h2>{heading}</h2><pre>{escaped(run.sample)}</pre>")
    return sections


def write_report(folders: list[pathlib.Path], out: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the page, by default into the first run's folder, and returns its path. Raises
    ConfigError with the problems of all folders."""
    runs = config.together(*(functools.partial(Run, folder) for folder in folders))
    out = out or folders[0] / "report.html"
    try:
        # names and texts may hold lone surrogates
        write_atomic(out, page(runs).encode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    return out


def what_next(cfg: config.Config, report: pathlib.Path | None) -> str:
    """The commands that a user may want after a run, in at most four lines."""
    folder = str(config.run_folder(cfg))
    commands = []
    if cfg.log.tensorboard:
        commands.append(
            command_line("curves", "-m", "tensorboard.main", "--logdir", cfg.run.output_dir)
        )
    if cfg.checkpoint is not None:
        if cfg.data.has_conversations:
            prompt = ["--chat"]
        elif cfg.data.source == "python-stdlib":
            prompt = ["--prompt", "def "]
        else:
            prompt = ["--prompt", "The "]
        if any(config.run_folder(cfg).glob("tokenizer.*")):  # token files need none
            commands.append(command_line("text from it", "-m", "generate", folder, *prompt))

        # without schedule_steps the learning rate's schedule is as long as the run
        is_stretched = cfg.optim.schedule_steps is None and cfg.optim.schedule != "constant"
        purpose = "more steps, a longer schedule" if is_stretched else "more steps"
        words = config.words_without("--train.steps=", "--checkpoint.resume=")
        if cfg.checkpoint.resume != "auto":  # the file's, perhaps
            words.append("--checkpoint.resume=auto")
        commands.append(command_line(purpose, *words, f"--train.steps={2 * cfg.train.steps}"))

        if config.has_extra("huggingface"):
            commands.append(
                command_line("export", "-m", "huggingface", "export", folder, f"{folder}-hf")
            )
    text = f"finished: {report or folder}"
    if commands:
        text += "; " + "\n".join(commands)
    return text


def command_line(purpose: str, *words: str) -> str:
    return f"{purpose}: {shlex.join(['./run_train.sh', *words])}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m report", description=__doc__.splitlines()[0]
    )
    # one line, as every error here
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("runs", type=pathlib.Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE.html",
        help="default: report.html in the first RUN",
    )
    args = parser.parse_args(argv)
    print_line(str(write_report(args.runs, args.out)))
    return 0


if __name__ == "__main__":
    run_tool(main)
