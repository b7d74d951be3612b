"""Kills a training run with SIGKILL again and again, half of the times inside a save, and restarts it each time.

    python -m tests.checkpoint.kill_storm --kills 100

After each kill no process may live, every checkpoint must be good, and the next launch must resume from the newest. In
the end weights, optimizer, metrics and names of files must be, bit for bit, those of an undisturbed run. Exits with 0
only then. Linux; one process on the CPU.
"""

import argparse
import contextlib
import json
import operator
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

import config
from checkpoint import catalog
from tests.conftest import REPO, hashes, make_config, rows, saved_tensors, words
from tools.planner.arguments import positive_integer

SAVE_EVERY = 2  # steps
MAX_SAVES = 4  # after so many checkpoints a launch is killed in any case
REPRODUCIBLE = ("step", "loss", "grad_norm", "lr", "tokens", "batch_digest")  # of a row


class Storm:
    """One run, killed or not, in its folder."""

    def __init__(self, folder: pathlib.Path, name: str, kills: int):
        # 2.4 million parameters: a checkpoint of 29 MB takes about as long as the steps between two
        steps = SAVE_EVERY * (kills + 1) * MAX_SAVES
        self.cfg = make_config(
            model={"dim": 256, "n_layers": 3, "ffn_dim": 704},
            run={"name": name, "output_dir": str(folder)},
            data={"source": str(folder / "texts.jsonl"), "path": str(folder / "prepared")},
            train={"steps": steps, "seq_len": 16, "global_batch_size": 2},
            checkpoint={"save_every_steps": SAVE_EVERY, "keep_last": 2},
            eval={"every_steps": 3 * SAVE_EVERY, "batches": 1},
        )
        self.mark = str(folder)
        self.run_folder = config.run_folder(self.cfg.run)
        self.root = catalog.root_of(self.cfg)
        self.options = folder / f"{name}.toml"
        self.options.write_text(config.to_toml(self.cfg))
        self.inside: list[bool] = []  # whether each kill was inside a save
        self.resumed: list[int] = []  # steps from which launches resumed, which a kill may precede
        self.problems: list[str] = []

    def start(self, launch: int, asynchronous: bool = False) -> subprocess.Popen:
        """The same command each time, but for the way of saving."""
        self.leftovers, self.expected = self.unfinished(), self.newest()
        env = {**os.environ, "PYTHON": sys.executable, "NPROC": "1", "KILL_STORM": self.mark}
        option = f"--checkpoint.async_save={json.dumps(asynchronous)}"
        argv = [REPO / "run_train.sh", self.options, option]
        self.log = self.options.with_suffix(f".{launch}")
        with self.log.open("wb") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True, env=env)

    def newest(self) -> int:
        return max(catalog.steps(self.root), default=0)

    def unfinished(self) -> set[int]:
        """Steps whose checkpoints are being written or removed, or were when a kill came."""
        names = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        return {int(m[1]) for m in map(catalog.TEMPORARY.fullmatch, names) if m}

    def is_saving(self) -> bool:
        """Whether the launch is, or was when it was killed. It is not if it removes what the one before left."""
        unfinished = self.unfinished()
        self.leftovers &= unfinished
        return any(step > self.newest() for step in unfinished - self.leftovers)

    def alive(self) -> list[int]:
        """The ids of all processes of a launch, by a variable of theirs: whatever session they are in."""
        mark = f"KILL_STORM={self.mark}".encode()
        ids = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in path.read_bytes().split(b"\0"):
                    ids.append(int(path.parent.name))
        return ids

    def wait(self, process: subprocess.Popen, save: int | None, seconds: float) -> None:
        """So many seconds from its start, or from its save of this number; at most for MAX_SAVES checkpoints."""
        last, end = self.expected + MAX_SAVES * SAVE_EVERY, time.monotonic() + seconds
        changes = 0  # begins and ends of saves
        while process.poll() is None and self.newest() < last:
            changes += self.is_saving() != changes % 2
            if save is not None and changes > 2 * save:
                return time.sleep(seconds)
            if save is None and time.monotonic() > end:
                return None
            time.sleep(0.001)

    def kill(self, launch: int, process: subprocess.Popen) -> None:
        """Its ranks have a session of their own, and must die with their launcher."""
        if process.poll() is not None:
            self.problems.append(f"launch {launch} ended with {process.returncode} before its kill")
            return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end = time.monotonic() + 10
        while self.alive() and time.monotonic() < end:
            time.sleep(0.005)
        for survivor in self.alive():
            self.problems.append(f"kill {launch}: process {survivor} was alive ten seconds later")
            with contextlib.suppress(ProcessLookupError):
                os.kill(survivor, signal.SIGKILL)

    def check_start(self, launch: int) -> None:
        """Unless it was killed before, the launch resumed from the newest, and removed what the one before left."""
        started = re.search(r"resuming after step (\d+)|from fresh weights", self.log.read_text())
        if started:
            self.resumed.append(int(started[1] or 0))
            if self.resumed[-1] != self.expected or self.leftovers:
                wrong = f"{started[0]}, not {self.expected}; {self.leftovers} left"
                self.problems.append(f"launch {launch}: {wrong}")

    def kill_often(self, kills: int, first_save: float, save: float) -> None:
        """And a last launch that ends by itself. first_save, save: seconds to the first save, and for one."""
        chance = random.Random(kills)
        for launch in range(1, kills + 1):
            process = self.start(launch, asynchronous=launch % 4 in (2, 3))
            number = None if launch % 2 else chance.randrange(MAX_SAVES - 1)
            longest = 1.5 * first_save if number is None else save
            self.wait(process, number, chance.uniform(0, longest))
            self.kill(launch, process)
            self.inside.append(self.is_saving())
            self.check_start(launch)
            for step in catalog.steps(self.root):
                self.problems += catalog.problems_of(catalog.path_of(self.root, step))
            print(
                f"kill {launch}: inside a save {self.inside[-1]}, newest is {self.newest()}",
                flush=True,
            )
        self.finish(kills + 1)
        self.check_start(kills + 1)

    def finish(self, launch: int) -> list[float]:
        """A launch that is not killed: the times of its start, and of each save's begin and end."""
        times = [time.monotonic()]
        process = self.start(launch)
        while process.poll() is None:
            if self.is_saving() == len(times) % 2:
                times.append(time.monotonic())
            time.sleep(0.002)
        assert process.returncode == 0, self.log.read_text()
        return times

    def state(self) -> dict[str, object]:
        """What a killed run must have in common with one that was not, by name."""
        state: dict[str, object] = {**hashes(saved_tensors(self.run_folder, self.cfg.train.steps))}
        assert {name.partition(".")[0] for name in state} == {"optim", "model"}
        for kind in ("train", "eval"):
            found = [[row.get(key) for key in REPRODUCIBLE] for row in rows(self.run_folder, kind)]
            state[f"rows of kind {kind}"] = sorted(found)
        return state | {f"{p.relative_to(self.run_folder)}": "" for p in self.run_folder.rglob("*")}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=positive_integer, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        texts = [json.dumps({"text": words(i, 60)}) + "\n" for i in range(400)]
        (folder / "texts.jsonl").write_text("".join(texts))
        straight, killed = (Storm(folder, name, args.kills) for name in ("straight", "killed"))
        began, *times = straight.finish(0)
        save = statistics.median(map(operator.sub, times[1::2], times[::2]))
        killed.kill_often(args.kills, times[0] - began, save)
        ours, expected = killed.state(), straight.state()
        every = sorted({*ours, *expected})
        killed.problems += [f"{n} differs" for n in every if ours.get(n) != expected.get(n)]
        print(f"{sum(killed.inside)} of {args.kills} kills in a save; resumed: {killed.resumed}")
        print(*killed.problems, f"{len(killed.problems)} problems", sep="\n")
    return 1 if killed.problems else 0


if __name__ == "__main__":
    sys.exit(main())
