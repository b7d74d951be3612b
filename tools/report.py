"""A page about one or several runs: curves, evaluation, environment, configuration.

    ./run_train.sh -m report outputs/tiny                       writes outputs/tiny/report.html
    ./run_train.sh -m report outputs/a outputs/b --out compared.html

The launcher also writes a run's page when the run ends. The page is a single file without scripts,
and loads no other files.
"""

import argparse
import contextlib
import datetime
import functools
import html
import json
import math
import pathlib
import re
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import config
from config import ConfigError, run_tool
from system import print_line, read_json, write_atomic
from tools.svg import Chart, Drawing, Point


class Quantity(NamedTuple):
    """A quantity that the page draws over steps."""

    key: str  # in a training row
    title: str
    unit: str = ""
    from_zero: bool = False


QUANTITIES = (
    Quantity("loss_mean", "Loss", "nats per token"),
    Quantity("lr", "Learning rate", from_zero=True),
    Quantity("grad_norm", "Gradient norm", "before clipping", from_zero=True),
    Quantity(
        "tokens_per_second_per_device",
        "Throughput",
        "tokens per second and device",
        from_zero=True,
    ),
    Quantity("peak_memory_gib", "Peak memory", "GiB", from_zero=True),
)
# Other keys of a training row. The page also draws any further number: it is a fork's metric.
NOT_DRAWN = (
    "step",
    "steps",
    "loss",
    "tokens",
    "mfu",
    "step_seconds",
    "data_seconds",
    "epochs",
    "batch_digest",
)
WIDTH = 600  # size of a chart, in units of its drawing
HEIGHT = 250
COLORS = ("#2f7de1", "#d9661f", "#1a9a6b", "#b452c8")  # one per run; further runs are dashed

# In rank 0's log: the beginning of a record, and the records that the page shows
TIME = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
LAUNCHED = re.compile(TIME + r".*: ([\d,]+ parameters on .*), [a-z]+[0-9]+$", re.M)
RESUMED = re.compile(TIME + r".* tokens per step = .*; resuming after step (\d+)$", re.M)

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #5f6b76; --line: #d9dee3; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #353c44; --page: #0d1117 } }
body { margin: 0 auto; padding: 1rem; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.charts { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600 }
small, .note, td:first-child { color: var(--soft) } .names span { margin-right: 1.2em }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; min-width: 50% }
td { vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line) }
td + td { min-width: 8.5em; overflow-wrap: anywhere }
pre { overflow-x: auto; padding: 10px; border: 1px solid var(--line); font-size: 13px }
summary { color: var(--soft); cursor: pointer }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""


@dataclass(frozen=True)
class ReportedRun:
    """The content of a run's folder."""

    folder: pathlib.Path
    train: list[dict]  # rows of metrics.jsonl, ascending by step; tables flattened
    evaluations: list[dict]
    options: dict[str, Any]  # by dotted name
    log: str  # rank 0's log, to which each launch appends

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def resumed(self) -> list[int]:
        """The steps after which launches resumed."""
        return sorted({int(step) for step in RESUMED.findall(self.log)})

    def curve(self, key: str) -> list[Point]:
        """A number of the training rows over steps.

        Draws a mean loss at the middle of its steps, to align it with the validation loss.
        """
        points = []
        for row in self.train:
            shift = (row["steps"] - 1) / 2 if key == "loss_mean" else 0
            points.append((row["step"] - shift, as_number(row.get(key))))
        return points

    def validation(self) -> list[Point]:
        return [(row["step"], as_number(row.get("loss"))) for row in self.evaluations]


