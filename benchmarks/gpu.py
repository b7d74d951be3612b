"""What a GPU can do, and what each option changes: the figures of docs/performance.md.

    ./run_train.sh -m benchmarks.gpu [--seconds 600] [--json gpu.json] [--only GROUP ...]
    ./run_train.sh -m benchmarks.gpu --tiny        tiny sizes, to see that all of it runs

Without a GPU the sizes are always tiny.

First it measures ceilings: what matmuls, attention, loss and update reach alone
(benchmarks/kernels.py). Then arms: train.py's step as configured, with options changed, and
benchmarks/overhead.py's bare loop. What time does not allow is skipped, so the most informative
come first. --only selects groups: ceilings 1B 3B 8B adapters options more. The JSON file is
replaced after every arm. Clocks and power are read, never set. --reduce-scatter-buffers=2 and
--separate-reduce-scatter-group try FSDP2's settings for slow networks; on several GPUs
benchmarks.step does.

Each group runs in a process of its own. A new process continues the group after a crash, or where
memory was not freed.

An arm trains on one random micro-batch: 3 steps to warm up (the first compiles), 8 timed. Then 1
and 8 of three times that micro-batch. The slope between the two medians is a micro-batch's time.
The intercept is the optimizer's, with the cost of each step's synchronization. Speed and MFU are of
a step of 16 sequences, composed of these two. One of eight GPUs takes as many of the
configurations' 128. So arms with other micro-batches can be compared.
"""

import argparse
import contextlib
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch

import config
import files
from benchmarks.kernels import CEILINGS, TIMINGS
from benchmarks.step import add_experiments, experiments, measure_by_size
from config import ConfigError
from files import die_with_parent
from lifecycle.process_group import distributed
from parallel.mesh import World

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
COMMON = [
    "--run.device=auto",
    "--train.global_batch_size=16",
    "--checkpoint=off",
    "--eval=off",
    # so that eight steps change the loss, and rounding does not: at the configurations' own rate a
    # fresh model's loss on one batch falls so steeply that float8's differed by a third
    "--optim.warmup_steps=0",
    "--optim.schedule=constant",
    "--optim.lr=3e-5",
]
TINY = [
    "--model.dim=64",
    "--model.n_layers=1",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.head_dim=16",
    "--model.ffn_dim=128",
    "--model.vocab_size=512",
    "--train.seq_len=32",
]
ON_A_CPU = ["--parallel.compile=false", "--parallel.param_dtype=float32"]  # quickly
# arms that are no change of options
SHIPPED = "as shipped"
BARE = "bare loop"
AGAIN = "as shipped, again"

MICRO_BATCH = "--train.micro_batch_size="
RECOMPUTE = "--parallel.recompute="
STATE = "--optim.state_dtype=bfloat16"
KEEP = "--parallel.reshard_after_forward=false"
CHANGES = [
    STATE,
    f"{RECOMPUTE}elementwise",
    KEEP,
    "--parallel.reshard_after_forward=true",
    "--parallel.sync_every_micro_batch=false",
    f"{MICRO_BATCH}8",
    f"{MICRO_BATCH}4",
    f"{MICRO_BATCH}2",
    f"{MICRO_BATCH}1",
    f"{RECOMPUTE}none",
    f"{RECOMPUTE}selective",
    f"{RECOMPUTE}full",
    "--parallel.compile=false",
]


def arms(name: str, *lists: list[str]) -> dict[str, tuple[str, list[str]]]:
    """{arm: (configuration, changes)}, without changes to what the configuration already has."""
    path = str(CONFIGS / f"{name}.toml")
    shipped = config.load(path, COMMON)
    arms = {}
    for changes in lists:
        if not changes:
            arms[SHIPPED] = (name, changes)
        elif config.load(path, [*COMMON, *changes]) != shipped:
            options = [change.partition(".")[2] for change in changes]
            arms[", ".join(options)] = (name, changes)
    return arms


GROUPS = {
    "ceilings": {name: (configuration, []) for name, (_, configuration) in CEILINGS.items()},
    "1B": arms("llama1b", [], [f"{RECOMPUTE}elementwise", STATE, f"{MICRO_BATCH}8"])
    | {BARE: ("llama1b", [])},
    "3B": arms("llama3b", [], [STATE, f"{MICRO_BATCH}2"]) | {BARE: ("llama3b", [])},
    "8B": arms(
        "llama8b-h200",
        [],
        *([f"--parallel.float8={recipe}"] for recipe in ("tensorwise", "rowwise")),
    ),
    "adapters": {
        "LoRA": ("llama8b-lora", []),
        "QLoRA": ("llama8b-qlora", []),
    },  # over a base drawn at random
    "options": arms("llama1b", [], *([change] for change in CHANGES)) | {AGAIN: ("llama1b", [])},
    "more": arms("llama8b-h200", [KEEP]) | arms("llama3b", [STATE, KEEP, f"{MICRO_BATCH}4"]),
}
FITS_8B = 120 * 2**30  # bytes of a GPU
SAME_LOSS, STEADY = 0.02, 0.015  # difference of losses; share of speed
REPORTED = 3  # exit status: the last arm has its row; what is left needs a new process


