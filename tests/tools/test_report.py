"""The page of a run, and of several."""

import html.parser
import json
import math
import pathlib
import re

import pytest

import config
from tests.conftest import make_config, refuses, run_tool
from tools import report

pytestmark = pytest.mark.quick

TIME = "2026-11-28 04:00:00,123 "
LOG = f"""{TIME}outputs/x: 5,048,576 parameters on 1 x cpu (1 x 1), bfloat16
{TIME}2,048 tokens per step = 1 micro-batches; resuming after step 2
{TIME}step 2  validation loss 2.8
{TIME}a sample:
first <x>
{TIME}saved outputs/x/checkpoints/step-00000002
{TIME}step 4  validation loss 2.75
{TIME}a sample:
def f(x):
    return <x>
"""


def train_row(step: int, **more) -> dict:
    """Like those of metrics.py."""
    return {
        "kind": "train",
        "step": step,
        "loss": 9 / step,
        "loss_mean": 9 / step,
        "grad_norm": 10.0**-step,
        "lr": 1e-3 / step,
        "tokens": 512 * step,
        "tokens_per_second_per_device": 100.0 * step,
        "mfu": None,
        "step_seconds": 2.0,
        "peak_memory_gib": 2.5,
        "slowest_rank": {"step_seconds": 2.0, "rank": 1},
        **more,
    }