def read_run(folder: pathlib.Path) -> ReportedRun:
    """Reads a run's folder. Raises ConfigError if it is not a run's, or has no rows."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; name a run's, such as outputs/tiny")
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"{folder}: metrics.jsonl is missing, or has no rows yet")
    options = {}
    with contextlib.suppress(ConfigError):
        options = config.flatten(config.read_toml(str(folder / "config.toml")))
    log = ""
    with contextlib.suppress(OSError):
        log = (folder / "logs" / "rank-0.log").read_text(errors="replace")
    train = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    return ReportedRun(folder, train, evaluations, options, log)


def read_rows(path: pathlib.Path) -> list[dict]:
    """The rows of a metrics.jsonl, ascending by step. Skips a last line that is incomplete."""
    rows = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                rows.append(config.flatten(json.loads(line)))
    return sorted(rows, key=lambda row: row["step"])


def as_number(value: Any) -> float | None:
    """The value if it is a number, else None. Also None for a number so large that a chart's span
    could overflow."""
    is_number = type(value) in (int, float) and abs(value) < 1e300
    return value if is_number else None


# Curves


def draw(quantity: Quantity, runs: list[ReportedRun]) -> str:
    """A figure of a quantity over steps; "" if no run has the quantity."""
    curves = [run.curve(quantity.key) for run in runs]
    validation = []
    if quantity.key == "loss_mean":
        validation = [run.validation() for run in runs]
    points = [point for curve in (*curves, *validation) for point in curve]
    values = [value for _, value in points if value is not None]
    if not values:
        return ""
    steps = [step for step, _ in points]
    first = min(steps) if min(steps) > 1 else 0
    last = max(*steps, first + 1)
    page = Drawing(WIDTH, HEIGHT)
    area = (60, 10, WIDTH - 75, HEIGHT - 45)
    chart = Chart(page, area, (first, last), shown_values(quantity, values))
    chart.scales("", whole=True)
    for i, run in enumerate(runs):
        color, dashes = line_of(i)
        chart.line(thinned(curves[i]), color, dashes)
        if validation:
            chart.line(validation[i], color, dashes)
            chart.dots(validation[i], color)
        for step in run.resumed:
            if first <= step <= last:
                page.path(f"M{chart.x(step):.1f} {chart.top}v{chart.height}", color, dashes="2 3")
    caption = f"{escaped(quantity.title)} <small>{quantity.unit}</small>"
    return f"<figure><figcaption>{caption}</figcaption>{page.svg()}</figure>"


def line_of(i: int) -> tuple[str, str]:
    """Returns (color, dashes) of run i's lines."""
    return COLORS[i % len(COLORS)], "" if i < len(COLORS) else "6 4"


def shown_values(quantity: Quantity, values: list[float]) -> tuple[float, float]:
    """Returns (lowest, highest) value of a chart's scale."""
    low = min(values)
    high = max(values)
    if quantity.from_zero:
        low = min(low, 0)
    if high == low:
        high += abs(low) or 1
    return low, max(high, low + 1e-300)  # a smaller span has no ticks


def thinned(curve: list[Point]) -> list[Point]:
    """Reduces a long curve to the lowest and the highest point in each of WIDTH intervals. A gap
    counts as lowest."""
    size = math.ceil(len(curve) / WIDTH)
    if size <= 2:
        return curve
    drawn = []
    for begin in range(0, len(curve), size):
        stretch = curve[begin : begin + size]
        drawn += sorted({min(stretch, key=gap_first), max(stretch, key=gap_first)})
    return drawn


def gap_first(point: Point) -> tuple[bool, float]:
    return point[1] is not None, point[1] or 0.0


# Tables. A column is a dict of one run's values by label.


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
    """A column of these values; skips empty ones."""
    column = {}
    for label, value in config.flatten(values).items():
        if value not in (None, "", {}):
            column[label] = format_value(value)
    return column


def all_labels(columns: list[dict[str, str]]) -> list[str]:
    """The labels of all columns, in order of first occurrence."""
    labels: dict[str, None] = {}
    for column in columns:
        labels |= dict.fromkeys(column)
    return list(labels)


def table(columns: list[dict[str, str]], names: list[str], labels: list[str]) -> str:
    """A table with one column of values per run. Several runs get a header with their names."""
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


def summary(run: ReportedRun) -> dict[str, str]:
    """The column at the page's top."""
    status = read_json(run.folder / "status.json")
    last = run.train[-1] if run.train else {}
    evaluation = run.evaluations[-1] if run.evaluations else {}
    rates = [value for _, value in run.curve("tokens_per_second_per_device") if value is not None]
    peaks = [value for _, value in run.curve("peak_memory_gib") if value is not None]
    speed = round(statistics.median(rates)) if rates else None
    peak = round(max(peaks), 2) if peaks else None
    launches = LAUNCHED.findall(run.log)
    step = max(status.get("step") or 0, last.get("step", 0))
    state = str(status.get("state", "unknown")).replace("preempted", "stopped")
    return as_column(
        {
            "state": f"{state} at step {step} of {run.options.get('train.steps', '?')}",
            "time": status.get("time"),
            "training, without saves and evaluations": training_time(run),
            "model": launches[-1] if launches else None,
            label_of_loss(run): last.get("loss_mean"),
            "validation loss": evaluation.get("loss"),
            "bits per byte": evaluation.get("bits_per_byte"),
            "tokens": last.get("tokens"),
            "epochs": last.get("epochs"),
            "mfu": last.get("mfu"),
            "tokens per second and device, median": speed,
            "peak memory, GiB": peak,
            "launches": len(launches) or None,
            "resumed after steps": run.resumed[-5:] or None,
        }
    )


def training_time(run: ReportedRun) -> str | None:
    """The total time of all launches' steps, in hours, minutes and seconds."""
    seconds = 0.0
    for row in run.train:
        seconds += row["steps"] * (as_number(row.get("step_seconds")) or 0)
    return str(datetime.timedelta(seconds=round(seconds))) if run.train else None


