"""The planner's command: what it prints, its exit codes, its drawing, and a run beside its plan."""

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import Any

import pytest
import tomli

import config
from tests.conftest import REPO, launch, make_config, run_tool
from tools.planner import __main__ as command
from tools.planner import check, show
from tools.planner.counted import Phase
from tools.planner.devices import DEVICES, Moment
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
    on_gpus = dry_run(capsys, TINY, "--world-size=1")[1]
    assert "by torch's allocator" in on_gpus
    assert dry_run(capsys, TINY, "--world-size=1", "--run.device=cpu")[1] == on_gpus
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


@pytest.mark.parametrize(
    "word, problem",
    [
        ("--world-size=2,x", "x must be an integer, above 0"),
        ("--gpu-memory-gib=inf", "inf must be finite, above 0"),
        ("--eval-only", "--eval-only: unknown"),
        ("--gpu=H1000", "--gpu H1000: unknown; known are A100-40"),
        ("--plot=/nowhere/step.svg", "--plot /nowhere/step.svg: No such file"),
    ],
)
def test_wrong_input_is_exit_2(word, problem, capsys):
    assert run_tool(command.main, TINY, word) == 2
    assert problem in capsys.readouterr().err


# A plan's row, with numbers that differ
MESH = {"world_size": 96, "replicas": 3, "shards": 8, "cp": 2, "tp": 4, "units": 34}
SIZES = {"parameters": 8_030_261_248, "tokens_per_step": 1_048_576, "steps_per_epoch": 1234.56}
BATCH = {"micro_batch_size": 7, "accumulation_steps": 5}
FLOP = {"flops_per_token": 1000, "counted_flops_per_token": 1051.0}
STATES = {"parameter": 3 * GIB, "gradient": 3 * GIB // 2, "optimizer": 25 * GIB // 4}
PEAK = {"peak_gib": 13.0, "peak_at": "backward head", "reserved_gib": 14.25, "device_gib": 15.75}
TIME = {"step_seconds": 1.5, "waiting_seconds": 0.25, "mfu": 0.4321, "gpu_hours": 5432.1}
PARTS = {"activations": 6.5, "parameters": 3.25}
NODE = {"ranks": 8, "ranks_in_a_node": 4, "all_gather": (1234, 5 * GIB)}
TP = {"ranks": 4, "ranks_in_a_node": 4, "all_reduce": (9, GIB // 2)}
ROW: dict[str, Any] = {**MESH, **SIZES, **BATCH, **FLOP, **PEAK, **TIME} | {
    **{f"{state}_bytes_per_rank": size for state, size in STATES.items()},
    "parts_gib": PARTS,
    "pools_gib": {"computation": 12.345, "all-gather": 1.9},
    "traffic_per_step": {"dp_shard": NODE, "tp": TP},
    "collectives_per_step": {"all_gather": (1234, 5 * GIB), "all_reduce": (9, GIB // 2)},
    "tokens_per_second_per_device": 12345.6,
    "host_gib": 0.0,
    "fits": True,
    "not_counted": ["a note"],
}
LINES = """96 = 3 replicas x 8 shards (of them cp 2) x tp 4
8,030,261,248 in 34 units
1,048,576 = 8 sequences of 32
5 of 7 sequences per rank
1,234.6
1,000 in MFU, by flops_per_token; the plan's time has 1,051
gradient 1.500 GiB
13.000 GiB in the backward head
14.250 GiB by torch's allocator: computation 12.35, all-gather 1.90
15.750 of 80 GiB
all_gather, dp_shard 1,234 5.000 GiB between nodes
all_reduce, tp 9 0.500 GiB within a node
1.5 s, 0.25 of them waiting
12,346 planned, MFU 43.2%
1.50 days, 5,432 GPU-hours
not counted a note"""


@pytest.mark.quick
def test_tables_have_the_numbers_of_the_row():
    cfg = make_config(train={"steps": 86_400})
    table = re.sub(" +", " ", show.table(ROW, cfg, Asked(gpu_memory_gib=80.0)))
    for words in LINES.split("\n"):
        assert words in table
    assert f"activations 6.500 GiB {'#' * 20}\n" in table  # half of the peak, of 40
    header, *lines = show.compared([ROW, ROW | {"world_size": 1536}]).splitlines()
    numbers = ["13.00", "10.75", "6.50", "5.5", "1.5", "0.25", "12,346", "43%"]
    assert [line.split() for line in lines] == [["96", *numbers], ["1,536", *numbers]]
    header, line = show.compared([ROW | {"step_seconds": None}]).splitlines()
    assert line.split() == ["96", *numbers[:4]] and header.endswith("sent GiB")


@pytest.mark.quick
def test_verdict_says_whether_it_fits_what_it_needs_and_how_long_it_takes():
    asked = Asked(gpu_memory_gib=80.0)
    needed = "needs 15.75 of 80 GiB (peak in the backward head)"
    fits = f"96 ranks: fits, 64.2 GiB left; {needed}"
    speed = "8,640 to 11,600 tokens/s per GPU"
    durations = {288: "0.13 to 0.17 hours", 40_319: "18 to 24 hours", 40_321: "0.7 to 1.0 days"}
    cfg = make_config()
    for steps, duration in durations.items():
        of_steps = make_config(train={"steps": steps})
        assert show.verdict(ROW, of_steps, asked) == f"{fits}; {speed}; {duration} in all"
    assert "; 10,200 to 11,600 tokens" in show.verdict(ROW | {"world_size": 1}, cfg, asked)
    # no plan times copies to the host
    assert show.verdict(ROW | {"host_gib": 1.0}, cfg, asked) == fits
    assert show.verdict(ROW | {"fits": False}, cfg, asked) == f"96 ranks: does not fit; {needed}"
    unknown = ROW | {"world_size": 1, "fits": None, "step_seconds": None}
    assert show.verdict(unknown, cfg, Asked()) == f"1 rank: {needed.replace(' of 80', '')}"


def boxes(path: Any) -> dict[str, list[float]]:
    """[x, y, width, height] by title of the drawing's boxes."""
    shapes = ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}rect")
    names = ("x", "y", "width", "height")
    return {box[0].text or "": [float(box.attrib[n]) for n in names] for box in shapes if len(box)}


def test_boxes_of_the_drawing_stand_where_their_numbers_are(tmp_path):
    """On scales of 8 seconds over 1,100 units and 10 GiB over 320: memory lasts until the next phase, and kinds lie on
    each other."""
    held = Counter({"parameters": 2 * GIB, "activations": 3 * GIB // 2})
    moments = [
        Moment(Phase("forward block 0", peak=held), 0.0, 1.0, {"gathers": (0.5, 1.25)}),
        Moment(Phase("backward block 0", peak=held), 1.5, 5.0, {"reduces": (4.0, 6.0)}),
        Moment(Phase("update", peak=Counter()), 6.0, 8.0, {}),
    ]
    show.draw(ROW, moments, str(tmp_path / "step.svg"), "r on 96 x GPU", 10.0)
    drawn = boxes(tmp_path / "step.svg")
    for title, (begin, seconds, y, height) in {
        "forward block 0: parameters 2.00 GiB": (0, 1.5, 380 - 64, 64),
        "forward block 0: activations 1.50 GiB": (0, 1.5, 380 - 112, 48),
        "backward block 0: parameters 2.00 GiB": (1.5, 4.5, 380 - 64, 64),
        "backward block 0: 3500.00 ms": (1.5, 3.5, 428, 24),
        "forward block 0 gathers: 750.00 ms": (0.5, 0.75, 458, 24),
        "backward block 0 reduces: 2000.00 ms": (4, 2, 458, 24),
    }.items():
        box = [80 + begin * 1100 / 8, y, seconds * 1100 / 8, height]
        assert drawn[title] == pytest.approx(box, abs=0.01), title
    words = (tmp_path / "step.svg").read_text()
    assert "r on 96 x GPU: allocated peak 13.00 GiB in the backward head" in words
    assert "memory: 10 GiB" in words


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
    launched["gpu"] = "Tesla T4"  # whose rates are unknown
    (tmp_path / "environment.json").write_text(json.dumps(launched))
    check.main([str(tmp_path), json.dumps(row)])
    assert [*json.loads((tmp_path / "plan.json").read_text())] == ["peak memory, GiB"]
