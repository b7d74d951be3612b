"""The planner's command: what it prints, its exit codes, and a run next to its plan."""

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import tomli

import config
from tests.conftest import REPO, launch, make_config
from tools.planner import __main__ as command
from tools.planner import check, show
from tools.planner.devices import DEVICES
from tools.planner.plan import GIB, Asked, plan

TINY = REPO / "configs/tiny.toml"


def dry_run(capsys: Any, *words: object) -> tuple[bool, str, str]:
    """(whether all fit, stdout, stderr) of the command, in this process."""
    args, cfg = command.parse([*map(str, words)], "usage")
    fits = command.dry_run(cfg, args)
    return fits, *capsys.readouterr()


def rows(capsys: Any, *words: object) -> Any:
    return json.loads(dry_run(capsys, *words, "--json")[1])


# what docs and contract name
KEYS = """
    parameters world_size replicas shards cp tp units
    parameter_bytes_per_rank gradient_bytes_per_rank optimizer_bytes_per_rank
    micro_batch_size accumulation_steps tokens_per_step steps_per_epoch
    flops_per_token counted_flops_per_token collectives_per_step traffic_per_step
    peak_gib peak_at parts_gib host_gib pools_gib reserved_gib device_gib fits not_counted
    step_seconds tokens_per_second_per_device waiting_seconds mfu gpu_hours
"""


def test_json_has_the_keys_that_are_documented(capsys):
    path = REPO / "configs/llama8b.toml"
    row = rows(capsys, path, "--world-size=8")
    assert {*row} == {*KEYS.split()}
    elements = 8_030_261_248
    assert row["parameters"] == elements and row["optimizer_bytes_per_rank"] == elements + 4 * 291
    assert row["accumulation_steps"] == 16 and row["tokens_per_step"] == 128 * 8192
    unknown = ("step_seconds", "tokens_per_second_per_device", "mfu", "fits", "steps_per_epoch")
    assert [row[name] for name in unknown] == [None] * 5
    assert row["peak_gib"] == pytest.approx(sum(row["parts_gib"].values()))
    several = rows(capsys, TINY, "--world-size=1,2", "--gpu=RTX4090", "--gpus-per-node=1")
    assert [row["world_size"] for row in several] == [1, 2] and several[1]["fits"]
    assert several[1]["traffic_per_step"]["dp_shard"]["ranks_in_a_node"] == 1


def test_steps_of_an_epoch_are_those_of_the_prepared_data(prepared, write_config, capsys):
    """23,870 tokens are 745 windows of 32, 8 a step."""
    assert rows(capsys, write_config())["steps_per_epoch"] == pytest.approx(745 / 8, abs=0.1)
    missing = write_config(data={"tokenizer": "/nowhere/tokenizer.model"})
    assert rows(capsys, missing)["steps_per_epoch"] is None


def test_without_a_world_size_it_is_the_smallest(capsys):
    for options, ranks in (([], 1), (["--parallel.tp=2", "--parallel.dp_replicate=2"], 4)):
        assert rows(capsys, TINY, *options)["world_size"] == ranks


def test_a_plan_is_for_gpus_unless_it_is_of_this_cpu(capsys, monkeypatch):
    monkeypatch.setattr(command, "visible_gpus", lambda: 0)
    assert "GiB of tensors on this CPU" in dry_run(capsys, TINY)[1]
    for options in ([], ["--run.device=cpu"]):
        assert "by torch's allocator" in dry_run(capsys, TINY, "--world-size=1", *options)[1]
    monkeypatch.setattr(command, "visible_gpus", lambda: 1)
    assert "by torch's allocator" in dry_run(capsys, TINY)[1]


