"""The page of a run, and of several."""

import json
import math
import pathlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

import config
from tests.conftest import make_config, refuses, run_tool
from tools import report
from tools.svg import Point

pytestmark = pytest.mark.quick


def train_row(step: int, **more) -> dict:
    """Like those of metrics.py."""
    loss = {"loss": 9 / step, "loss_mean": 9 / step, "grad_norm": 10.0**-step, "lr": 1e-3 / step}
    cost = {"step_seconds": 2.0, "peak_memory_gib": 2.5, "mfu": None, "tokens": 512 * step}
    cost["tokens_per_second_per_device"] = 100.0 * step
    return {"kind": "train", "step": step, "steps": 1, **loss, **cost, **more}


def write_run(folder: pathlib.Path, rows: list[dict], **sections) -> pathlib.Path:
    folder.mkdir()
    evaluation = {"kind": "eval", "step": 4, "loss": 2.75, "bits_per_byte": 1.25}
    lines = [json.dumps(row) for row in (*rows, evaluation)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"cut']))
    (folder / "config.toml").write_text(config.to_toml(make_config(**sections)))
    (folder / "status.json").write_text('{"state": "finished", "step": 4}')
    environment = {"command": ["train.py", "a b.toml"], "hosts": ["h"], "uncommitted": "+\n-"}
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


SVG = "{http://www.w3.org/2000/svg}"


class Page:
    """A page that is well-formed: its figures by title, the cells of its tables, its text."""

    def __init__(self, text: str):
        root = ET.fromstring(text)
        self.cells = [cell.text or "" for cell in root.iter("td")]
        self.text = " ".join(root.itertext())
        self.figures = {"".join(f[0].itertext()).strip(): f[1] for f in root.iter("figure")}

    def value_of(self, label: str) -> str:
        return self.cells[self.cells.index(label) + 1]

    def scale(self, title: str, anchor: str, coordinate: str) -> Callable[[float], float]:
        """From a position to its number, by the first and the last tick of an axis."""
        texts = self.figures[title].iter(f"{SVG}text")
        shown = [text for text in texts if text.attrib["text-anchor"] == anchor]
        at = [float(text.attrib[coordinate]) for text in shown]
        numbers = [float((text.text or "").replace("k", "e3")) for text in shown]
        slope = (numbers[-1] - numbers[0]) / (at[-1] - at[0])
        return lambda position: numbers[0] + (position - at[0]) * slope

    def curves(self, title: str, color: str = report.COLORS[0]) -> list[list]:
        """The parts of the curves of a color as (step, value), read by the ticks as an eye would."""
        step = self.scale(title, "middle", "x")
        value = self.scale(title, "end", "y")
        parts = []
        for path in self.figures[title].iterfind(f"{SVG}path[@stroke='{color}']"):
            for part in path.attrib["d"].split("M"):
                points = re.findall(r"([-\d.]+),([-\d.]+)", part)
                # a tick's number stands 4 units below its line
                parts.append([(step(float(x)), value(float(y) + 4)) for x, y in points])
        return [part for part in parts if part]


def page_of(*folders: pathlib.Path) -> Page:
    return Page(report.write_report([*folders]).read_text())


def test_curves_are_the_rows(tmp_path):
    covered = {1: 1, 10: 9, 20: 10, 30: 5}  # steps of each row: the last is that of a resume
    rows = [train_row(step, steps=steps) for step, steps in covered.items()]
    page = page_of(write_run(tmp_path / "r", rows))
    loss, validation, dot = page.curves("Loss, nats per token")
    # a mean over ten steps stands in their middle
    expected = [(1, 9.0), (6, 0.9), (15.5, 0.45), (28, 0.3)]
    assert loss == [pytest.approx(point, abs=0.1) for point in expected]
    assert validation == dot == [pytest.approx((4, 2.75), abs=0.1)]
    [rates] = page.curves("Tokens per second and device")
    assert rates == [pytest.approx((row["step"], 100 * row["step"]), abs=20) for row in rows]


@pytest.mark.parametrize("gap", [None, -1e308, math.nan, 10**400], ids=["none", "large", "nan", ""])
def test_gap_breaks_a_curve(tmp_path, gap):
    rows = [train_row(step) for step in range(1, 7)]
    rows[2]["loss_mean"] = gap
    page = page_of(write_run(tmp_path / "r", rows))
    assert [len(part) for part in page.curves("Loss, nats per token")] == [2, 3, 1, 1]


def test_metrics_of_a_fork_are_drawn(tmp_path):
    fork = {"experts": {"load": 2.0}, "least": 5e-324}
    rows = [train_row(step, balance=step, **fork) for step in (1, 2, 3, 4)]
    figures = page_of(write_run(tmp_path / "r", rows)).figures
    assert {"balance", "experts.load", "least"} <= figures.keys()


def test_page_tells_what_the_folder_holds(tmp_path):
    folder = write_run(tmp_path / "r", [train_row(step) for step in (1, 2, 3, 4)])
    (folder / "plan.json").write_text('{"time of a step, s": "planned 1.9, measured 2"}')
    text = report.write_report([folder]).read_text()
    page = Page(text)
    for label, value in {
        "seconds of training, without saves and evaluations": "8",
        "tokens per second and device, median": "250",
        "loss_mean": "2.25",
        "bits_per_byte": "1.25",
        "time of a step, s": "planned 1.9, measured 2",
        "command": "train.py a b.toml",
        "uncommitted": "a diff of 2 lines, in environment.json",
        "model.dim": str(make_config().model.dim),
    }.items():
        assert page.value_of(label) == value
    assert "<script" not in text and not re.search(r"""(src|href)=|url\(""", text)


def test_runs_stand_side_by_side_with_the_options_that_differ(tmp_path):
    rows = [train_row(step) for step in (1, 2)]
    one = write_run(tmp_path / "one", rows)
    two = write_run(tmp_path / "two", rows, optim={"lr": 0.5})
    page = page_of(one, two)
    first = page.cells.index("optim.lr")
    assert page.cells[first + 1 : first + 3] == [str(make_config().optim.lr), "0.5"]
    title = "Loss, nats per token"
    assert page.curves(title) == page.curves(title, report.COLORS[1]) != []
    assert page_of(one, one).text.count(str(one)) > 1  # of equal names, the folders


def test_thinned_curve_keeps_its_extremes_and_gaps():
    curve: list[Point] = [(step, float(step % 7)) for step in range(1, 50_001)]
    curve[30_000] = (30_001, 99.0)
    curve[40_000] = (40_001, None)
    drawn = report.thinned(curve)
    assert len(drawn) <= 2 * report.WIDTH and drawn == sorted(drawn, key=lambda point: point[0])
    assert {(30_001, 99.0), (40_001, None)} <= {*drawn}


def test_folder_that_is_not_a_run_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with refuses("nothing: metrics.jsonl is missing", "empty: metrics.jsonl is missing"):
        report.write_report([tmp_path / "nothing", tmp_path / "empty"])
    run = write_run(tmp_path / "r", [train_row(1)])
    assert run_tool(report.main, run, "--out", tmp_path / "no/page.html") == 2
    assert "page.html: cannot be written" in capsys.readouterr().err
    assert run_tool(report.main, run) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"


def test_end_of_a_run_names_the_next_commands(tmp_path):
    run = {"name": "r", "output_dir": str(tmp_path)}
    cfg = make_config(run=run, checkpoint={}, data={"source": "python-stdlib"})
    (tmp_path / "r").mkdir()
    (tmp_path / "r/tokenizer.model").touch()
    first, second = report.what_next(cfg, None).splitlines()
    assert first.startswith(f"finished: {tmp_path}/r; text from it: ")
    assert first.endswith(f"-m generate {tmp_path}/r --prompt 'def '")
    assert second.endswith(f"-m huggingface export {tmp_path}/r {tmp_path}/r-hf")
    assert report.what_next(make_config(run=run), None) == f"finished: {tmp_path}/r"
