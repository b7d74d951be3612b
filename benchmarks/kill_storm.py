"""Kills a training run with SIGKILL again and again, half of the times inside a save, and starts it again each time.

    python -m benchmarks.kill_storm --kills 100 [--seed S] [--folder F] [--growing]

After each kill nothing of the run may be alive, every checkpoint that is there must be good, and the next launch must
resume from the newest. In the end weights, optimizer and metrics must be, bit for bit, those of a run that nobody
disturbed, and nothing temporary may be left. Exits with 0 only then. Linux; one process on the CPU.

--growing: on text that nothing has prepared; the processes that prepare it are killed too, each time. In the end its
files must be those of the other run's folder, byte for byte.
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
from data.record import read_manifest

REPO = pathlib.Path(__file__).parent.parent
# steps; and so many checkpoints after its start a launch is killed in any case
SAVE_EVERY, PATIENCE = (2, 4)
SECONDS_TO_DIE = 1.0
WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "hat",
    "and",
    "but",
    "then",
    "red",
    "blue",
)
MARK = "KILL_STORM"  # in the environment of all that a launch starts, whatever session it is in


@dataclasses.dataclass
class Storm:
    """What has happened."""

    # of the kills
    moments: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # steps, of launches that came so far
    resumed: list[int] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def configure(folder: pathlib.Path, name: str, kills: int, growing: bool) -> config.Config:
    """2.4 million parameters: a checkpoint of 29 MB takes about as long as the steps between two. growing: a small
    model, that reads some segments of a text; each run prepares it in a folder of its own."""
    model = {
        "dim": 256,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 704,
        "vocab_size": 320,
    }
    model |= {"dim": 64, "n_layers": 1, "ffn_dim": 128} if growing else {}
    data = (
        {"order": "growing", "path": str(folder / f"{name}-text")}
        if growing
        else {"path": str(folder / "prepared")}
    )
    return config.from_dict(
        {
            "model": model,
            "run": {"device": "cpu", "name": name, "output_dir": str(folder)},
            "data": {"source": str(folder / "texts.jsonl"), **data},
            "train": {
                "steps": SAVE_EVERY * (kills + 1) * PATIENCE,
                "seq_len": 512 if growing else 16,
                "global_batch_size": 8 if growing else 2,
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
    with log_of(cfg, number).open("wb") as said:
        return subprocess.Popen(
            [REPO / "run_train.sh", path, f"--checkpoint.async_save={json.dumps(asynchronous)}"],
            stdout=said,
            stderr=said,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def went_on_from(cfg: config.Config, number: int) -> int | None:
    """The step, as the launch logged it; None: it was killed before."""
    said = re.search(
        r"resuming after step (\d+)|from fresh weights", log_of(cfg, number).read_text()
    )
    return said and int(said[1] or 0)


def unfinished(cfg: config.Config, left: set[int]) -> set[int]:
    """Steps whose checkpoints are being written or removed by this launch. `left`: those that the launch before has
    left, until they are gone."""
    root = catalog.root(cfg)
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    found = {int(name[6:-4]) for name in names if catalog.TEMPORARY.fullmatch(name)}
    left &= found
    return found - left


def saving(cfg: config.Config, left: set[int]) -> bool:
    """Whether a checkpoint is being written, and not an old one removed."""
    return any(step > max(catalog.steps(cfg), default=0) for step in unfinished(cfg, left))


def alive(cfg: config.Config) -> list[int]:
    """All processes that a launch has started, itself included."""
    mark, found = f"{MARK}={cfg.run.output_dir}".encode(), []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def undisturbed(cfg: config.Config) -> tuple[float, list[float]]:
    """Runs to the end. Returns the seconds before the first save, and those that each save took."""
    process, began, first, saves, since = start(cfg, 0, False), time.monotonic(), 0.0, [], None
    while process.poll() is None:
        now, busy = time.monotonic(), saving(cfg, set())
        if busy and since is None:
            since, first = now, first or now - began
        elif since is not None and not busy:
            saves.append(now - since)
            since = None
        time.sleep(0.002)
    if process.returncode or not saves:
        sys.exit(f"the undisturbed run failed, or saved nothing:\n{log_of(cfg, 0).read_text()}")
    return first, saves


def wait_for_the_moment(
    cfg: config.Config,
    process: subprocess.Popen,
    left: set[int],
    inside: bool,
    latest: float,
    save: float,
    chance: random.Random,
) -> None:
    """Inside a save: a while into one of the launch's first. Else: any time, or when the launch has got far enough."""
    before, nth, seen, was = (
        max(catalog.steps(cfg), default=0),
        chance.randrange(PATIENCE - 1),
        0,
        False,
    )
    end = time.monotonic() + chance.uniform(0, latest)
    while process.poll() is None:
        if (busy := saving(cfg, left)) and not was:
            if inside and seen == nth:
                time.sleep(chance.uniform(0, save))
                return
            seen += 1
        was = busy
        if not inside and time.monotonic() > end:
            return
        if max(catalog.steps(cfg), default=0) >= before + PATIENCE * SAVE_EVERY:
            return
        time.sleep(0.001)


