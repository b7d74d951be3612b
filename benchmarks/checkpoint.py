"""Times a save's stall, and verifying and reading at start-up, against the speed of the disk and the cores alone.

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

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

import config  # noqa: E402
from benchmarks import count  # noqa: E402
from checkpoint import catalog  # noqa: E402
from checkpoint.checkpointer import Checkpointer, State  # noqa: E402
from checkpoint.load import restore, tensors_of  # noqa: E402
from checkpoint.manifest import hash_files  # noqa: E402
from files import sync  # noqa: E402
from lifecycle.process_group import distributed  # noqa: E402
from model.build import meta_model  # noqa: E402
from model.llama import parameter_count  # noqa: E402
from optim import build_optimizer  # noqa: E402
from parallel.materialize import materialize  # noqa: E402
from parallel.parallelize import parallelize  # noqa: E402


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=count, default=1024)
    parser.add_argument(
        "--folder", help="on the disk to measure; absent: the default for temporary files"
    )
    parser.add_argument("--repeat", type=count, default=5)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work) -> object:
        began = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    if args.folder:
        os.makedirs(args.folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        cfg = configuration(args.mib, folder)
        async_cfg = dataclasses.replace(
            cfg, checkpoint=dataclasses.replace(cfg.checkpoint, async_save=True)
        )
        with distributed(cfg) as world:
            model = meta_model(cfg.model)
            parallelize(model, cfg, world)
            materialize(model, 0, world.device)
            optimizer = build_optimizer(model, cfg.optim)
            tensors = [
                t.to_local() if hasattr(t, "to_local") else t
                for t in tensors_of(model, optimizer).values()
            ]
            size = sum(t.nbytes for t in tensors)
            copies = [torch.zeros_like(t, device="cpu") for t in tensors]
            blocking = Checkpointer(cfg, world, [], [])
            asynchronous = Checkpointer(async_cfg, world, [], [])
            raw = pathlib.Path(folder) / "raw"

            def write() -> None:
                with raw.open("wb", buffering=0) as file:
                    for tensor in copies:
                        file.write(memoryview(tensor.flatten().numpy()).cast("B"))
                    os.fsync(file.fileno())

            def save(checkpointer: Checkpointer, step: int) -> None:
                checkpointer.save(State(step), model, optimizer, stopping=False, data=[])

            def finish(checkpointer: Checkpointer) -> None:
                checkpointer.report = lambda step, problem: print(problem) if problem else None
                checkpointer.finish_pending_save(wait=True)

            def copy() -> None:
                for held, tensor in zip(copies, tensors):
                    held.copy_(tensor)

            save(asynchronous, 1)  # takes the memory for its copies once
            finish(asynchronous)
            for step in range(2, 2 + 2 * args.repeat, 2):
                timed("copy in memory", copy)
                timed("raw write", write)
                timed("hash", lambda: hash_files(raw.parent, ["raw"]))
                raw.unlink()
                timed("save", lambda step=step: (save(blocking, step), finish(blocking)))
                timed("verify", lambda step=step: catalog.problems_of(catalog.path_of(cfg, step)))
                timed(
                    "read", lambda step=step: restore(catalog.path_of(cfg, step), model, optimizer)
                )
                timed("async stall", lambda step=step: save(asynchronous, step + 1))
                timed("async rest", lambda: finish(asynchronous))
                sync(catalog.root(cfg))
            parameters = parameter_count(model)
        shutil.rmtree(catalog.root(cfg))

    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, {parameters:,} "
        f"parameters, {size / 2**20:,.0f} MiB of state, medians of {args.repeat}"
    )
    for name, value in median.items():
        print(
            f"{name:<15} {value:8.3f} s {size / value / 1e9:8.2f} GB/s   "
            f"({min(seconds[name]):.3f} to {max(seconds[name]):.3f})"
        )
    ratios = {
        "save / (raw write + hash)": [
            s / (w + h) for s, w, h in zip(seconds["save"], seconds["raw write"], seconds["hash"])
        ],
        "hash / save": [h / s for h, s in zip(seconds["hash"], seconds["save"])],
        "async stall / copy in memory": [
            a / c for a, c in zip(seconds["async stall"], seconds["copy in memory"])
        ],
    }
    for name, values in ratios.items():
        print(f"{name:<30} {statistics.median(values):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