@contextlib.contextmanager
def polled(device: torch.device) -> Iterator[dict]:
    """Yields a dictionary. At the end it holds the medians of the GPU's clock, power and
    temperature, read once a second by nvidia-smi."""
    medians = {}
    samples = []
    over = threading.Event()
    names = {"clocks.sm": "sm_mhz", "power.draw": "watt", "temperature.gpu": "celsius"}

    def poll() -> None:
        command = [
            "nvidia-smi",
            f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
            f"--query-gpu={','.join(names)}",
            "--format=csv,noheader,nounits",
        ]
        while not over.wait(1):
            with contextlib.suppress(OSError, ValueError, subprocess.CalledProcessError):
                # none, or "[N/A]"
                answer = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
                samples.append([float(value) for value in answer.split(",")])

    thread = threading.Thread(target=poll, daemon=True)
    if device.type == "cuda":
        thread.start()
    yield medians
    over.set()
    for name, values in zip(names.values(), zip(*samples)):
        medians[name] = statistics.median(values)


def attempt(
    group: str, arm: str, common: list[str], world: World, each: float, settings: dict
) -> dict:
    """Measures an arm. Returns a row with its figures, or with the reason why there are none.

    each: seconds for a timing of a ceiling. settings: of FSDP2, from experiments().
    """
    name, changes = GROUPS[group][arm]
    overrides = [*common, *changes]
    began = time.time()
    row = {}
    if world.device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats()
        small = torch.cuda.get_device_properties(0).total_memory < FITS_8B
        if small and group in ("8B", "more") and "8b" in name:
            row["note"] = "8 of 32 layers"
            overrides.append("--model.n_layers=8")
    if arm in CEILINGS:
        work = partial(CEILINGS[arm][0], each=each)
    else:
        work = partial(measure_by_size, bare=arm == BARE, settings=settings)
    with polled(world.device) as gpu:
        try:
            figures = work(config.load(str(CONFIGS / f"{name}.toml"), overrides), world)
            row |= {"status": "ok", **figures}
        except torch.OutOfMemoryError:
            row["status"] = "out of memory"
        except ConfigError as error:
            row["status"] = f"refused: {error}"
        except Exception as error:
            traceback.print_exc()
            row["status"] = f"failed: {type(error).__name__}: {error}"
    return row | {"changes": changes, "polled": gpu, "took_seconds": time.time() - began}


def run_arms(group: str, first: int, deadline: float, tiny: bool, settings: dict) -> None:
    """Prints a row for each arm of a group, from the `first`-th on, and ends this process."""
    die_with_parent()
    # Other output goes to stderr. Compile workers, which may outlive us, don't keep the pipe open.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names = list(GROUPS[group])
    cuda = torch.cuda.is_available()
    common = list(COMMON)
    if tiny:
        common += TINY
    if not cuda:
        common += ON_A_CPU
    each = 0.01 if tiny else min(1.0, 0.03 * (deadline - time.time()) / TIMINGS)
    longest = 0.0  # seconds of an arm so far
    with distributed(config.load(str(CONFIGS / "tiny.toml"))) as world:
        for arm in names[first:]:
            began = time.time()
            reserved = longest if AGAIN in names and arm != AGAIN else 0
            if began + longest + reserved < deadline:
                row = attempt(group, arm, common, world, each, settings)
                longest = max(longest, time.time() - began)
            else:
                row = {"status": "skipped: time"}
            print(json.dumps(row), file=rows, flush=True)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            not_freed = cuda and torch.cuda.memory_allocated() > 2**30
            if row["status"].startswith("failed") or not_freed:
                break
        os._exit(REPORTED)  # at once: the device may not answer any more


