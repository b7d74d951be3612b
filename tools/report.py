"""A page about one or several runs: curves, last rows, environment, configuration.

    ./run_train.sh -m report outputs/tiny                       writes outputs/tiny/report.html
    ./run_train.sh -m report outputs/a outputs/b --out compared.html

The launcher also writes a run's page when the run ends. The page is a single file without scripts,
and loads no other files.
"""

import argparse
import contextlib
import functools
import html
import itertools
import json
import math
import pathlib
import statistics
from typing import Any, NamedTuple

import config
from config import ConfigError, run_tool
from system import print_line, read_json, write_atomic
from tools.svg import Chart, Drawing, Point

# (title, whether its scale begins at zero) by the key in a training row. Any further number is a
# fork's metric, and is drawn, too.
TITLES = {
    "loss_mean": ("Loss, nats per token", False),
    "lr": ("Learning rate", True),
    "grad_norm": ("Gradient norm before clipping", True),
    "tokens_per_second_per_device": ("Tokens per second and device", True),
    "peak_memory_gib": ("Peak memory, GiB", True),
}
NOT_DRAWN = {"step", "steps", "loss", "tokens", "epochs", "batch_digest"}
WIDTH = 600  # size of a chart, in units of its drawing
HEIGHT = 250
COLORS = ("#2f7de1", "#d9661f", "#1a9a6b", "#b452c8")  # one per run; further runs are dashed

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #5f6b76; --line: #d9dee3; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #353c44; --page: #0d1117 } }
body { margin: 0 auto; padding: 1rem; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.charts { display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600 } td:first-child { color: var(--soft) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; min-width: 50% }
td { vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line) }
td + td { min-width: 8.5em; overflow-wrap: anywhere } h1 span { margin-right: 1.2em }
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


class ReportedRun(NamedTuple):
    """The content of a run's folder."""

    folder: pathlib.Path
    train: list[dict]  # rows of metrics.jsonl, ascending by step; tables flattened
    evaluations: list[dict]
    options: dict[str, Any]  # by dotted name

    def curve(self, key: str) -> list[Point]:
        """A number of the training rows over steps. A mean loss is drawn in the middle of its steps, to
        align it with the validation loss."""
        points = []
        for row in self.train:
            shift = (row["steps"] - 1) / 2 if key == "loss_mean" else 0
            points.append((row["step"] - shift, as_number(row.get(key))))
        return points


def read_run(folder: pathlib.Path) -> ReportedRun:
    """Reads a run's folder. Raises ConfigError if it is not a run's, or has no rows."""
    rows = []
    with contextlib.suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # the last line may be incomplete
                rows.append(config.flatten(json.loads(line)))
    if not rows:
        raise ConfigError(f"{folder}: metrics.jsonl is missing, or has no rows yet")
    options = {}
    with contextlib.suppress(ConfigError):
        options = config.flatten(config.read_toml(str(folder / "config.toml")))
    rows.sort(key=lambda row: row["step"])
    train = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    return ReportedRun(folder, train, evaluations, options)


def as_number(value: Any) -> float | None:
    """The value if it is a number, else None. Also None for a number so large that a chart's span
    could overflow."""
    is_number = type(value) in (int, float) and abs(value) < 1e300
    return value if is_number else None


# Curves


def drawn_keys(runs: list[ReportedRun]) -> list[str]:
    """The keys of training rows that the page draws."""
    numbers = set()
    for run in runs:
        for row in run.train:
            for key, value in row.items():
                if as_number(value) is not None:
                    numbers.add(key)
    return [*TITLES, *sorted(numbers - TITLES.keys() - NOT_DRAWN)]


def draw(key: str, runs: list[ReportedRun]) -> str:
    """A figure of a training row's number over steps; "" if no run has it."""
    title, from_zero = TITLES.get(key, (key, False))
    curves = [run.curve(key) for run in runs]
    validation: list[list[Point]] = [[] for _ in runs]
    if key == "loss_mean":
        for i, run in enumerate(runs):
            validation[i] = [(row["step"], as_number(row.get("loss"))) for row in run.evaluations]
    points = [*itertools.chain(*curves, *validation)]
    values = [value for _, value in points if value is not None]
    if not values:
        return ""
    steps = [step for step, _ in points]
    first = min(steps) if min(steps) > 1 else 0
    last = max(*steps, first + 1)
    low = min(values)
    high = max(values)
    if from_zero:
        low = min(low, 0)
    if high == low:
        high += abs(low) or 1
    high = max(high, low + 1e-300)  # a smaller span has no ticks
    page = Drawing(WIDTH, HEIGHT)
    chart = Chart(page, (60, 10, WIDTH - 75, HEIGHT - 45), (first, last), (low, high))
    chart.scales("", whole=True)
    for i in range(len(runs)):
        color, dashes = line_of(i)
        chart.line(thinned(curves[i]), color, dashes)
        chart.line(validation[i], color, dashes)
        chart.dots(validation[i], color)
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{page.svg()}</figure>"