def kill(cfg: config.Config, process: subprocess.Popen) -> list[int]:
    """Kills the launch's process group. Returns what was alive still when it should not have been, and ends that too:
    ranks have a session of their own, and must die with their launcher."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + SECONDS_TO_DIE
    while (left := alive(cfg)) and time.monotonic() < end:
        time.sleep(0.005)
    for survivor in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(survivor, signal.SIGKILL)
    return left


def storm(
    cfg: config.Config, kills: int, first: float, save: float, chance: random.Random
) -> Storm:
    """So many kills, and the launch after the last that ends by itself."""
    told, newest = Storm(), 0

    def note_start(number: int, left: set[int]) -> None:
        if (step := went_on_from(cfg, number)) is not None:
            told.resumed.append(step)
            if step != newest:
                told.problems.append(f"launch {number} went on from {step} and not from {newest}")
            if left:
                told.problems.append(
                    f"launch {number} went on beside unfinished checkpoints of {left}"
                )

    for number in range(1, kills + 1):
        inside, asynchronous = number % 2 == 0, number % 4 in (2, 3)
        left = unfinished(cfg, set())
        process = start(cfg, number, asynchronous)
        wait_for_the_moment(cfg, process, left, inside, 1.5 * first, save, chance)
        if process.poll() is not None:
            told.problems.append(
                f"launch {number} ended by itself with {process.returncode}, before its kill"
            )
            continue
        if survivors := kill(cfg, process):
            told.problems.append(
                f"kill {number}: processes {survivors} were alive {SECONDS_TO_DIE:.0f} s later"
            )
        half_done = unfinished(cfg, left)
        note_start(number, left)
        newest = max(catalog.steps(cfg), default=0)
        moment = (
            "inside a save"
            if any(step > newest for step in half_done)
            else "inside a removal"
            if half_done
            else "elsewhere"
        )
        told.moments[moment] += 1
        for _, path in catalog.step_folders(catalog.root(cfg)):
            told.problems += [f"kill {number}: {problem}" for problem in catalog.problems_of(path)]
        text = f"  {recorded_tokens(cfg):,} tokens" if cfg.data.order == "growing" else ""
        print(
            f"kill {number:3}  {'async' if asynchronous else 'sync':5}  {moment:16}  newest is {newest}{text}",
            flush=True,
        )
    if code := start(cfg, kills + 1, False).wait():
        sys.exit(f"the last launch exited with {code}:\n{log_of(cfg, kills + 1).read_text()}")
    note_start(kills + 1, set())
    return told


def recorded_tokens(cfg: config.Config) -> int:
    """How far the text is prepared."""
    manifest = read_manifest(pathlib.Path(str(cfg.data.path)))
    return manifest["tokens"]["train"] if manifest else 0


def tensors(cfg: config.Config) -> dict[str, bytes]:
    """Those of the last checkpoint."""
    reader = Reader(catalog.path_of(cfg, cfg.train.steps))
    found = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in reader.metadata.state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def rows(cfg: config.Config) -> list[tuple]:
    """metrics.jsonl without what depends on time and memory, as all of the plan's row does (of a launch of 30 s)."""
    lines = (config.run_folder(cfg) / "metrics.jsonl").read_text().splitlines()
    return [
        tuple(
            row.get(key)
            for key in ("kind", "step", "loss", "grad_norm", "lr", "tokens", "batch_digest")
        )
        for row in map(json.loads, lines)
        if row["kind"] != "plan"
    ]