def run_group(
    group: str, deadline: float, tiny: bool, add: Callable[[dict], None], options: list[str]
) -> None:
    """Starts processes, with these options too, until add() got a row for each arm of a group."""
    waiting = []
    for arm, (name, _) in GROUPS[group].items():
        waiting.append({"group": group, "model": name, "arm": arm})
    # as the launcher sets it
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "expandable_segments:True"
    while waiting and time.time() < deadline:
        first = len(GROUPS[group]) - len(waiting)
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            f"--group={group}",
            f"--first={first}",
            f"--deadline={deadline}",
        ]
        if tiny:
            command.append("--tiny")
        with subprocess.Popen(
            [*command, *options],
            env={"PYTORCH_ALLOC_CONF": allocator, **os.environ},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            timer = threading.Timer(deadline - time.time(), process.kill)
            timer.start()
            for line in process.stdout:
                add(waiting.pop(0) | json.loads(line))
            timer.cancel()
        if waiting and process.returncode != REPORTED:
            if time.time() > deadline:
                status = "cut off: time"
            else:
                status = f"failed: its process ended with {process.returncode}"
            add(waiting.pop(0) | {"status": status})
    for row in waiting:
        add(row | {"status": "skipped: time"})


def compare(row: dict, rows: list[dict]) -> None:
    """Adds to a row its speed relative to its model as shipped, when that was last measured."""
    shipped = None
    for other in rows:
        if (
            other["model"] == row["model"]
            and other["arm"] == SHIPPED
            and "tokens_per_second" in other
        ):
            shipped = other
    if shipped is None or "tokens_per_second" not in row:
        return
    row["vs_shipped"] = row["tokens_per_second"] / shipped["tokens_per_second"]
    same_batch = shipped["micro_batch_size"] == row["micro_batch_size"]
    same_loss = abs(row["loss"] - shipped["loss"]) <= SAME_LOSS  # not where one is NaN
    if same_batch and not same_loss:
        row["marked"] = f"void: loss {row['loss']:.3f}, as shipped {shipped['loss']:.3f}"
    elif row["arm"] == AGAIN and abs(row["vs_shipped"] - 1) > STEADY:
        row["marked"] = "not steady: differences smaller than this one mean nothing"


def table(rows: list[dict]) -> str:
    """Ceilings as they are, arms as a Markdown table."""
    forms = {
        "step_seconds": ".3f",
        "micro_batch_seconds": ".4f",
        "optimizer_seconds": ".4f",
        "tokens_per_second": ",.0f",
        "mfu": ".1%",
        "peak_gib": ".1f",
        "reserved_gib": ".1f",
        "first_step_seconds": ".1f",
        "vs_shipped": ".3f",
    }
    text = ""
    lines = [["model", "arm", *forms, "note"], ["---"] * (len(forms) + 3)]
    for row in rows:
        if row["arm"] in CEILINGS:
            rounded = json.loads(
                json.dumps(row), parse_float=lambda number: float(f"{float(number):.4g}")
            )
            text += "".join(f"{key}: {value}\n" for key, value in rounded.items()) + "\n"
            continue
        cells = [row["model"], row["arm"]]
        for key, form in forms.items():
            value = row.get(key)
            cells.append("" if value is None else format(value, form))
        notes = [row[key] for key in ("status", "note", "marked") if row.get(key, "ok") != "ok"]
        lines.append([*cells, "; ".join(notes)])
    return text + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    parser.add_argument(
        "--only", choices=GROUPS, nargs="+", default=[*GROUPS], help="groups of arms, in this order"
    )
    parser.add_argument("--tiny", action="store_true")
    for name, kind in (("--group", str), ("--first", int), ("--deadline", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # of one of our own processes
    add_experiments(parser)
    args = parser.parse_args(argv)
    try:
        settings = experiments(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    options = []
    if args.reduce_scatter_buffers:
        options.append(f"--reduce-scatter-buffers={args.reduce_scatter_buffers}")
    if args.separate_reduce_scatter_group:
        options.append("--separate-reduce-scatter-group")
    tiny = args.tiny or not torch.cuda.is_available()
    if args.group:
        run_arms(args.group, args.first, args.deadline, tiny, settings)
        return 0
    if tiny:
        device = "GPU" if torch.cuda.is_available() else "CPU"
        title = f"tiny sizes on a {device}: no figure of a GPU"
    else:
        title = "full sizes on a GPU"
    report = {"what": title, "seconds": args.seconds, "fsdp": settings, "rows": []}
    deadline = time.time() + args.seconds

    def add(row: dict) -> None:
        report["rows"].append(row)
        compare(row, report["rows"])
        if args.json:
            files.write_atomic(args.json, json.dumps(report, indent=1))
        print(f"{row['group']}: {row['arm']}: {row['status']}", file=sys.stderr)

    for group in args.only:
        run_group(group, deadline, tiny, add, options)
    print(f"{title}\n\n{table(report['rows'])}")
    return int(any(row["status"].startswith("failed") for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
