"""Kills a training run with SIGKILL again and again, half of the times inside a save, and restarts
it each time.

    python -m benchmarks.kill_storm --kills 100 [--seed S] [--folder F]

After each kill no process of the run may be alive, every checkpoint must be good, and the next
launch must resume from the newest. In the end weights, optimizer and metrics must be, bit for bit,
those of an undisturbed run, and no temporary file may remain. Exits with 0 only then. Linux; one
process on the CPU.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed.checkpoint as dcp

import config
from benchmarks import count
from checkpoint import catalog
from checkpoint.load import Reader

REPO = pathlib.Path(__file__).parent.parent
SAVE_EVERY = 2  # steps
MAX_SAVES = 4  # so many checkpoints after its start a launch is killed in any case
SECONDS_TO_DIE = 1.0
WORDS = "the a cat dog sat ran on under mat hat and but then red blue"
# in the environment of all processes that a launch starts, whatever session they are in
MARK = "KILL_STORM"


@dataclasses.dataclass
class Storm:
    """What has happened."""

    # kills by when they came, such as "inside a save"
    moments: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # the steps from which launches resumed; a launch may be killed before it does
    resumed: list[int] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def configure(folder: pathlib.Path, name: str, kills: int) -> config.Config:
    """2.4 million parameters: a checkpoint of 29 MB takes about as long as the steps between two."""
    model = {
        "dim": 256,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 704,
        "vocab_size": 320,
    }
    data = {"source": str(folder / "texts.jsonl"), "path": str(folder / "prepared")}
    return config.from_dict(
        {
            "model": model,
            "run": {"device": "cpu", "name": name, "output_dir": str(folder)},
            "data": data,
            "train": {
                "steps": SAVE_EVERY * (kills + 1) * MAX_SAVES,
                "seq_len": 16,
                "global_batch_size": 2,
            },
            "parallel": {"param_dtype": "float32"},
            "checkpoint": {"save_every_steps": SAVE_EVERY, "keep_last": 2},
            "eval": {"every_steps": 3 * SAVE_EVERY, "batches": 1},
            "log": {"every_steps": 1, "tensorboard": False},
        },
        "kill_storm.py",
    )


def log_of(cfg: config.Config, number: int) -> pathlib.Path:
    return pathlib.Path(cfg.run.output_dir) / f"{cfg.run.name}-{number}.log"


def start(cfg: config.Config, number: int, asynchronous: bool) -> subprocess.Popen:
    """The number-th launch: the same command each time, but for the way of saving."""
    path = pathlib.Path(cfg.run.output_dir) / f"{cfg.run.name}.toml"
    path.write_text(config.to_toml(cfg))
    environment = {
        "PYTHON": sys.executable,
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        MARK: cfg.run.output_dir,
    }
    with log_of(cfg, number).open("wb") as log:
        return subprocess.Popen(
            [REPO / "run_train.sh", path, f"--checkpoint.async_save={json.dumps(asynchronous)}"],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def resumed_step(cfg: config.Config, number: int) -> int | None:
    """The step from which the number-th launch resumed, 0 for a fresh start, as it logged it. None
    if it was killed before."""
    text = log_of(cfg, number).read_text()
    match = re.search(r"resuming after step (\d+)|from fresh weights", text)
    if match is None:
        return None
    return int(match[1] or 0)


def newest_step(cfg: config.Config) -> int:
    """Of the newest checkpoint; 0 without any."""
    return max(catalog.steps(catalog.root_of(cfg)), default=0)


def unfinished(cfg: config.Config, leftovers: set[int]) -> set[int]:
    """Steps whose checkpoints this launch is writing or removing. `leftovers` are those of the
    launch before; it loses the ones that are gone."""
    root = catalog.root_of(cfg)
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    matches = filter(None, map(catalog.TEMPORARY.fullmatch, names))
    steps = {int(match[1]) for match in matches}
    leftovers &= steps
    return steps - leftovers


def is_saving(cfg: config.Config, leftovers: set[int]) -> bool:
    """Whether a checkpoint is being written, and not an old one removed."""
    return any(step > newest_step(cfg) for step in unfinished(cfg, leftovers))


def alive(cfg: config.Config) -> list[int]:
    """The ids of all processes that a launch has started, itself included."""
    mark = f"{MARK}={cfg.run.output_dir}".encode()
    ids = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                ids.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return ids


def undisturbed(cfg: config.Config) -> tuple[float, list[float]]:
    """Runs to the end. Returns the seconds before the first save, and those that each save took."""
    process = start(cfg, 0, False)
    began = time.monotonic()
    first_save = 0.0
    saves = []
    save_began = None
    while process.poll() is None:
        now = time.monotonic()
        busy = is_saving(cfg, set())
        if busy and save_began is None:
            save_began = now
            if not first_save:
                first_save = now - began
        elif not busy and save_began is not None:
            saves.append(now - save_began)
            save_began = None
        time.sleep(0.002)
    if process.returncode or not saves:
        sys.exit(f"the undisturbed run failed, or saved nothing:\n{log_of(cfg, 0).read_text()}")
    return first_save, saves


def wait_for_the_moment(
    cfg: config.Config,
    process: subprocess.Popen,
    leftovers: set[int],
    inside: bool,
    latest: float,
    save_seconds: float,
    chance: random.Random,
) -> None:
    """Waits until the launch is to be killed: inside one of its first saves, or at any time.
    Returns in any case after MAX_SAVES checkpoints."""
    oldest = newest_step(cfg)
    chosen_save = chance.randrange(MAX_SAVES - 1)
    saves_begun = 0
    was_saving = False
    end = time.monotonic() + chance.uniform(0, latest)
    while process.poll() is None:
        saving = is_saving(cfg, leftovers)
        if saving and not was_saving:
            if inside and saves_begun == chosen_save:
                time.sleep(chance.uniform(0, save_seconds))
                return
            saves_begun += 1
        was_saving = saving
        if not inside and time.monotonic() > end:
            return
        if newest_step(cfg) >= oldest + MAX_SAVES * SAVE_EVERY:
            return
        time.sleep(0.001)


def kill(cfg: config.Config, process: subprocess.Popen) -> list[int]:
    """Kills the launch's process group. Returns the ids of processes that were still alive
    SECONDS_TO_DIE later, and kills those too: ranks have a session of their own, and must die with
    their launcher."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + SECONDS_TO_DIE
    survivors = alive(cfg)
    while survivors and time.monotonic() < end:
        time.sleep(0.005)
        survivors = alive(cfg)
    for survivor in survivors:
        with contextlib.suppress(ProcessLookupError):
            os.kill(survivor, signal.SIGKILL)
    return survivors