def differences(ours: config.Config, theirs: config.Config) -> list[str]:
    """Between a run that was killed and one that was not."""
    a, b = tensors(ours), tensors(theirs)
    found = [
        f"{name} differs" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    ]
    if not any(name.startswith("optim.") for name in b) or not any(
        name.startswith("model.") for name in b
    ):
        found.append("the checkpoints hold no model or no optimizer")
    if len({row[:2] for row in rows(ours)}) < len(rows(ours)) or sorted(rows(ours)) != sorted(
        rows(theirs)
    ):
        found.append("metrics.jsonl differs")
    folder = config.run_folder(ours)
    names = [
        {
            str(path.relative_to(config.run_folder(cfg)))
            for path in config.run_folder(cfg).rglob("*")
        }
        for cfg in (ours, theirs)
    ]
    found += [f"{folder}: {name} is left or missing" for name in sorted(names[0] ^ names[1])]
    return found + [
        f"{path} is left"
        for pattern in (".step-*", ".stop-*", ".failure-*", "*.tmp")
        for path in folder.rglob(pattern)
    ]


def differences_of_text(ours: config.Config, theirs: config.Config) -> list[str]:
    """Prepares what is missing, and compares."""
    for cfg in (ours, theirs):
        path = pathlib.Path(cfg.run.output_dir) / f"{cfg.run.name}.toml"
        subprocess.run([sys.executable, "-m", "data.prepare", path], cwd=REPO, check=True)
    found, expected = (
        {path.name: path.read_bytes() for path in pathlib.Path(str(cfg.data.path)).iterdir()}
        for cfg in (ours, theirs)
    )
    return [
        f"{name} of the text differs, or is in one folder"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ] + [f"{name} is left" for name in found if name.startswith(".")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=count, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="an empty one, which stays; absent: a temporary one"
    )
    parser.add_argument("--growing", action="store_true", help="prepare the text meanwhile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or pathlib.Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if list(folder.iterdir()):
            parser.error(f"{folder} is not empty")
        # 2 MB for each kill: some seconds' work
        (folder / "texts.jsonl").write_text(
            "".join(
                json.dumps({"text": " ".join(random.Random(i).choices(WORDS, k=60))}) + "\n"
                for i in range(10_000 * args.kills if args.growing else 400)
            )
        )
        straight, killed = (
            configure(folder, name, args.kills, args.growing) for name in ("straight", "killed")
        )

        began = time.monotonic()
        first, saves = undisturbed(straight)
        print(
            f"undisturbed: {time.monotonic() - began:.0f} s, first save after {first:.1f} s, {len(saves)} saves of "
            f"{statistics.median(saves):.3f} s",
            flush=True,
        )
        began = time.monotonic()
        told = storm(killed, args.kills, first, statistics.median(saves), random.Random(args.seed))
        seconds = time.monotonic() - began
        told.problems += differences(killed, straight)
        if args.growing:
            told.problems += differences_of_text(killed, straight)
        for problem in told.problems:
            print(problem)
        moments = ", ".join(f"{count} {moment}" for moment, count in told.moments.most_common())
        print(
            f"{sum(told.moments.values())} kills: {moments}; {len(told.resumed)} launches went on, from steps "
            f"{', '.join(map(str, told.resumed))}; {seconds:.0f} s; {len(told.problems)} problems"
        )
    return 1 if told.problems else 0


if __name__ == "__main__":
    sys.exit(main())