def write_run(folder: pathlib.Path, rows: list[dict], **sections) -> pathlib.Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/rank-0.log").write_text(LOG)
    evaluation = {"kind": "eval", "step": 4, "loss": 2.75, "bits_per_byte": 1.25}
    lines = [json.dumps(row) for row in (*rows, evaluation)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"cut']))
    (folder / "config.toml").write_text(config.to_toml(make_config(**sections)))
    (folder / "status.json").write_text('{"state": "finished", "step": 4}')
    (folder / "environment.json").write_text(
        '{"command": ["train.py", "a b.toml"], "hosts": ["h"], "ranks": 2, "uncommitted": "+\\n-"}'
    )
    return folder


class Page(html.parser.HTMLParser):
    """Every figure's ticks and curves, the cells of tables, the text; asserts that elements are
    closed in their order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[tuple[str, dict]] = []
        self.figures: dict[str, list[tuple[str, dict]]] = {}  # (text, attributes) of elements
        self.cells: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag != "meta":
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        if self.figures and tag in ("path", "line"):
            [*self.figures.values()][-1].append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, attributes = self.open[-1] if self.open else ("", {})
        if tag == "figcaption":
            self.figures[data] = []
        elif tag == "text":
            [*self.figures.values()][-1].append((data, attributes))
        elif tag == "td":
            self.cells.append(data)
        elif tag != "style":
            self.text += data

    def value_of(self, label: str) -> str:
        return self.cells[self.cells.index(label) + 1]

    def curve(self, title: str, css_class: str = "c0") -> list[list[tuple[float, float]]]:
        """The parts of a curve as (step, value), read by the ticks as an eye would."""
        elements = self.figures[title]
        ticks = {"x": [], "y": []}
        for text, attributes in elements:
            if text not in ("path", "line", "step"):
                axis = "y" if attributes["x"] == "-8" else "x"
                ticks[axis].append((float(attributes[axis].rstrip("%")) * 10, float(text)))
        (x0, step0), *_, (x1, step1) = ticks["x"]
        (y0, low), *_, (y1, high) = ticks["y"]
        path = next(a["d"] for tag, a in elements if tag == "path" and a["class"] == css_class)
        parts: list[list[tuple[float, float]]] = []
        for pen, x, y in re.findall(r"([ML])([-\d.]+),([-\d.]+)", path):
            if pen == "M":
                parts.append([])
            step = step0 + (float(x) - x0) / (x1 - x0) * (step1 - step0)
            value = low + (float(y) - y0) / (y1 - y0) * (high - low)
            parts[-1].append((step, value))
        return parts


def page_of(*folders: pathlib.Path) -> Page:
    return Page(report.write_report([*folders]).read_text())


def test_curves_are_the_rows(tmp_path):
    rows = [train_row(step) for step in (1, 10, 20, 30)]
    page = page_of(write_run(tmp_path / "r", rows))
    (loss,) = page.curve("Loss")
    # a mean over ten steps stands in their middle
    expected = [(1, 9.0), (6, 0.9), (15.5, 0.45), (25.5, 0.3)]
    assert loss == [pytest.approx(point, abs=0.03) for point in expected]
    assert page.curve("Loss", "c0 dots") == [[pytest.approx((4, 2.75), abs=0.03)]]
    (rates,) = page.curve("Learning rate")
    assert rates == [pytest.approx((row["step"], row["lr"]), abs=0.03) for row in rows]
    marks = [a["class"] for tag, a in page.figures["Loss"] if tag == "line" and "x1" in a]
    assert marks == ["c0 saved", "c0 resumed"]


def test_gap_breaks_a_curve_and_powers_of_ten_are_logarithmic(tmp_path):
    rows = [train_row(step) for step in range(1, 7)]
    rows[2]["loss_mean"] = None
    rows[3]["loss_mean"] = math.inf
    page = page_of(write_run(tmp_path / "r", rows))
    assert [len(part) for part in page.curve("Loss")] == [2, 2]
    labels = [text for text, a in page.figures["Gradient norm"] if a.get("x") == "-8"]
    assert labels == ["1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1"]
    assert "before clipping, logarithmic" in page.text


def test_metrics_of_a_fork_are_drawn(tmp_path):
    rows = [train_row(step, balance=step, experts={"load": 2.0 * step}) for step in (1, 2, 3, 4)]
    figures = page_of(write_run(tmp_path / "r", rows)).figures
    assert [*figures][5:] == ["balance", "experts.load"]


def test_page_tells_what_the_folder_holds(tmp_path):
    folder = write_run(tmp_path / "r", [train_row(step) for step in (1, 2, 3, 4)])
    (folder / "plan.json").write_text('{"time of a step, s": "planned 1.9, measured 2"}')
    text = report.write_report([folder]).read_text()
    page = Page(text)
    assert page.value_of("state") == "finished at step 4 of 4"
    assert page.value_of("training, without saves and evaluations") == "0:00:08"
    assert page.value_of("tokens per second and device, median") == "250"
    assert page.value_of("model").startswith("5,048,576 parameters")
    assert page.value_of("time of a step, s") == "planned 1.9, measured 2"
    assert page.value_of("command") == "NPROC=2 ./run_train.sh 'a b.toml'"
    assert page.value_of("uncommitted") == "a diff of 2 lines, in environment.json"
    assert page.value_of("model.dim") == str(make_config().model.dim)
    # the newest sample is shown, the others can be opened
    newest, _, older = text.partition("<details>")
    assert "After step 4" in newest and "return &lt;x&gt;" in newest
    assert "After step 2" in older and "first &lt;x&gt;" in older
    assert "<script" not in text and not re.search(r"""(src|href)=|url\(""", text)


def test_runs_stand_side_by_side_with_the_options_that_differ(tmp_path):
    rows = [train_row(step) for step in (1, 2)]
    one = write_run(tmp_path / "one", rows)
    two = write_run(tmp_path / "two", rows, optim={"lr": 0.5})
    page = page_of(one, two)
    first = page.cells.index("optim.lr")
    assert page.cells[first + 1 : first + 3] == [str(make_config().optim.lr), "0.5"]
    assert page.curve("Loss", "c1") == page.curve("Loss", "c0")
    assert page_of(one, one).text.count(str(one)) > 1  # of equal names, the folders


def test_thinned_curve_keeps_its_extremes_and_gaps():
    curve: list[report.Point] = [(step, float(step % 7)) for step in range(1, 50_001)]
    curve[30_000] = (30_001, 99.0)
    curve[40_000] = (40_001, None)
    drawn = report.thinned(curve)
    assert len(drawn) <= 2 * report.WIDTH and drawn == sorted(drawn, key=lambda point: point[0])
    assert {(30_001, 99.0), (40_001, None)} <= {*drawn}


def test_folder_that_is_not_a_run_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with refuses("nothing: is not a folder", "empty: metrics.jsonl is missing"):
        report.write_report([tmp_path / "nothing", tmp_path / "empty"])
    run = write_run(tmp_path / "r", [train_row(1)])
    assert run_tool(report.main, run, "--out", tmp_path / "no/page.html") == 2
    assert "page.html: cannot be written" in capsys.readouterr().err
    assert run_tool(report.main, run) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"


def test_end_of_a_run_names_the_next_commands(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["-c", "a.toml", "--train.steps=4"])
    run = {"name": "r", "output_dir": str(tmp_path)}
    cfg = make_config(run=run, checkpoint={}, data={"source": "python-stdlib"})
    (tmp_path / "r").mkdir()
    (tmp_path / "r/tokenizer.model").touch()
    lines = report.what_next(cfg, tmp_path / "r/report.html").splitlines()
    assert lines[0].startswith(f"finished: {tmp_path}/r/report.html; ")
    assert any(line.endswith(f"-m generate {tmp_path}/r --prompt 'def '") for line in lines)
    assert "more steps, a longer schedule: ./run_train.sh a.toml --train.steps=8" in lines