def check_start(
    events: Storm, cfg: config.Config, number: int, newest: int, leftovers: set[int]
) -> None:
    """Records from which step the number-th launch resumed, which must be the newest, if it did.
    Then it must also have removed the unfinished checkpoints of the launch before."""
    step = resumed_step(cfg, number)
    if step is None:
        return
    events.resumed.append(step)
    if step != newest:
        events.problems.append(f"launch {number} went on from {step} and not from {newest}")
    if leftovers:
        events.problems.append(
            f"launch {number} went on beside unfinished checkpoints of {leftovers}"
        )


def storm(
    cfg: config.Config, kills: int, first_save: float, save_seconds: float, chance: random.Random
) -> Storm:
    """So many launches that are killed, and a last one that ends by itself."""
    events = Storm()
    newest = 0
    for number in range(1, kills + 1):
        inside = number % 2 == 0
        asynchronous = number % 4 in (2, 3)
        leftovers = unfinished(cfg, set())
        process = start(cfg, number, asynchronous)
        wait_for_the_moment(cfg, process, leftovers, inside, 1.5 * first_save, save_seconds, chance)
        if process.poll() is not None:
            events.problems.append(
                f"launch {number} ended by itself with {process.returncode}, before its kill"
            )
            continue
        survivors = kill(cfg, process)
        if survivors:
            events.problems.append(
                f"kill {number}: processes {survivors} were alive {SECONDS_TO_DIE:.0f} s later"
            )
        half_done = unfinished(cfg, leftovers)
        check_start(events, cfg, number, newest, leftovers)
        newest = newest_step(cfg)
        if any(step > newest for step in half_done):
            moment = "inside a save"
        elif half_done:
            moment = "inside a removal"
        else:
            moment = "elsewhere"
        events.moments[moment] += 1
        root = catalog.root_of(cfg)
        for step in catalog.steps(root):
            for problem in catalog.problems_of(catalog.path_of(root, step)):
                events.problems.append(f"kill {number}: {problem}")
        way = "async" if asynchronous else "sync"
        print(f"kill {number:3}  {way:5}  {moment:16}  newest is {newest}", flush=True)

    code = start(cfg, kills + 1, False).wait()
    if code:
        sys.exit(f"the last launch exited with {code}:\n{log_of(cfg, kills + 1).read_text()}")
    check_start(events, cfg, kills + 1, newest, set())
    return events


