"""What the processes cost that wait for data.order = "growing", and how many that prepare can work side by side.

    python -m benchmarks.preparing_workers FILE.txt --tokenizer=tokenizer.model [--megabytes 200]

Prepares real text in parts of 32 MiB, by a run that waits for its first part and then by `data.prepare`: CPU seconds of
the processes that wait beside those of the others, from /proc. Then a simulation of more processes on a machine with as
many cores, from what is measured here: how long a part takes, and its syncs; what a claim costs that another holds.
"""

import argparse
import heapq
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter

import config
import files
from benchmarks import count
from data import growing, pieces
from data.prepare import prepare

REPO = pathlib.Path(__file__).parent.parent
MARK = "PREPARING_WORKERS"  # in the environment of all that is started here


def cpu_seconds(mark: str) -> Counter[str]:
    """So far, of the processes that prepare and of those that wait for them."""
    found: Counter[str] = Counter()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                prepares = b"data.growing import main" in (process / "cmdline").read_bytes()
                found["prepare" if prepares else "wait"] += (int(user) + int(system)) / os.sysconf(
                    "SC_CLK_TCK"
                )
        except OSError:  # it has ended, or is another user's
            continue
    return found


def waiting(cfg: config.Config, command: list[str], parts: int) -> tuple[Counter[str], float]:
    """CPU seconds and seconds from when the command's processes have prepared for a second until so many parts are
    there. Ends them then."""
    path, folder = pathlib.Path(cfg.run.output_dir) / "c.toml", pathlib.Path(str(cfg.data.path))
    path.write_text(config.to_toml(cfg))
    process = subprocess.Popen(
        [sys.executable, *command, path],
        cwd=REPO,
        env={**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        while cpu_seconds(str(folder))["prepare"] < 1 and process.poll() is None:
            time.sleep(0.05)
        first, began, found = cpu_seconds(str(folder)), time.monotonic(), Counter()
        while len(growing.published(folder)) < parts and process.poll() is None:
            found, seconds = cpu_seconds(str(folder)), time.monotonic() - began
            time.sleep(0.05)
        if len(growing.published(folder)) < parts:
            sys.exit(f"{' '.join(command)} ended with {process.wait()}")
    finally:
        process.kill()
        process.wait()
    return found - first, seconds


def a_part(cfg: config.Config) -> tuple[list[float], list[float]]:
    """CPU seconds of a process for each part, without syncs, and seconds of the syncs and renames of one."""
    folder, d, real, busy, slow = (
        pathlib.Path(str(cfg.data.path)),
        cfg.data,
        (os.fsync, files.publish),
        [],
        [],
    )
    spent = 0.0

    def timed(call):
        def inner(*arguments):
            nonlocal spent
            began = time.perf_counter()
            call(*arguments)
            spent += time.perf_counter() - began

        return inner

    os.fsync, files.publish = map(timed, real)
    for number in range(len(pieces.read_plan(folder)["parts"])):
        spent, began = 0.0, time.process_time()
        growing.write_part(folder, d, number)
        busy.append(time.process_time() - began)
        slow.append(spent)
    os.fsync, files.publish = real
    return busy, slow


def a_claim(folder: pathlib.Path) -> float:
    """Seconds for a part that another process has."""
    path = folder / ".part.lock"
    with growing.claimed(path):
        began = time.perf_counter()
        for _ in range(200):
            with growing.claimed(path):
                pass
        return (time.perf_counter() - began) / 200


def simulate(
    workers: int, busy: list[float], slow: list[float], claim: float, alone: bool
) -> tuple[float, float]:
    """(share of the workers' time in which they prepare, seconds until the first 16 parts are there), for 40 parts of
    each worker. alone: the file system syncs for one process at a time."""
    draw, disk, ends, useful = random.Random(0), 0.0, [], 0.0
    free = [0.0] * workers  # when each is
    for _ in range(40 * workers):
        work = draw.choice(busy)
        end = (
            heapq.heappop(free) + (workers - 1) * claim + work
        )  # asks for all that the others have, then for the next
        disk = (max(disk, end) if alone else end) + draw.choice(slow)
        useful += work
        ends.append(disk)
        heapq.heappush(free, disk)
    return useful / (workers * max(ends)), sorted(ends)[15]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=count, default=200)
    given = parser.parse_args()
    pieces.SMALLEST = pieces.LARGEST  # little text, cut as much of it would be
    with given.text.open(errors="ignore") as file:
        text = file.read(given.megabytes * 1_000_000)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "a.jsonl").write_text(
            "".join(
                json.dumps({"text": text[i : i + 2500]}) + "\n" for i in range(0, len(text), 2500)
            )
        )

        def configured(path: str) -> config.Config:
            cfg = config.load(
                str(REPO / "configs/tiny.toml"),
                [
                    f"--data.source={folder}/a.jsonl",
                    f"--data.tokenizer={pathlib.Path(given.tokenizer).absolute()}",
                    f"--data.path={folder}/{path}",
                    "--data.order=growing",
                    "--model.vocab_size=262144",
                    "--model.dim=16",
                    "--model.n_heads=1",
                    "--model.n_kv_heads=1",
                    "--eval=off",
                    f"--run.output_dir={folder}",
                    "--train.steps=1",
                    "--optim.warmup_steps=0",
                    "--checkpoint=off",
                ],
            )
            prepare(cfg)
            return cfg

        for what, module in (
            ("a run's launcher and rank, first part", "lifecycle.launch"),
            ("`data.prepare`, all parts", "data.prepare"),
        ):
            cfg = configured(module)
            parts = (
                len(pieces.read_plan(pathlib.Path(str(cfg.data.path)))["parts"])
                if module == "data.prepare"
                else 1
            )
            cpu, seconds = waiting(cfg, ["-m", module], parts)
            print(
                f"{what}: waits {cpu['wait']:.2f} s of CPU time beside {cpu['prepare']:.2f} s of those that prepare, "
                f"{cpu['wait'] / cpu['prepare']:.2%}, in {seconds:.1f} s",
                flush=True,
            )
        busy, slow = a_part(cfg := configured("alone"))
        claim = a_claim(pathlib.Path(str(cfg.data.path)))
        print(
            f"a part: {statistics.mean(busy):.2f} s of CPU time ({min(busy):.2f} to {max(busy):.2f}), synced and "
            f"renamed in {statistics.mean(slow):.3f} s; a claim that another has: {claim * 1e6:.0f} us"
        )
        rate = pieces.LARGEST / 1e6 / statistics.mean(busy)
        for times, alone in ((1, False), (100, False), (1, True)):
            print(
                f"claims {times} times as slow as here, syncs {'one at a time' if alone else 'side by side'}:"
            )
            for workers in (2, 8, 96):
                share, first = simulate(workers, busy, slow, claim * times, alone)
                print(
                    f"  {workers:2} workers prepare {workers * rate * share:.1f} MB/s, in {share:.1%} of their time; "
                    f"16 parts are there after {first:.0f} s"
                )


if __name__ == "__main__":
    main()