@pytest.mark.slow
def test_exit_codes_of_the_command(tmp_path):
    """0, with nothing but the plan made; 3 and a line on stderr, so that stdout stays JSON; 2 and a line each."""
    done = launch(TINY, "--dry-run", "--train.steps=77", "--config", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir()), done.stderr
    # all but the configuration is a comment
    assert tomli.loads(done.stdout)["train"]["steps"] == 77
    assert done.stdout.startswith("# 1 rank: needs ")
    done = launch(TINY, "--dry-run", "--gpu-memory-gib=1.6", "--model.n_layers=1", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["fits"] is False
    assert "docs/plan.md" in done.stderr, done.stderr
    done = launch("configs/llama8b.toml", "--dry-run", "--world-size=3,8,5")
    assert done.returncode == 2 and "--world-size 3: " in done.stderr, done.stderr
    assert "--world-size 5: " in done.stderr and "--world-size 8: " not in done.stderr


def test_tables_and_drawing_have_the_numbers_of_the_plan(tmp_path, capsys):
    plot = tmp_path / "step.svg"
    words = [TINY, "--world-size=2,4", "--gpu=RTX4090", f"--plot={plot}"]
    row, row_of_4 = rows(capsys, *words)
    out = re.sub(" +", " ", dry_run(capsys, *words)[1])
    peak = f"{row['peak_gib']:.3f} GiB in the {row['peak_at']}"
    number, size = row["traffic_per_step"]["dp_shard"]["all_gather"]
    for expected in (
        f"{row['parameters']:,} in {row['units']} units",
        f"optimizer {row['optimizer_bytes_per_rank'] / GIB:.3f} GiB",
        f"allocated peak {peak}",
        f"activations {row['parts_gib']['activations']:.3f} GiB",
        f"{row['device_gib']:.3f} of 23.5 GiB",
        f"all_gather, dp_shard {number:,} {size / GIB:,.3f} GiB within a node",
        f"{row['step_seconds']:.3g} s, {row['waiting_seconds']:.2g} of them waiting",
        f"{row['tokens_per_second_per_device']:,.0f} planned, MFU {row['mfu']:.1%}",
        f"\n 4 {row_of_4['peak_gib']:.2f} ",
    ):
        assert expected in out
    text = " ".join(ET.parse(plot).getroot().itertext())
    assert "tiny on 2 x RTX4090: allocated peak" in text and "backward block 0" in text


@pytest.mark.quick
def test_verdict_says_whether_it_fits_what_it_needs_and_how_long_it_takes():
    asked = Asked(gpu_memory_gib=80.0)
    row = {"world_size": 96, "peak_at": "backward head", "device_gib": 15.75, "fits": True}
    row |= {"host_gib": 0.0, "step_seconds": 1.5, "tokens_per_second_per_device": 12345.6}
    needed = "needs 15.75 of 80 GiB (peak in the backward head)"
    fits = f"96 ranks: fits, 64.2 GiB left; {needed}"
    speed = "8,640 to 11,600 tokens/s per GPU"
    durations = {288: "0.13 to 0.17 hours", 40_319: "18 to 24 hours", 40_321: "0.7 to 1.0 days"}
    cfg = make_config()
    for steps, duration in durations.items():
        of_steps = make_config(train={"steps": steps})
        assert show.verdict(row, of_steps, asked) == f"{fits}; {speed}; {duration} in all"
    assert "; 10,200 to 11,600 tokens" in show.verdict(row | {"world_size": 1}, cfg, asked)
    # no plan times copies to the host
    assert show.verdict(row | {"host_gib": 1.0}, cfg, asked) == fits
    assert show.verdict(row | {"fits": False}, cfg, asked) == f"96 ranks: does not fit; {needed}"


def test_a_run_is_compared_with_its_plan(tmp_path, capsys):
    cfg = make_config(run={"device": "cuda"})
    (tmp_path / "config.toml").write_text(config.to_toml(cfg))
    launched = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.1, "ranks": 2, "hosts": ["a"]}
    (tmp_path / "environment.json").write_text(json.dumps(launched))
    expected = plan(cfg, 2, Asked(DEVICES["H100"], gpus_per_node=2))
    row = {
        "peak_memory_gib": 1.06 * expected["peak_gib"],
        "step_seconds": 1.42 * expected["step_seconds"],  # 0.70 of the speed
    }
    assert check.main([str(tmp_path), json.dumps(row)]) == 0
    out, err = capsys.readouterr()
    assert "(+6.0%)" in out and "(+42.0%)" in out
    assert err == "warning: peak memory, GiB is more than 5% off the plan\n"
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert [*figures] == ["peak memory, GiB", "time of a step, s"]
