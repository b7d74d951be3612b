"""The page of a run, and of several."""

import json
import pathlib
import re
import xml.etree.ElementTree as ET

import pytest

import config
from tests.conftest import make_config, refuses, run_tool
from tools import report

pytestmark = pytest.mark.quick


def train_row(step: int) -> dict:
    """Like those of metrics.py."""
    loss = {"loss": 9 / step, "loss_mean": 9 / step, "grad_norm": 10.0**-step, "lr": 1e-3 / step}
    cost = {"step_seconds": 2.0, "peak_memory_gib": 2.5, "mfu": None, "tokens": 512 * step}
    cost["tokens_per_second_per_device"] = 100.0 * step
    return {"kind": "train", "step": step, "steps": 1, **loss, **cost, "experts": {"load": step}}


def write_run(folder: pathlib.Path, **sections) -> pathlib.Path:
    """Of four steps."""
    folder.mkdir()
    evaluation = {"kind": "eval", "step": 4, "loss": 2.75, "bits_per_byte": 1.25}
    lines = [json.dumps(row) for row in (*map(train_row, (1, 2, 3, 4)), evaluation)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"cut']))
    (folder / "config.toml").write_text(config.to_toml(make_config(**sections)))
    (folder / "status.json").write_text('{"state": "finished", "step": 4}')
    (folder / "environment.json").write_text('{"command": ["train.py", "a b.toml"]}')
    return folder


def cells_of(page: pathlib.Path) -> list[str]:
    """Of the tables of a page, which is well-formed."""
    return [cell.text or "" for cell in ET.parse(page).getroot().iter("td")]


def test_page_has_what_the_folder_holds(tmp_path, capsys):
    folder = write_run(tmp_path / "r")
    (folder / "plan.json").write_text('{"time of a step, s": "planned 1.9, measured 2"}')
    assert run_tool(report.main, folder) == 0
    page = folder / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    cells = cells_of(page)
    for label, value in {
        "seconds of training, without saves and evaluations": "8",
        "tokens per second and device, median": "250",
        "loss_mean": "2.25",
        "bits_per_byte": "1.25",
        "time of a step, s": "planned 1.9, measured 2",
        "command": "train.py a b.toml",
        "model.dim": str(make_config().model.dim),
    }.items():
        assert cells[cells.index(label) + 1] == value
    captions = [figure[0].text for figure in ET.parse(page).getroot().iter("figure")]
    assert {"Loss, nats per token", "experts.load"} <= {*captions}  # the second is a fork's
    text = page.read_text()
    assert "<script" not in text and not re.search(r"""(src|href)=|url\(""", text)


def test_runs_stand_side_by_side_with_the_options_that_differ(tmp_path):
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two", optim={"lr": 0.5})]
    cells = cells_of(report.write_report(folders, tmp_path / "page.html"))
    first = cells.index("optim.lr")
    assert cells[first + 1 : first + 3] == [str(make_config().optim.lr), "0.5"]


def test_folder_that_is_not_a_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with refuses("nothing: metrics.jsonl is missing", "empty: metrics.jsonl is missing"):
        report.write_report([tmp_path / "nothing", tmp_path / "empty"])


def test_end_of_a_run_names_the_next_commands(tmp_path):
    run = {"name": "r", "output_dir": str(tmp_path)}
    cfg = make_config(run=run, checkpoint={}, data={"source": "python-stdlib"})
    (tmp_path / "r").mkdir()
    (tmp_path / "r/tokenizer.model").touch()
    first, second = report.what_next(cfg, None).splitlines()
    assert first.endswith(f"-m generate {tmp_path}/r --prompt 'def '")
    assert second.endswith(f"-m huggingface export {tmp_path}/r {tmp_path}/r-hf")
