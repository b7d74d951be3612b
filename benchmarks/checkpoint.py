"""Times saves, verifying and reading against the speed of the disk and the cores alone.

    python benchmarks/checkpoint.py --mib 1024 [--folder F] [--repeat 5]

In one process, on the state of a Llama of about that size (weights and AdamW's moments). Each
repetition times one after another, so that a slow moment of the disk affects all of them:

- a copy of the state in memory, a raw write of it with fsync, and its SHA-256 on all cores
- a save, verifying it, and reading it
- an asynchronous save's stall, and the rest of it

Prints medians, and the ratios that matter.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import config  # noqa: E402
from benchmarks import count  # noqa: E402
from checkpoint import catalog, manifest  # noqa: E402
from checkpoint.checkpointer import Checkpointer  # noqa: E402
from checkpoint.load import restore, tensors_of  # noqa: E402
from data.dataset import Dataset, Sample  # noqa: E402
from model.build import meta_model  # noqa: E402
from model.llama import parameter_count  # noqa: E402
from optim import Progress, build_optimizer  # noqa: E402
from parallel.materialize import materialize  # noqa: E402
from parallel.mesh import World  # noqa: E402
from parallel.parallelize import parallelize  # noqa: E402
from run.rank import distributed  # noqa: E402
from system import sync  # noqa: E402


def configuration(mib: int, folder: str) -> config.Config:
    layers = max(1, round((mib * 2**20 / 12 - 2 * 8192 * 1024) / 12.6e6))
    return config.from_dict(
        {
            "run": {"name": "r", "output_dir": folder},
            "model": {
                "dim": 1024,
                "n_layers": layers,
                "n_heads": 16,
                "n_kv_heads": 16,
                "ffn_dim": 2730,
                "vocab_size": 8192,
            },
            "train": {"steps": 10**6},
            "parallel": {"param_dtype": "float32"},
            "checkpoint": {"keep_last": 1},
        },
        "benchmark",
    )


class Stopwatch:
    """Keeps the seconds of named pieces of work, one for each repetition."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)


class Subject:
    """The model and optimizer whose state is saved, and a copy of the state in memory."""

    def __init__(self, cfg: config.Config, world: World):
        self.root = catalog.root_of(cfg)
        self.model = meta_model(cfg.model)
        parallelize(self.model, cfg, world)
        materialize(self.model, 0, world.device)
        self.optimizer = build_optimizer(self.model, cfg.optim)
        self.tensors = []
        for tensor in tensors_of(self.model, self.optimizer).values():
            self.tensors.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        self.copies = [torch.zeros_like(tensor, device="cpu") for tensor in self.tensors]

    def copy(self) -> None:
        for copied, tensor in zip(self.copies, self.tensors):
            copied.copy_(tensor)

    def write(self, path: pathlib.Path) -> None:
        with path.open("wb", buffering=0) as file:
            for tensor in self.copies:
                file.write(memoryview(tensor.flatten().numpy()).cast("B"))
            os.fsync(file.fileno())

    def start_save(self, checkpointer: Checkpointer, step: int) -> None:
        checkpointer.save(Progress(step), self.model, self.optimizer, stopping=False)

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        self.start_save(checkpointer, step)
        checkpointer.wait()

    def verify(self, step: int) -> None:
        catalog.problems_of(catalog.path_of(self.root, step))

    def read(self, step: int) -> None:
        restore(catalog.path_of(self.root, step), self.model, self.optimizer)


def hash_file(path: pathlib.Path) -> None:
    parts = range(0, path.stat().st_size, manifest.PART)
    items = [(path.parent, path.name, part) for part, _ in enumerate(parts)]
    manifest.in_threads(manifest.hash_part, items)


def print_problem(step: int, problem: str | None) -> None:
    if problem:
        print(problem)


class NoData(Dataset):
    def sample(self, number: int) -> Sample:
        raise IndexError(number)

    def validation(self) -> list:
        return []

    def identities(self) -> list[dict]:
        return []


def measure(
    cfg: config.Config, world: World, repeat: int
) -> tuple[dict[str, list[float]], Subject]:
    """(seconds by name, what was saved)."""
    async_save = dataclasses.replace(cfg.checkpoint, async_save=True)
    no_data = NoData()
    blocking = Checkpointer(cfg, world, no_data, report=print_problem)
    cfg_async = dataclasses.replace(cfg, checkpoint=async_save)
    asynchronous = Checkpointer(cfg_async, world, no_data, report=print_problem)
    subject = Subject(cfg, world)
    watch = Stopwatch()
    raw = pathlib.Path(cfg.run.output_dir) / "raw"
    subject.save(asynchronous, 1)  # the first one allocates the memory for its copies
    for step in range(2, 2 + 2 * repeat, 2):
        watch.time("copy in memory", subject.copy)
        watch.time("raw write", partial(subject.write, raw))
        watch.time("hash", partial(hash_file, raw))
        raw.unlink()
        watch.time("save", partial(subject.save, blocking, step))
        watch.time("verify", partial(subject.verify, step))
        watch.time("read", partial(subject.read, step))
        watch.time("async stall", partial(subject.start_save, asynchronous, step + 1))
        watch.time("async rest", asynchronous.wait)
        sync(subject.root)
    shutil.rmtree(subject.root)
    return watch.seconds, subject


def show(seconds: dict[str, list[float]], size: int) -> None:
    """size: bytes of the state."""
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:<15} {median:8.3f} s {size / median / 1e9:8.2f} GB/s   "
            f"({min(values):.3f} to {max(values):.3f})"
        )
    # of each repetition: what hits one of its parts may hit the other
    ratios = {
        "save / (raw write + hash)": [],
        "hash / save": [],
        "async stall / copy in memory": [],
    }
    for i, save in enumerate(seconds["save"]):
        hashing = seconds["hash"][i]
        copying = seconds["copy in memory"][i]
        ratios["save / (raw write + hash)"].append(save / (seconds["raw write"][i] + hashing))
        ratios["hash / save"].append(hashing / save)
        ratios["async stall / copy in memory"].append(seconds["async stall"][i] / copying)
    for name, values in ratios.items():
        print(f"{name:<30} {statistics.median(values):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=count, default=1024)
    parser.add_argument(
        "--folder", help="on the disk to measure; absent: the default for temporary files"
    )
    parser.add_argument("--repeat", type=count, default=5)
    args = parser.parse_args()
    if args.folder:
        os.makedirs(args.folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        cfg = configuration(args.mib, folder)
        with distributed(cfg) as world:
            seconds, subject = measure(cfg, world, args.repeat)
            parameters = parameter_count(subject.model)
    size = sum(tensor.nbytes for tensor in subject.tensors)
    print(
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, "
        f"{parameters:,} parameters, {size / 2**20:,.0f} MiB of state, "
        f"medians of {args.repeat}"
    )
    show(seconds, size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
