"""A page about a run, or about several side by side: curves, evaluation, sample text, environment and configuration.

    python -m report outputs/tiny                               writes outputs/tiny/report.html
    python -m report outputs/a outputs/b --out compared.html

A run writes its own at its end. The page is one file that loads nothing and runs no script.
"""

import argparse
import contextlib
import functools
import html
import itertools
import json
import logging
import math
import pathlib
import re
import shlex
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

import config
import schema
from config import ConfigError, run_tool
from files import print_line, write_atomic

log = logging.getLogger("train")

FIELDS = ("step", "loss", "grad_norm", "lr", "tokens_per_second_per_device", "peak_memory_gib")
CHARTS = (
    ("Loss", "nats per token", "loss"),
    ("Learning rate", "", "lr"),
    ("Gradient norm", "before clipping", "grad_norm"),
    ("Throughput", "tokens per second and device", "tokens_per_second_per_device"),
    ("Peak memory", "GiB of the device; on a CPU, of the process", "peak_memory_gib"),
)
FROM_ZERO, LOGARITHMIC = ("lr", "tokens_per_second_per_device", "peak_memory_gib"), ("grad_norm",)
BUCKETS = 1000  # a curve's width in units of its drawing: about the pixels of a wide screen
COLORS = 4  # of the style sheet; further runs have the same ones, dashed
# the beginning of a record in a rank's log
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5f6b76; --line: #d9dee3; --page: #fff }
.c0 { color: #1f6feb } .c1 { color: #d9480f } .c2 { color: #0b8457 } .c3 { color: #a626a4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa5b1; --line: #353c44; --page: #14171a }
  .c0 { color: #62a8ff } .c1 { color: #ff9455 } .c2 { color: #45c992 } .c3 { color: #d98ae6 } }
body { margin: 0 auto; padding: 1rem; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem 2rem }
figure { margin: 0; padding: 0 14px 40px 54px } figure:first-child { grid-column: 1 / -1 }
figcaption { margin: 0 0 10px -54px; font-weight: 600 } small { font: 13px system-ui, sans-serif; margin-left: .4em }
small, .note, td:first-child { color: var(--soft) } svg text { font-size: 12px; fill: var(--soft) }
figure > svg { display: block; width: 100%; height: 190px; overflow: visible }
figure:first-child > svg { height: 300px } .grid { stroke: var(--line) } .axis { stroke: var(--soft) }
path { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linejoin: round; stroke-linecap: round;
  stroke-opacity: .85; vector-effect: non-scaling-stroke } path.dots { stroke-width: 7; stroke-opacity: 1 }
.dashed { stroke-dasharray: 6 4; border-style: dashed } .thin { stroke-width: 1; opacity: .5 }
.saved { stroke: currentColor; stroke-width: 2 } .resumed { stroke: currentColor; stroke-dasharray: 2 3 }
.key { display: inline-block; width: 1.6em; border-width: 3px 0 0; vertical-align: middle; margin-right: .4em }
.key:not(.dashed) { border-style: solid } .names span { margin-right: 1.2em; white-space: nowrap }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; min-width: 50% }
td { vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line) }
td + td { min-width: 8.5em; overflow-wrap: anywhere }
pre { overflow-x: auto; padding: 10px; border: 1px solid var(--line); font-size: 13px }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
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
        self.folder, self.name = folder, folder.resolve().name
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
        self.status, self.environment = (
            as_object(path.read_bytes()) if (path := folder / f"{name}.json").is_file() else {}
            for name in ("status", "environment")
        )
        self.config = {}
        with contextlib.suppress(ConfigError):
            tables = schema.flatten(schema.read_toml(str(folder / "config.toml")))
            self.config = {name: schema.toml(value) for name, value in tables.items()}
        kept = (path.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*"))
        self.saved = {int(step) for step in kept if re.fullmatch("[0-9]+", step)}
        self.launches, self.resumed, self.size, self.sample = 0, set(), "", ""
        with contextlib.suppress(OSError):
            self._read_log(folder / "logs" / "rank-0.log")

    def _read_rows(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        """FIELDS of the training rows, ascending by step, NaN where one has no finite number; "loss" is `loss_mean` in
        rows that have it. Skips invalid lines, such as a last one that a kill truncated.

        json.loads() of a million rows takes five seconds. So a regular expression reads a row that has the keys of the
        previous one, and a number in each of FIELDS.
        """
        tables, found, last = [], [], b""
        pattern, places = layout(())
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"}\n") and (match := pattern.match(line)):
                    found.extend(map(float, match.group(*places)))
                    last = line
                elif row := as_row(line):
                    self.last[row["kind"]] = row
                    if row["kind"] == "train":
                        found.extend(as_number(row.get(source(name, row))) for name in FIELDS)
                        last, (pattern, places) = line, layout(tuple(row))
                    elif row["kind"] == "eval":
                        self.evaluations.append(
                            [as_number(row["step"]), as_number(row.get("loss"))]
                        )
                if len(found) >= 2**16:  # a list of floats takes four times an array's memory
                    tables, found = [*tables, np.array(found)], []
        if row := as_row(last):
            self.last["train"] = row
        table = np.concatenate([*tables, np.array(found)]).reshape(-1, len(FIELDS))
        table[~(np.abs(table) < 1e300)] = math.nan
        return dict(zip(FIELDS, table[np.argsort(table[:, 0], kind="stable")].T))

    def _read_log(self, path: pathlib.Path) -> None:
        """Launches, saves and the sample text: of them only rank 0's log tells, to which each launch appends."""
        in_sample = False
        with path.open(errors="replace") as file:
            for line in file:
                text = line[24:].rstrip("\n")  # after the time
                if in_sample and not LOGGED.match(line):
                    self.sample += line
                    continue
                in_sample = text == "a sample:"
                if text.startswith("step "):
                    continue
                if in_sample:
                    self.sample = ""
                elif saved := re.match(r"saved .*step-(\d+)$", text):
                    self.saved.add(int(saved[1]))
                elif size := re.match(r".*: ([\d,]+ parameters on .*), [a-z]+[0-9]+$", text):
                    self.size, self.sample = size[1], ""
                    self.launches += 1
                elif resumed := re.match(
                    r".* tokens per step = .*; resuming after step (\d+)$", text
                ):
                    self.resumed.add(int(resumed[1]))


def as_object(text: bytes) -> dict:
    """A JSON object; {} if it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def as_row(line: bytes) -> dict:
    row = as_object(line)
    return (
        row if isinstance(row.get("kind"), str) and 0 <= as_number(row.get("step")) < 2**53 else {}
    )


def as_number(value: Any) -> float:
    # no bool
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan


def source(field: str, keys: Container[str]) -> str:
    return "loss_mean" if field == "loss" and "loss_mean" in keys else field


@functools.cache
def layout(keys: tuple[str, ...]) -> tuple[re.Pattern, list[int]]:
    """A pattern of the rows with these keys, as far as FIELDS need, and its group of each field. It matches nothing if
    a field is missing."""
    wanted = [source(name, keys) for name in FIELDS]
    if not {*wanted, "kind"} <= {*keys}:
        return re.compile(b"(?!)"), []
    parts, order = [], []
    for key in keys[: max(map(keys.index, wanted)) + 1]:
        order += [key] * (key in wanted)
        value = (
            rb"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
            if key in wanted
            else rb'"train"'
            if key == "kind"
            else rb"[^,]+"
        )
        parts.append(re.escape(json.dumps(key).encode()) + b": " + value)
    unread = b"" if "loss_mean" in keys else b'(?!.*"loss_mean")'
    return re.compile(rb"\{" + b", ".join(parts) + b"[,}]" + unread), [
        order.index(name) + 1 for name in wanted
    ]


# Drawing. A curve is drawn in a square of BUCKETS x BUCKETS units that stretches to the page; text keeps its size.


def ticks(low: float, high: float, count: int, least: float = 0.0) -> list[float]:
    """At most count + 1 round numbers from low to high, at least `least` apart."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(
        least, next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    )
    return [
        i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def short(value: float) -> str:
    """A tick's number: 0.3, 2.5k, 4M, 1e-05."""
    size, suffix = next(
        (
            (size, suffix)
            for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k"))
            if abs(value) >= size * 0.9999
        ),
        (1, ""),
    )
    return f"{value / size:.6g}{suffix}"


def thinned(x: np.ndarray, values: np.ndarray) -> list[int]:
    """Indices of the points to draw: per unit of width the smallest and the largest value, and the first gap."""
    if len(x) <= 2 * BUCKETS:
        return [*range(len(x))]
    edges = [0, *(np.flatnonzero(np.diff(x.astype(int))) + 1), len(x)]
    chosen = []
    for begin, end in itertools.pairwise(edges):
        part = values[begin:end]
        gaps = np.flatnonzero(np.isnan(part))[:1]
        found = [np.nanargmin(part), np.nanargmax(part)] if not np.isnan(part).all() else []
        chosen += [int(begin + i) for i in sorted({*gaps, *found})]
    return chosen


def path(x: np.ndarray, y: np.ndarray, kind: str) -> str:
    """A curve through finite points, broken at NaN; kind "dots": the points alone."""
    words, pen_down = [], False
    for i in thinned(x, y):
        point, finite = f"{x[i]:.1f},{y[i]:.1f}", not math.isnan(y[i])
        if finite:
            # h0: a dot where no line follows
            words.append(f"L{point}" if pen_down else f"M{point}h0")
        pen_down = finite and "dots" not in kind
    return f'<path class="{kind}" d="{"".join(words)}"/>' if words else ""


def chart(title: str, unit: str, key: str, runs: list[Run]) -> str:
    """A figure of one quantity over steps; "" if no run has it."""
    curves = []  # (class, steps, values)
    for i, run in enumerate(runs):
        curves.append((color(i), run.train["step"], run.train[key]))
        if key == "loss":
            at, losses = np.array(run.evaluations).reshape(-1, 2).T
            curves += [(f"{color(i)} thin", at, losses), (f"{color(i)} dots", at, losses)]
    steps, values = (np.concatenate([curve[part] for curve in curves]) for part in (1, 2))
    if np.isnan(values).all():
        return ""
    first = steps.min() if steps.min() > 1 else 0
    last = max(steps.max(), first + 1)
    low, high = np.nanmin(values), np.nanmax(values)
    log = bool(key in LOGARITHMIC and low > 0 and high > 100 * low)
    low, high = (
        (math.log10(low), math.log10(high))
        if log
        else (min(low, 0) if key in FROM_ZERO else low, high)
    )
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1
    low, high = low - margin * (key not in FROM_ZERO), high + margin

    def across(step: Any) -> Any:
        return (step - first) / (last - first) * BUCKETS

    shapes = ['<line class="axis" x2="100%" y1="100%" y2="100%"/>']
    for value in ticks(low, high, 6, least=float(log)):
        at = f"{100 * (high - value) / (high - low):.2f}%"
        shapes.append(
            f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/><text x="-8" y="{at}" dy="4" '
            f'text-anchor="end">{short(10**value if log else value)}</text>'
        )
    for step in ticks(first, last, 5, least=1):
        at = f"{across(step) / BUCKETS:.2%}"
        shapes.append(f'<text x="{at}" y="100%" dy="18" text-anchor="middle">{short(step)}</text>')
    shapes.append('<text x="100%" y="100%" dy="34" text-anchor="end">step</text>')
    for i, run in enumerate(runs):
        for kind, marked, top in ("saved", run.saved, "97%"), ("resumed", run.resumed, "0"):
            for at in sorted(
                {f"{across(step) / BUCKETS:.1%}" for step in marked if first <= step <= last}
            ):
                shapes.append(
                    f'<line class="{color(i)} {kind}" x1="{at}" x2="{at}" y1="{top}" y2="100%"/>'
                )
    paths = [
        path(
            across(at), (high - (np.log10(found) if log else found)) / (high - low) * BUCKETS, kind
        )
        for kind, at, found in curves
    ]
    return (
        f"<figure><figcaption>{title}<small>{unit}{', logarithmic' * log}</small></figcaption>"
        f'<svg role="img" aria-label="{title} over steps">{"".join(shapes)}<svg width="100%" height="100%" '
        f'viewBox="0 0 {BUCKETS} {BUCKETS}" preserveAspectRatio="none" overflow="visible">{"".join(paths)}</svg>'
        "</svg></figure>"
    )


def color(i: int) -> str:
    """The classes of run i."""
    return f"c{i % COLORS}{' dashed' * (i >= COLORS)}"


# Tables


def escaped(value: Any) -> str:
    return html.escape(str(value))


def shown(values: dict) -> dict[str, str]:
    """A column of a table; leaves out what has no value."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return " ".join(map(str, value))
        return (
            f"{value:.6g}"
            if isinstance(value, float)
            else f"{value:,}"
            if type(value) is int
            else str(value)
        )

    return {
        name: text(value)
        for name, value in schema.flatten(values).items()
        if value not in (None, "", {})
    }


def table(
    columns: list[dict[str, str]], names: list[str], labels: Iterable[str] | None = None
) -> str:
    """A column of values for each run, under the runs' names if there are several."""
    labels = (
        dict.fromkeys(label for column in columns for label in column) if labels is None else labels
    )
    rows = [["", *names]] * (len(names) > 1) + [
        [label, *(column.get(label, "-") for column in columns)] for label in labels
    ]
    cells = ["".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="scroll"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def summary(run: Run) -> dict[str, str]:
    last, status = run.last.get("train", {}), run.status
    step = max(step for step in (status.get("step"), last.get("step"), 0) if type(step) is int)
    state = str(status.get("state", "unknown")).replace("preempted", "stopped")
    rates, peaks = (run.train[name][~np.isnan(run.train[name])] for name in FIELDS[-2:])
    return shown(
        {
            "state": f"{state} at step {step} of {run.config.get('train.steps', '?')}",
            "time": status.get("time"),
            "model": run.size,
            "loss": last.get(source("loss", last)),
            "validation loss": run.last.get("eval", {}).get("loss"),
            "bits per byte": run.last.get("eval", {}).get("bits_per_byte"),
            "tokens": last.get("tokens"),
            "mfu": last.get("mfu"),
            "tokens per second and device, median": round(np.median(rates)) if len(rates) else None,
            "peak memory, GiB": round(float(peaks.max()), 2) if len(peaks) else None,
            "launches": run.launches or None,
            "resumed after steps": sorted(run.resumed)[-5:] or None,
            "saves": len(run.saved),
        }
    )


def plan(run: Run) -> dict[str, str]:
    """The dry run's prediction next to what was measured; {} without a plan."""
    row = run.last.get("plan", {})
    found = {
        name: [as_number(row.get(f"{kind}{key}")) for kind in ("planned_", "")]
        for name, key in (("peak memory, GiB", "peak_gib"), ("time of a step, s", "step_seconds"))
    }
    return {
        name: f"planned {planned:.4g}, measured {measured:.4g} ({measured / planned - 1:+.1%})"
        for name, (planned, measured) in found.items()
        if planned > 0 and measured > 0
    }


def environment(run: Run) -> dict[str, str]:
    lines = len(str(run.environment.get("uncommitted") or "").splitlines())
    return shown(
        run.environment
        | {"uncommitted": f"a diff of {lines} lines, in environment.json" if lines else ""}
    )


def page(runs: list[Run]) -> str:
    names = [run.name for run in runs]
    if len({*names}) < len(names):
        names = [str(run.folder) for run in runs]
    title = escaped(" · ".join(names))
    legend = "".join(
        f'<span><i class="key {color(i)}"></i>{escaped(name)}</span>'
        for i, name in enumerate(names)
    )
    several = len(runs) > 1
    configs = [run.config for run in runs]
    keys = [*dict.fromkeys(key for found in configs for key in found)]
    differing = [key for key in keys if len({found.get(key) for found in configs}) > 1]
    equal = [key for key in keys if key not in differing]

    def section(
        heading: str, columns: list[dict[str, str]], labels: list[str] | None = None
    ) -> str:
        has_any = any(columns) if labels is None else labels
        return (
            f"<h2>{heading}</h2>{table(columns, names[: len(columns)], labels)}" if has_any else ""
        )

    return PAGE.format(
        title=title,
        style=STYLE,
        body="\n".join(
            [
                f"<h1>{title}</h1>",
                f"<p class=names>{legend}</p>" * several,
                table([*map(summary, runs)], names),
                section("Options that differ", configs, differing),
                "<h2>Curves</h2><p class=note>Dots: validation. Dotted vertical lines: a launch resumed there. "
                "Small ticks on "
                f'the axis: saves.</p><div class="charts">{"".join(chart(*kind, runs) for kind in CHARTS)}</div>',
                section(
                    "Last evaluation",
                    [shown({**run.last.get("eval", {}), "kind": None}) for run in runs],
                ),
                section("Plan and measurement", [*map(plan, runs)]),
                *(
                    f"<h2>Sample text{f' of {escaped(name)}' * several}</h2><pre>{escaped(run.sample)}</pre>"
                    for name, run in zip(names, runs)
                    if run.sample
                ),
                section("Environment of the newest launch", [*map(environment, runs)]),
                section(
                    "Options that are equal" if several else "Configuration", configs[:1], equal
                ),
            ]
        ),
    )


def write_report(folders: list[pathlib.Path], out: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the page, by default into the first run's folder, and returns its path. Raises ConfigError."""
    runs = schema.together(*(functools.partial(Run, folder) for folder in folders))
    out = out or folders[0] / "report.html"
    try:
        # names and texts may hold lone surrogates
        write_atomic(out, page(runs).encode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    return out


def report_end(cfg: config.Config, finished: bool) -> None:
    """Writes the page of this process's run, and logs where it is, and of a finished run what its user may want next.
    A failure is one warning: a page is no reason for a run to fail."""
    path = None
    try:
        path = write_report([config.run_folder(cfg)])
    except Exception as error:
        log.warning("report.html: not written: %s", " ".join(str(error).split()))
    if finished:
        log.info(what_next(cfg, path))
    elif path:
        log.info("report: %s", path)


def what_next(cfg: config.Config, report: pathlib.Path | None) -> str:
    """At most four lines."""
    run, saved, o = str(config.run_folder(cfg)), cfg.checkpoint is not None, cfg.optim
    prompt = ["--prompt", "def " if cfg.data.source == "python-stdlib" else "The "]
    stretched = ", a longer schedule" * (o.schedule_steps is None and o.schedule != "constant")
    lines = [
        f"{what}: {shlex.join(['./run_train.sh', *words])}"
        for offered, what, *words in (
            (
                cfg.log.tensorboard,
                "curves",
                "-m",
                "tensorboard.main",
                "--logdir",
                cfg.run.output_dir,
            ),
            (
                saved,
                "text from it",
                "-m",
                "generate",
                run,
                *(["--chat"] if cfg.data.messages_field else prompt),
            ),
            (
                saved,
                f"more steps{stretched}",
                *config.words_without("--launch=", "--train.steps="),
                f"--train.steps={2 * cfg.train.steps}",
            ),
            (
                saved and config.has_extra("huggingface"),
                "export",
                "-m",
                "huggingface",
                "export",
                run,
                f"{run}-hf",
            ),
        )
        if offered
    ]
    return f"finished: {report or run}" + "; " * bool(lines) + "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m report", description=__doc__.splitlines()[0])
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
