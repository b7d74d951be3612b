"""The first hour on a GPU: does it train, how fast, and as planned? docs/cluster.md explains it.

    ./run_train.sh -m benchmarks.gpu [--seconds 600] [--json gpu.json] [--only GROUP ...]
    ./run_train.sh -m benchmarks.gpu --tiny        tiny sizes, to see that all of it runs

Runs the arms of arms.py, each in a process, next to its plan; without a GPU at tiny sizes. An arm
that takes more than a quarter of --seconds is killed. Started again with the same JSON file, which
is replaced after every arm, it measures what was skipped, cut off or failed. A file of another
device, other versions or another state of the code is refused.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import config
import system
from benchmarks import REPO
from benchmarks.gpu import polled
from benchmarks.gpu.arms import ARMS, GROUPS, Arm
from config import ConfigError
from tools.planner.devices import known_as

SAME_LOSS, STEADY = 0.02, 0.015  # difference of losses; share of speed
PLANNED = ("peak_gib", "reserved_gib", "step_seconds")
HIDDEN = ("group", "arm", "status", "config", "polled", "errors")
COLUMNS = {"tokens_per_second_per_device": ",.0f", "mfu": ".1%", "micro_batch_seconds": ".4f"}
COLUMNS |= {"optimizer_seconds": ".4f", "first_step_seconds": ".1f", "vs_shipped": ".3f"}
COLUMNS |= dict.fromkeys(PLANNED, ".3f")  # of a line, with their formats


def answer(argv: list[str], seconds: float, *before: str) -> dict:
    """What `[BEFORE] python -m ARGV` prints as JSON, and its status."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}  # as a launch's
    # Not pipes: compile workers may outlive the process, and keep them open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        own = {"cwd": REPO, "env": environment, "preexec_fn": system.die_with_parent}
        command = [*before, sys.executable, "-m", *argv]
        process = subprocess.Popen(command, stdout=out, stderr=errors, **own)
        try:
            code = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for its driver
                process.wait(10)
            return {"status": f"failed: no answer in {seconds:.0f} s: killed"}
        out.seek(0)
        errors.seek(0)
        printed = out.read()
        complaints = errors.read()
    if "{" in printed and code in (0, 3):  # 3: a plan that does not fit
        return {"status": "ok", **json.loads(printed[printed.index("{") :])}
    last = complaints.strip().split("\n")[-1]
    status = f"refused: {last}" if code == 2 else f"failed: exit code {code}: {last}"
    status = "out of memory" if "OutOfMemoryError" in last else status
    return {"status": status, "errors": complaints[-2000:]}


def measure(arm: Arm, conditions: dict, tiny: bool, runs: str, seconds: float) -> dict:
    """The figures of an arm, and its plan."""
    on_gpu = conditions["device"] == "cuda"
    argv = arm.argv(tiny, on_gpu, runs)
    row: dict[str, Any] = {}
    if arm.target == "llama8b-h200" and not tiny and conditions["gpu_memory_gib"] < 120:
        row["note"] = "8 of 32 layers"
        argv.append("--model.n_layers=8")
    with polled(conditions.get("uuid")) as row["polled"], ThreadPoolExecutor(1) as pool:
        if on_gpu and arm.kind == "step" and "--bare" not in argv:
            memory = conditions["gpu_memory_gib"]
            here = ["--json", "--world-size=1", "--gpus-per-node=1", f"--gpu-memory-gib={memory}"]
            gpu = known_as(conditions["gpu"], memory)
            here += [f"--gpu={gpu}"] if gpu else []
            _, path, _, _, *options = argv
            planner = ["tools.planner", path, *here, *options]
            plan = pool.submit(answer, planner, seconds, "nice", "-n19")
            row |= answer(argv, seconds)
            row["planned"] = {key: plan.result().get(key) for key in (*PLANNED, "status")}
        else:
            row |= answer(argv, seconds)
    return row


def compare(rows: list[dict]) -> None:
    """Adds to each row its speed relative to its configuration as shipped, last measured before."""
    shipped = {}
    for row in rows:
        if not row.get("tokens_per_second_per_device"):
            continue
        if row["arm"].endswith("as shipped"):
            shipped[row["config"]] = row
        other = shipped.get(row["config"])
        if not other:
            continue
        row["vs_shipped"] = other["step_seconds"] / row["step_seconds"]
        same_batch = row["micro_batch_size"] == other["micro_batch_size"]
        if same_batch and not abs(row["loss"] - other["loss"]) <= SAME_LOSS:  # or NaN
            row["marked"] = f"void: loss {row['loss']:.3f}, as shipped {other['loss']:.3f}"
        elif row["arm"].endswith("again") and abs(row["vs_shipped"] - 1) > STEADY:
            row["marked"] = "not steady: differences smaller than this one mean nothing"


def line(row: dict) -> str:
    """A row on one line: of what trained its speed and memory, of the others all."""
    words = [f"{row['group']}: {row['arm']}: {row['status']}"]
    for key, value in row.items():
        if key in COLUMNS and value is not None:
            plan = row.get("planned", {}).get(key)
            ratio = f" ({value / plan:.3f} of the plan)" if plan else ""
            words.append(f"{key} {value:{COLUMNS[key]}}{ratio}")
        elif key in ("marked", "note") or ("peak_gib" not in row and key not in HIDDEN):
            short = json.loads(json.dumps(value), parse_float=lambda x: float(f"{float(x):.4g}"))
            words.append(f"{key}: {short}")
    return "; ".join(words)


def run(args: argparse.Namespace, path: pathlib.Path) -> list[dict]:
    """Measures what lacks a result. Raises ConfigError."""
    deadline = time.time() + args.seconds
    limit = args.seconds / 4
    conditions = answer(["benchmarks.gpu.parts", "conditions"], 120.0)
    if conditions["status"] != "ok":
        raise ConfigError(conditions["status"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tiny = args.tiny or conditions["device"] != "cuda"
    print("tiny sizes: no figure of a GPU" if tiny else "full sizes")
    conditions["tiny"] = tiny
    rows = {}
    if path.exists():
        earlier = system.read_json(path)
        then = earlier.get("measured_under", {})
        wrong = [f"{n} was {then.get(n)}" for n in conditions if conditions[n] != then.get(n)]
        if wrong:
            raise ConfigError(f"{path}: of other conditions ({', '.join(wrong)}): name another")
        rows = {(row["group"], row["arm"]): row for row in earlier["rows"]}
    for arm in ARMS:
        key = (arm.group, arm.name)
        status = rows.get(key, {}).get("status", "")
        if arm.group in args.only and not status.startswith(("ok", "out of memory", "refused")):
            left = deadline - time.time()
            row = {"group": arm.group, "arm": arm.name, "answers": arm.answers}
            row |= {"config": arm.target, "status": "skipped: time"}
            if left > 0:
                row |= measure(arm, conditions, tiny, f"{path}.runs", min(left, limit))
            if "no answer" in row["status"] and left < limit:
                row["status"] = "cut off: time"
            rows[key] = row
            print(line(row), file=sys.stderr, flush=True)
        ordered = [rows[arm.group, arm.name] for arm in ARMS if (arm.group, arm.name) in rows]
        compare(ordered)
        content = {"measured_under": conditions, "rows": ordered}
        system.write_atomic(path, json.dumps(content, indent=1))
    return ordered


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=GROUPS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        rows = run(args, (args.json or pathlib.Path(folder, "gpu.json")).absolute())
    print(*map(line, rows), sep="\n")
    return int(any(row["status"].startswith("failed") for row in rows))


if __name__ == "__main__":
    config.run_tool(main)