def tensors(cfg: config.Config) -> dict[str, bytes]:
    """The bytes of the last checkpoint's tensors."""
    reader = Reader(catalog.path_of(catalog.root_of(cfg), cfg.train.steps))
    state = {}
    for name, item in reader.metadata.state_dict_metadata.items():
        state[name] = torch.empty(item.size, dtype=item.properties.dtype)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def rows(cfg: config.Config) -> list[tuple]:
    """metrics.jsonl without what depends on time and memory, as all of a plan's row does, which a
    launch of 30 s has."""
    keys = ("kind", "step", "loss", "grad_norm", "lr", "tokens", "batch_digest")
    reproducible = []
    for line in (config.run_folder(cfg.run) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] != "plan":
            reproducible.append(tuple(row.get(key) for key in keys))
    return reproducible


def names_below(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def differences(killed: config.Config, straight: config.Config) -> list[str]:
    """Between a run that was killed and one that was not."""
    ours = tensors(killed)
    expected = tensors(straight)
    problems = []
    for name in sorted(ours.keys() | expected.keys()):
        if ours.get(name) != expected.get(name):
            problems.append(f"{name} differs")
    sections = {name.partition(".")[0] for name in expected}
    if not {"optim", "model"} <= sections:
        problems.append("the checkpoints hold no model or no optimizer")

    our_rows = rows(killed)
    steps = {row[:2] for row in our_rows}  # and their kinds
    if len(steps) < len(our_rows) or sorted(our_rows) != sorted(rows(straight)):
        problems.append("metrics.jsonl differs")

    folder = config.run_folder(killed.run)
    for name in sorted(names_below(folder) ^ names_below(config.run_folder(straight.run))):
        problems.append(f"{folder}: {name} is left or missing")
    for pattern in (".step-*", ".attempt-*", "*.tmp"):
        for path in folder.rglob(pattern):
            problems.append(f"{path} is left")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=count, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="an empty one, which stays; absent: a temporary one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or pathlib.Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if list(folder.iterdir()):
            parser.error(f"{folder} is not empty")
        with (folder / "texts.jsonl").open("w") as file:
            for i in range(400):
                text = " ".join(random.Random(i).choices(WORDS.split(), k=60))
                file.write(json.dumps({"text": text}) + "\n")
        straight = configure(folder, "straight", args.kills)
        killed = configure(folder, "killed", args.kills)

        began = time.monotonic()
        first_save, saves = undisturbed(straight)
        save_seconds = statistics.median(saves)
        print(
            f"undisturbed: {time.monotonic() - began:.0f} s, first save after {first_save:.1f} s, "
            f"{len(saves)} saves of {save_seconds:.3f} s",
            flush=True,
        )
        began = time.monotonic()
        events = storm(killed, args.kills, first_save, save_seconds, random.Random(args.seed))
        seconds = time.monotonic() - began
        problems = events.problems + differences(killed, straight)
        for problem in problems:
            print(problem)
        moments = ", ".join(f"{count} {moment}" for moment, count in events.moments.most_common())
        print(
            f"{sum(events.moments.values())} kills: {moments}; {len(events.resumed)} launches went "
            f"on, from steps {', '.join(map(str, events.resumed))}; {seconds:.0f} s; "
            f"{len(problems)} problems"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
