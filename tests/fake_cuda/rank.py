"""Runs train.py on the fake CUDA, without what depends on values, and reports what each step cost.

python -m tests.fake_cuda.rank [--alone N] [--report FILE] [--plant-...] CONFIG [--section.key=value ...]
torchrun --nproc-per-node 4 -m tests.fake_cuda.rank [...] CONFIG [--section.key=value ...]

--alone N: this one process is rank 0 of N; the others do not exist. Their answers are those of rank
0, and NCCL moves nothing anyway. --plant-wait: each step asks for the gradient norm, which waits.
--plant-collective-on RANK: that rank calls one more collective in each step. --races: reports what
races.py finds. --plant-race NAME: a fault of races.FAULTS. The environment is that of
build.environment().
"""

import argparse
import ctypes
import dataclasses
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

REPO = pathlib.Path(__file__).parent.parent.parent


def be_alone(size: int) -> None:
    """Makes this process rank 0 of `size`: NCCL is the fake anyway, gloo becomes torch's "fake"
    backend, and objects are gathered as if every rank had this one's."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend
    from torch.distributed.checkpoint import default_planner

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(min(size, 8)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    store = dist.HashStore()
    init_process_group = dist.init_process_group

    def init_alone(backend: str, **options: Any) -> None:
        init_process_group(backend.replace("gloo", "fake"), **{**options, "store": store})

    # by torch's names of parameters: DCP passes some by name
    def gather(object_list: list, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_on_one(obj: Any, object_gather_list: list, *unused: Any, **options: Any) -> None:
        gather(object_gather_list, obj)

    def scatter(
        scatter_object_output_list: list,
        scatter_object_input_list: list,
        *unused: Any,
        **options: Any,
    ) -> None:
        scatter_object_output_list[0] = scatter_object_input_list[0]

    def broadcast(*unused: Any, **options: Any) -> None:
        pass

    # a checkpoint lacks the other ranks' shards
    returned = default_planner._validate_global_plan.__annotations__["return"]
    valid = True if returned is bool else []  # torch 2.11 returned a bool, later ones the errors
    default_planner._validate_global_plan = lambda *unused: valid
    # the gathered plans all are rank 0's, which must write all of it
    planner = default_planner.DefaultSavePlanner
    planner._dedup_save_plans = lambda planner, plans: keep_first(plans)
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_alone
        module.all_gather_object = gather
        module.gather_object = gather_on_one
        module.scatter_object_list = scatter
        module.broadcast_object_list = broadcast
        module.new_group = with_fake_gloo(module.new_group)


def keep_first(plans: list) -> list:
    return [plans[0], *(dataclasses.replace(plan, items=[]) for plan in plans[1:])]


def with_fake_gloo(new_group: Any) -> Any:
    def new_alone(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        return new_group(*arguments, backend="fake" if backend == "gloo" else backend, **options)

    return new_alone


def ignore_values() -> None:
    """No kernel runs, so device memory holds zeros: nothing may wait until a value is in range, or
    ask whether one is finite."""
    import torch

    import optim
    from checkpoint import save
    from extras.huggingface.weights import Weights
    from extras.lora.nf4 import NF4Linear
    from parallel import materialize

    # patch.object raises where the name is gone
    def replace(owner: Any, name: str, value: Callable) -> None:
        mock.patch.object(owner, name, value).start()

    quantize = NF4Linear.quantize
    is_skipped = optim.UpdateGuard._is_skipped

    def quantize_unchecked(*arguments: Any) -> None:
        with mock.patch.object(torch.Tensor, "isfinite", lambda tensor: torch.tensor(True)):
            quantize(*arguments)

    def never_skipped(guard: optim.UpdateGuard) -> bool:
        is_skipped(guard)  # waits as it does on a GPU
        return False

    replace(Weights, "read_into", lambda weights, name, offsets, out: name in weights.stored)
    replace(torch.nn.init, "trunc_normal_", lambda tensor, *unused, **options: tensor)
    replace(materialize, "is_finite", lambda tensor: True)
    replace(save, "all_finite", lambda tensors: True)
    replace(NF4Linear, "quantize", quantize_unchecked)
    replace(optim.UpdateGuard, "_is_skipped", never_skipped)


def plant(fault: Callable[[Any], object]) -> None:
    """Calls fault(gradient norm) in each step."""
    import optim

    clip_gradients = optim.clip_gradients

    def clip_with_fault(*arguments: Any) -> Any:
        norm = clip_gradients(*arguments)
        fault(norm)
        return norm

    optim.clip_gradients = clip_with_fault


def all_reduce(norm: Any) -> None:
    import torch.distributed as dist

    dist.all_reduce(norm.to_local() if hasattr(norm, "to_local") else norm)


def counters() -> dict[str, int]:
    """The calls that this process has made so far, by kind: those of fake.h."""
    fake = ctypes.CDLL(None)
    fake.fake_cuda_counters.restype = ctypes.c_char_p
    return json.loads(fake.fake_cuda_counters())


class Report:
    """Each step's calls and memory, and the process's communicators, as JSON."""

    def __init__(self, path: str):
        self.path = path
        self.steps: list[dict[str, int]] = []
        self.races: list[str] = []

    def measured(self, steps: Iterator[int]) -> Iterator[int]:
        from torch import cuda

        self.write()
        for step in steps:
            cuda.reset_peak_memory_stats()
            before = counters()
            yield step
            after = counters()
            row = {name: after[name] - before[name] for name in after}
            row["step"] = step
            row["peak_allocated"] = cuda.max_memory_allocated()
            row["peak_reserved"] = cuda.max_memory_reserved()
            row["allocated"] = cuda.memory_allocated()  # between steps
            self.steps.append(row)
            self.write()  # each time: a run ends by os._exit()

    def searched_for_races(self, steps: Iterator[int]) -> Iterator[int]:
        from tests.fake_cuda.races import Races

        with Races() as races:
            self.races = races.found
            yield from steps
        self.write()

    def write(self) -> None:
        result = {
            "steps": self.steps,
            "communicators": counters()["communicators"],
            "registrations": counters()["registrations"],
            "races": self.races,
        }
        pathlib.Path(self.path).write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--alone", type=int)
    parser.add_argument("--report")
    parser.add_argument("--plant-wait", action="store_true")
    parser.add_argument("--plant-collective-on", default="nobody")
    parser.add_argument("--races", action="store_true")
    parser.add_argument("--plant-race")
    args, train_arguments = parser.parse_known_args()
    sys.path.insert(0, str(REPO))
    if args.alone:
        be_alone(args.alone)
    ignore_values()
    if args.plant_wait:
        plant(lambda norm: norm.item())
    if os.environ.get("RANK") == args.plant_collective_on:
        plant(all_reduce)
    if args.plant_race:
        from tests.fake_cuda.races import FAULTS

        FAULTS[args.plant_race]()
    if args.report:
        from run.run import Run

        report = Report(args.report)
        steps = Run.steps
        Run.steps = lambda run, *of: report.measured(steps(run, *of))
        if args.races:
            measured = Run.steps
            Run.steps = lambda run, *of: report.searched_for_races(measured(run, *of))
    sys.argv = [str(REPO / "train.py"), *train_arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