def line_of(i: int) -> tuple[str, str]:
    """Returns (color, dashes) of run i's lines."""
    return COLORS[i % len(COLORS)], "" if i < len(COLORS) else "6 4"


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


# Tables


def all_labels(columns: list[dict]) -> list[str]:
    """The labels of all columns, in order of first occurrence."""
    return list(dict.fromkeys(itertools.chain(*columns)))


def section(heading: str, columns: list[dict], labels: list[str] | None = None) -> str:
    """A table with a column of values per run, by label. labels: by default all. "" if it would be
    empty."""
    if labels is None:
        labels = all_labels(columns)
    if not labels:
        return ""
    lines = []
    for label in labels:
        cells = [label, *(format_value(column.get(label)) for column in columns)]
        lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{heading}</h2><div class="scroll"><table>{rows}</table></div>'


def format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else str(value)


def summary(run: ReportedRun) -> dict[str, Any]:
    """The column at the page's top: what no single row holds."""
    status = read_json(run.folder / "status.json")
    rates = [rate for _, rate in run.curve("tokens_per_second_per_device") if rate is not None]
    seconds = [row["steps"] * (as_number(row.get("step_seconds")) or 0) for row in run.train]
    launch = read_json(run.folder / "environment.json")
    return {
        "state": f"{status.get('state')} at step {status.get('step')}, {status.get('time')}",
        "seconds of training, without saves and evaluations": sum(seconds),
        "tokens per second and device, median": statistics.median(rates) if rates else None,
        "launches": 1 + len(launch.get("earlier", [])),
    }


def environment(run: ReportedRun) -> dict[str, Any]:
    """environment.json of the newest launch, with the size of its diff instead of the diff."""
    launch = read_json(run.folder / "environment.json")
    launch.pop("earlier", None)
    if launch.get("uncommitted"):
        lines = str(launch["uncommitted"]).splitlines()
        launch["uncommitted"] = f"a diff of {len(lines)} lines, in environment.json"
    return launch


# The page


def page(runs: list[ReportedRun]) -> str:
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    legend = []
    for i, name in enumerate(names):
        color, dashes = line_of(i)
        line = "╍╍╍" if dashes else "━━━"
        legend.append(f'<span><b style="color: {color}">{line}</b> {html.escape(name)}</span>')
    options = [{name: config.toml(value) for name, value in run.options.items()} for run in runs]
    differing = []
    equal = []
    for name in all_labels(options):
        values = {column.get(name) for column in options}
        (differing if len(values) > 1 else equal).append(name)
    charts = [draw(key, runs) for key in drawn_keys(runs)]
    sections = [
        f"<h1>{' '.join(legend)}</h1>",
        section("Summary", [summary(run) for run in runs]),
        section("Options that differ", options, differing),
        f'<h2>Curves over steps; dots: validation</h2><div class="charts">{"".join(charts)}</div>',
        section("Last training row", [run.train[-1] if run.train else {} for run in runs]),
        section(
            "Last evaluation", [run.evaluations[-1] if run.evaluations else {} for run in runs]
        ),
        # plan.json has the dry run's predictions next to measured values
        section("Plan and measurement", [read_json(run.folder / "plan.json") for run in runs]),
        section("Environment of the newest launch", [environment(run) for run in runs]),
        section("Options", options[:1], equal),
    ]
    title = html.escape(" · ".join(names))
    return PAGE.format(title=title, style=STYLE, body="\n".join(sections))


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
        sample = ["generate", folder, "--prompt", "def " if is_code else "The "]
    if any(config.run_folder(cfg.run).glob("tokenizer.*")):  # imported token files may have none
        text += f"; text from it: {config.command('-m', *sample)}"
    return (
        f"{text}\nexport: {config.command('-m', 'huggingface', 'export', folder, f'{folder}-hf')}"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m report", description=__doc__.splitlines()[0]
    )
    # print one line, like all other errors here
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("runs", type=pathlib.Path, nargs="+", metavar="RUN", help="a run's folder")
    help_of_out = "default: report.html in the first RUN"
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.html", help=help_of_out)
    args = parser.parse_args(argv)
    print_line(str(write_report(args.runs, args.out)))
    return 0


if __name__ == "__main__":
    run_tool(main)
