"""What a machine lacks for a run, made up."""

import resource
import shutil
from types import SimpleNamespace

import pytest

from launch.ranks import Ranks
from model.build import meta_model
from tests.conftest import make_config, run_tool
from tools import preflight
from tools.preflight import GIB

pytestmark = pytest.mark.quick


def test_open_files_of_many_ranks(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    assert not [*preflight.open_files(make_config(), Ranks(31, 8, 0, ""))]
    (text,) = preflight.open_files(make_config(), Ranks(32, 8, 0, ""))
    assert text.startswith("RLIMIT_NOFILE = 1024: rank 0 of 256 opens 1054 files")


KEPT = "3.1 0 fits, 2.9 0 warning, 2.1 1 fits, 0.9 0 error, 0.5 1 warning"


@pytest.mark.parametrize("case", KEPT.split(", "))
def test_room_for_the_checkpoints_that_are_kept(monkeypatch, tmp_path, capsys, case):
    """Free GiB, checkpoints of 1 GiB that exist. The oldest is kept until the newest is complete."""
    free, existing, outcome = case.split()
    run = {"output_dir": str(tmp_path), "name": "r"}
    checkpoint = {"save_every_steps": 2, "keep_last": 2}
    cfg = make_config(run=run, train={"steps": 10}, checkpoint=checkpoint)
    if existing == "1":
        (tmp_path / "r/checkpoints/step-00000001").mkdir(parents=True)
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda cfg: GIB)
    usage = SimpleNamespace(total=100 * GIB, free=float(free) * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = "".join(preflight.disk(cfg, Ranks(1, 1, 0, "")))
    warning = capsys.readouterr().err
    assert (bool(error), bool(warning)) == (outcome == "error", outcome == "warning")
    if error + warning:
        expected = f"keep_last = 2: 3 checkpoints of 1.0 GiB, {existing} of which exist"
        assert expected in error + warning


def test_size_of_a_checkpoint_is_that_of_weights_and_moments():
    cfg = make_config()
    parameters = sum(p.numel() for p in meta_model(cfg.model).parameters())
    assert 0.95 * 12 * parameters < preflight.checkpoint_bytes(cfg) <= 12 * parameters


def test_command_lists_every_problem(monkeypatch, write_config, capsys):
    for check in ("disk", "open_files"):
        monkeypatch.setattr(preflight, check, lambda *unused: ["no room"])
    for options, problems in ([], 2), (["--eval-only"], 1):
        assert run_tool(preflight.main, write_config(), *options) == 2
        assert capsys.readouterr().err.splitlines() == ["no room"] * problems
