"""Runs train.py on the fake CUDA, without what depends on values, and reports what each step cost.

python -m tests.fake_cuda.rank [--alone N] [--report FILE] [--races] CONFIG [--section.key=value ...]

--alone N: this one process is rank 0 of N, under no torchrun; the others do not exist. Their answers are those of rank
0, and NCCL moves nothing anyway. --races: reports what races.py finds. The environment is that of build.environment().
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock


def be_alone(size: int) -> None:
    """Makes this process rank 0 of `size`: NCCL is the fake anyway, gloo becomes torch's "fake" backend, and objects
    are gathered as if every rank had this one's."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend
    from torch.distributed.checkpoint import default_planner

    planner: Any = default_planner
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(min(size, 8)), "MASTER_PORT": "29500"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", **local}
    store, init, new_group = dist.HashStore(), dist.init_process_group, dist.new_group

    def init_alone(backend: str, **options: Any) -> None:
        changed: dict[str, Any] = {**options, "store": store}
        init(backend.replace("gloo", "fake"), **changed)

    def new_alone(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        return new_group(*arguments, backend="fake" if backend == "gloo" else backend, **options)

    # by torch's names of parameters: DCP passes some by name
    def gather(object_list: list, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_on_one(obj: Any, object_gather_list: list, *unused: Any, **options: Any) -> None:
        gather(object_gather_list, obj)

    def scatter(scatter_object_output_list, scatter_object_input_list, *unused, **options) -> None:
        scatter_object_output_list[0] = scatter_object_input_list[0]

    # a checkpoint lacks the other ranks' shards; torch 2.11 returned a bool, later ones the errors
    returned = planner._validate_global_plan.__annotations__["return"]
    planner._validate_global_plan = lambda *unused: True if returned is bool else []
    # the gathered plans all are rank 0's, which must write all of it
    empty = partial(dataclasses.replace, items=[])
    planner.DefaultSavePlanner._dedup_save_plans = lambda _, p: [p[0], *map(empty, p[1:])]
    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.init_process_group, module.new_group = init_alone, new_alone
        module.all_gather_object, module.gather_object = gather, gather_on_one
        module.scatter_object_list = scatter
        module.broadcast_object_list = lambda *unused, **options: None


def ignore_values() -> None:
    """No kernel runs, so device memory holds zeros: nothing may wait until a value is in range, or ask whether one is
    finite."""
    import torch

    import optim
    from extras.lora.nf4 import NF4Linear

    quantize, is_skipped = NF4Linear.quantize, optim.UpdateGuard._is_skipped
    unchecked = mock.patch.object(torch.Tensor, "isfinite", lambda tensor: torch.tensor(True))
    for name, value in {  # patch() raises where the name is gone
        "extras.huggingface.weights.Weights.read_into": lambda w, name, *unused: name in w.stored,
        "torch.nn.init.trunc_normal_": lambda tensor, *unused, **options: tensor,
        "parallel.materialize.is_finite": lambda tensor: True,
        "checkpoint.save.all_finite": lambda tensors: True,
        "extras.lora.nf4.NF4Linear.quantize": lambda *arguments: unchecked(quantize)(*arguments),
        # waits as it does on a GPU
        "optim.UpdateGuard._is_skipped": lambda guard: is_skipped(guard) and False,
    }.items():
        mock.patch(name, value).start()


def counters() -> dict[str, int]:
    """The calls that this process has made so far, by kind: those of fake.h."""
    fake = ctypes.CDLL(None)
    fake.fake_cuda_counters.restype = ctypes.c_char_p
    return json.loads(fake.fake_cuda_counters())


def report(path: pathlib.Path, races: Any) -> None:
    """Has a run write, as JSON, each step's calls and memory, the process's communicators, and races."""
    from torch import cuda

    from run.run import Run

    steps_of_run, rows = Run.steps, []

    def write() -> None:  # each time: a run ends by os._exit()
        found = {name: counters()[name] for name in ("communicators", "registrations")}
        found |= {"steps": rows, "races": races.found if races else []}
        path.write_text(json.dumps(found, indent=1))

    def measured(self: Run, first: int, last: int) -> Iterator[int]:
        with races or contextlib.nullcontext():
            write()
            for step in steps_of_run(self, first, last):
                cuda.reset_peak_memory_stats()
                before = counters()
                yield step
                row = {name: count - before[name] for name, count in counters().items()}
                row |= {"step": step, "allocated": cuda.memory_allocated()}  # between steps
                row["peak_allocated"] = cuda.max_memory_allocated()
                row["peak_reserved"] = cuda.max_memory_reserved()
                rows.append(row)
                write()
        write()

    Run.steps = measured


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--alone", type=int)
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--races", action="store_true")
    args, train_arguments = parser.parse_known_args()
    sys.path.insert(0, os.getcwd())
    if args.alone:
        be_alone(args.alone)
    ignore_values()
    if args.report:
        from tests.fake_cuda.races import Races

        report(args.report, Races() if args.races else None)
    sys.argv = ["train.py", *train_arguments]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
