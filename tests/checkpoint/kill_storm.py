"""Kills a training run with SIGKILL again and again, half of the times inside a save, and restarts it each time.

    python -m tests.checkpoint.kill_storm --kills 100

After each kill no process may live, every checkpoint must be good, and the next launch must resume from the newest. In
the end weights, optimizer, metrics and names of files must be, bit for bit, those of an undisturbed run. Exits with 0
only then. Linux; one process on the CPU.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import tempfile
import time

import config
from checkpoint import catalog
from tests.conftest import REPO, hashes, make_config, rows, saved_tensors, words
from tests.launch.conftest import Launch

SAVE_EVERY = 2  # steps
MAX_SAVES = 4  # after so many checkpoints a launch is killed in any case
REPRODUCIBLE = ("step", "loss", "grad_norm", "lr", "tokens", "batch_digest")  # of a row
STARTED = re.compile(r"resuming after step (\d+)|from fresh weights")


class Storm:
    """One run, killed or not, in its folder."""

    def __init__(self, folder: pathlib.Path, name: str, kills: int):
        # 2.4 million parameters: a checkpoint of 29 MB takes about as long as the steps between two
        self.steps = SAVE_EVERY * (kills + 1) * MAX_SAVES
        cfg = make_config(
            model={"dim": 256, "n_layers": 3, "ffn_dim": 704},
            run={"name": name, "output_dir": str(folder / "outputs")},
            data={"source": str(folder / "texts.jsonl"), "path": str(folder / "prepared")},
            train={"steps": self.steps, "seq_len": 16, "global_batch_size": 2},
            checkpoint={"save_every_steps": SAVE_EVERY, "keep_last": 2},
            eval={"every_steps": 3 * SAVE_EVERY, "batches": 1},
        )
        self.root = catalog.root_of(cfg)
        self.path = folder / f"{name}.toml"
        self.path.write_text(config.to_toml(cfg))

    def start(self, asynchronous: bool = False) -> None:
        """The same command each time, but for the way of saving."""
        self.before = self.newest()
        option = f"--checkpoint.async_save={json.dumps(asynchronous)}"
        self.launch = Launch(self.path, option, nproc=1, repo=REPO)

    def newest(self) -> int:
        return max(catalog.steps(self.root), default=0)

    def is_saving(self) -> bool:
        """Whether the launch is, or was when it was killed. What others left it removes before it reports its start."""
        names = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        unfinished = [int(m[1]) for m in map(catalog.TEMPORARY.fullmatch, names) if m]
        has_started = STARTED.search(self.launch.log.read_text()) is not None
        return has_started and max(unfinished, default=0) > self.newest()

    def train_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        last = self.before + SAVE_EVERY * MAX_SAVES
        self.launch.wait_for(lambda: time.monotonic() > end or self.newest() >= last)

    def train_into_save(self, saves: int, seconds: float) -> None:
        """Until so long after the begin of a save that follows so many."""
        first = self.before + SAVE_EVERY * saves
        self.launch.wait_for(lambda: self.newest() >= first and self.is_saving())
        time.sleep(seconds)

    def kill(self) -> None:
        """Ranks have a session of their own, and must die with their launcher."""
        os.killpg(self.launch.process.pid, signal.SIGKILL)
        self.launch.process.wait()
        self.launch.wait_for_processes(10)
        self.check()

    def check(self) -> None:
        """All checkpoints are good and, unless it was killed before, the launch resumed from the newest."""
        for step in catalog.steps(self.root):
            assert catalog.problems_of(catalog.path_of(self.root, step)) == []
        if started := STARTED.search(self.launch.log.read_text()):
            assert int(started[1] or 0) == self.before, started[0]

    def state(self) -> dict[str, object]:
        """What a killed run must have in common with one that was not, by name."""
        code, output = self.launch.end(3600)
        assert code == 0, output
        self.check()
        folder = self.launch.folder
        state: dict[str, object] = {**hashes(saved_tensors(folder, self.steps))}
        assert {name.partition(".")[0] for name in state} == {"optim", "model"}
        for kind in ("train", "eval"):
            found = [[row.get(key) for key in REPRODUCIBLE] for row in rows(folder, kind)]
            state[f"rows of kind {kind}"] = sorted(found)
        return state | {f"{path.relative_to(folder)}": "" for path in folder.rglob("*")}


def storm(folder: pathlib.Path, kills: int) -> None:
    texts = [json.dumps({"text": words(i, 60)}) + "\n" for i in range(400)]
    (folder / "texts.jsonl").write_text("".join(texts))
    straight, killed = (Storm(folder, name, kills) for name in ("straight", "killed"))
    began = time.monotonic()
    straight.start()
    straight.launch.wait_for(straight.is_saving)
    first_save = time.monotonic() - began
    expected = straight.state()
    chance = random.Random(kills)
    inside = 0
    for launch in range(1, kills + 1):
        killed.start(asynchronous=launch % 4 in (2, 3))
        if launch % 2:
            killed.train_for(chance.uniform(0, 1.5 * first_save))
        else:
            killed.train_into_save(chance.randrange(MAX_SAVES - 1), chance.uniform(0, 0.1))
        killed.kill()
        inside += killed.is_saving()
        print(f"kill {launch}: {inside} inside a save, newest is {killed.newest()}", flush=True)
    killed.start()
    found = killed.state()
    assert inside
    for name in {*found, *expected}:
        assert found.get(name) == expected.get(name), name


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    with tempfile.TemporaryDirectory() as temporary:
        storm(pathlib.Path(temporary), parser.parse_args().kills)