def label_of_loss(run: ReportedRun) -> str:
    """The label of the last row's loss, with the number of steps that it averages."""
    return f"loss, mean of the last {run.train[-1]['steps']} steps" if run.train else "loss"


def environment(run: ReportedRun) -> dict[str, str]:
    """environment.json, with the size of its diff instead of the diff."""
    launch = read_json(run.folder / "environment.json")
    if launch.get("uncommitted"):
        lines = str(launch["uncommitted"]).splitlines()
        launch["uncommitted"] = f"a diff of {len(lines)} lines, in environment.json"
    launch.pop("earlier", None)  # previous launches
    return as_column(launch)


# The page


def page(runs: list[ReportedRun]) -> str:
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    title = escaped(" · ".join(names))
    options = [{name: config.toml(value) for name, value in run.options.items()} for run in runs]
    differing = []
    equal = []
    for name in all_labels(options):
        is_equal = len({values.get(name) for values in options}) == 1
        (equal if is_equal else differing).append(name)
    summaries = [summary(run) for run in runs]
    evaluations = [
        as_column({**run.evaluations[-1], "kind": None}) if run.evaluations else {} for run in runs
    ]
    # plan.json has the dry run's predictions next to measured values
    plans = [as_column(read_json(run.folder / "plan.json")) for run in runs]
    charts = [draw(quantity, runs) for quantity in (*QUANTITIES, *other_quantities(runs))]

    sections = [f"<h1>{title}</h1>"]
    if len(runs) > 1:
        sections.append(legend(names))
    sections += [
        table(summaries, names, all_labels(summaries)),
        section("Options that differ", options, names, differing),
        "<h2>Curves over steps</h2>"
        '<p class="note">Dots: validation. A mean loss is drawn in the middle of its steps. '
        "Dotted vertical lines: a launch resumed there.</p>"
        f'<div class="charts">{"".join(charts)}</div>',
        section("Last evaluation", evaluations, names),
        section("Plan and measurement", plans, names),
        section("Environment of the newest launch", [environment(run) for run in runs], names),
        section(
            "Options that are equal" if len(runs) > 1 else "Configuration",
            options[:1],
            names[:1],
            equal,
        ),
    ]
    return PAGE.format(title=title, style=STYLE, body="\n".join(sections))


def other_quantities(runs: list[ReportedRun]) -> list[Quantity]:
    """A fork's metrics: numbers in the training rows that this repository does not log."""
    known = {*NOT_DRAWN, *(quantity.key for quantity in QUANTITIES)}
    names: dict[str, None] = {}
    for run in runs:
        for row in run.train:
            for key in row.keys() - known - names.keys():
                if as_number(row[key]) is not None:
                    names[key] = None
    return [Quantity(name, name) for name in sorted(names)]


def legend(names: list[str]) -> str:
    """The legend: a line in each run's color, and its name."""
    entries = []
    for i, name in enumerate(names):
        color, dashes = line_of(i)
        line = "╍╍╍" if dashes else "━━━"
        entries.append(f'<span><b style="color: {color}">{line}</b> {escaped(name)}</span>')
    return f'<p class="names">{" ".join(entries)}</p>'


def section(
    heading: str,
    columns: list[dict[str, str]],
    names: list[str],
    labels: list[str] | None = None,
) -> str:
    """A table with a heading; "" if it would be empty. labels=None shows all labels."""
    if labels is None:
        labels = all_labels(columns)
    if not labels:
        return ""
    return f"<h2>{heading}</h2>{table(columns, names, labels)}"


def write_report(folders: list[pathlib.Path], out: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the page and returns its path, which is in the first run's folder by default. Raises
    ConfigError with the problems of all folders."""
    runs = config.together(*(functools.partial(read_run, folder) for folder in folders))
    out = out or folders[0] / "report.html"
    try:
        # names and texts may hold lone surrogates
        write_atomic(out, page(runs).encode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    return out


def what_next(cfg: config.Config, report: pathlib.Path | None) -> str:
    """The message after a run, with commands that the user may want next."""
    folder = str(config.run_folder(cfg.run))
    text = f"finished: {report or folder}"
    if cfg.checkpoint is None:
        return text
    if cfg.data.has_conversations:
        sample = ["chat", folder]
    else:
        is_code = cfg.data.source == "python-stdlib" and not cfg.data.sources
        prompt = "def " if is_code else "The "
        sample = ["generate", folder, "--prompt", prompt]
    if any(config.run_folder(cfg.run).glob("tokenizer.*")):  # imported token files may have none
        text += f"; text from it: {config.command('-m', *sample)}"
    export = ("-m", "huggingface", "export", folder, f"{folder}-hf")
    return f"{text}\nexport: {config.command(*export)}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m report", description=__doc__.splitlines()[0]
    )
    # print one line, like all other errors here
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
