"""What the tests run on several ranks: plain functions that a fresh process can import."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import config
from config import ConfigError
from data.loader import inputs_and_targets
from model.build import meta_model
from model.llama import Llama, after_weight_update
from parallel import materialize as materialize_module
from parallel.fsdp import reshard, set_communication, unshard_first_units
from parallel.materialize import materialize
from parallel.mesh import World, build_mesh, fsdp_mesh
from parallel.parallelize import parallelize
from run.rank import distributed
from run.run import Run
from run.watchdog import Watchdog
from tests import forks
from tests.conftest import compiled_by, make_config, rows
from tests.conftest import full as whole


def process_group():
    """This process's World, for 1, 2, 3, 4 or 8 ranks."""
    return distributed(make_config(train={"global_batch_size": 24, "micro_batch_size": 1}))


def world_for(cfg: config.Config, world: World) -> World:
    """The same ranks under another configuration's mesh."""
    return World(world.rank, world.size, world.device, mesh_of(config.mesh_shape(cfg, world.size)))


@functools.cache
def mesh_of(shape: tuple[int, int, int, int]) -> DeviceMesh:
    """One for all cases of a process, whose groups would pile up."""
    return build_mesh("cpu", shape)


def train_all(cases: dict[str, dict], output: str, kernels: bool = False) -> dict[str, list[dict]]:
    """Trains every case, one after the other in one process group; its metrics rows by name. kernels: whether compiled
    blocks have kernels, on rank 0."""
    found = {}
    with (
        process_group() as world,
        contextlib.nullcontext() if kernels and world.rank == 0 else without_kernels(),
    ):
        for name, sections in cases.items():
            torch._dynamo.reset()  # another model is no other shape of the one before
            folder = name.replace(" ", "-").replace(",", "")
            cfg = make_config(
                **sections, run={"name": folder, "output_dir": f"{output}/{world.size}"}
            )
            run_training(cfg, world_for(cfg, world))
            found[name] = rows(config.run_folder(cfg.run)) if world.rank == 0 else None
    return found


@contextlib.contextmanager
def larger_weights() -> Iterator[None]:
    """Fresh projections are eight times as large: as they are, attention is nearly uniform, and hardly any option of
    the model shows in a loss."""
    draw = materialize_module.draw

    def larger(out: torch.Tensor, *arguments: Any) -> None:
        draw(out, *arguments)
        if arguments[-1].endswith("_proj.weight"):
            out.mul_(8)

    with mock.patch.object(materialize_module, "draw", larger):
        yield


def train_in_turn(runs: list[dict]) -> list[str]:
    """Trains these, one after the other in one process group, from larger weights. What refused each, "" where nothing
    did."""
    found = []
    with process_group() as world, without_kernels(), larger_weights():
        for sections in runs:
            cfg = make_config(**sections)
            torch._dynamo.reset()  # another model is no other shape of the one before
            found.append("")
            try:
                run_training(cfg, world_for(cfg, world))
            except (ConfigError, SystemExit) as error:
                cause = error if isinstance(error, ConfigError) else error.__context__
                if not isinstance(cause, ConfigError):
                    raise RuntimeError(f"of {sections}") from cause
                found[-1] = str(cause)
    return found


def train_forked(change: str, *arguments) -> dict[str, list[dict]]:
    """train_all() of a fork: `change` names it in tests/forks.py."""
    with getattr(forks, change)():
        return train_all(*arguments)


def run_training(cfg: config.Config, world: World) -> None:
    """One run in its folder, as train.py's main() does it."""
    import train
    from run.rank import resolve_param_dtype

    cfg = resolve_param_dtype(cfg, world)
    run = Run(cfg, world, Watchdog(world.rank, None), None)
    train.train(cfg, world, run)
    run.end()
    assert run.run_lock or world.rank
    if run.run_lock:
        run.run_lock.release()  # the next run of this process may have the same folder


def own_inputs(rows: torch.Tensor, world: World) -> tuple[torch.Tensor, ...]:
    """The model's arguments for these windows, as data/loader.py makes them."""
    tensors = inputs_and_targets(rows)
    if world.cp == 1:
        return tensors
    from parallel import context

    return context.shard_sequences(tensors, world)


def build(cfg: config.Config, world: World, weights: Any = None) -> Llama:
    model = meta_model(cfg.model, cfg.lora)
    parallelize(model, cfg, world)
    materialize(model, cfg.run.seed, world.device, weights and weights.read_into)
    return model


def over_meshes(
    full: list[torch.Tensor], world: World
) -> Iterator[tuple[str, torch.nn.ParameterList]]:
    """(name of a mesh, these tensors as parameters on it), of every mesh of so many ranks: the last is not sharded."""
    n = world.size
    shapes = {"sharded": (1, n, 1, 1), "replicas": (n, 1, 1, 1)}
    if n == 4:
        shapes |= {
            "hybrid": (2, 2, 1, 1),
            "context parallel": (1, 2, 2, 1),
            "tensor parallel": (1, 2, 1, 2),
        }
    for name, shape in shapes.items():
        ours = World(world.rank, n, world.device, build_mesh("cpu", shape))
        mesh = fsdp_mesh(ours)
        placements = [Replicate(), Shard(0)][-mesh.ndim :]
        over = [(mesh, placements)] * 3
        if ours.tp > 1:  # by columns, the same on all tp ranks, not known to tp
            both = ours.mesh["dp_shard", "tp"]
            over = [
                (both, [Shard(0), Shard(1)]),
                (both, [Shard(0), Replicate()]),
                (mesh, placements),
            ]
        model = torch.nn.ParameterList(
            distribute_tensor(t, *how, src_data_rank=None) for t, how in zip(full, over)
        )
        model.append(full[-1].clone())
        yield name, model


def gradient_norms() -> dict[str, tuple[float, float, float, float]]:
    """By mesh: the norm that clip_gradients returns, that of the clipped gradients, the norm in float64, and torch's in
    float32, of 4.2 million elements and some that are sharded over other meshes, or not at all."""
    from optim import clip_gradients

    generator = torch.Generator().manual_seed(0)
    full = [
        torch.randn(shape, generator=generator)
        for shape in ((2049, 2050), (1111,), (333, 10), (7, 3))
    ]
    expected = math.sqrt(sum(g.double().square().sum().item() for g in full))
    torchs = torch.nn.utils.get_total_norm(full).item()
    found = {}
    with process_group() as world:
        for name, model in over_meshes(full, world):
            for p in model:
                p.grad = p.detach().clone()
            norm = clip_gradients(model, torch.optim.SGD(model.parameters()), 1.0).item()
            after = [whole(p.grad) for p in model]
            found[name] = (
                norm,
                math.sqrt(sum(g.double().square().sum().item() for g in after)),
                expected,
                torchs,
            )
    return found


class Collectives(TorchDispatchMode):
    """Counts the collectives that tensors pass through, and the bytes of the larger of each one's buffers."""

    def __init__(self):
        super().__init__()
        self.found = {
            kind: [0, 0] for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: what it sends itself comes back to us
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.replace("allgather", "all_gather").replace(
                "allreduce", "all_reduce"
            )
            name = name.replace("alltoall", "all_to_all")
            kind = next((kind for kind in self.found if kind in name), None)
            if kind:
                flat = [t for a in args for t in (a if isinstance(a, list | tuple) else [a])]
                # c10d's own write into one
                sizes = [t.nbytes for t in [*flat, result] if isinstance(t, torch.Tensor)]
                self.found[kind][0] += 1
                self.found[kind][1] += max(sizes)
        return result


def count_collectives(
    cases: list[dict], of_ranks: int | None = None
) -> list[dict[str, tuple[int, int]]]:
    """What one step of each case sends, counted while it runs. of_ranks: as rank 0 of so many under torch's fake
    process group, which takes the same calls and sends nothing."""
    found = []
    with process_group() if of_ranks is None else fake_process_group(of_ranks) as world:
        for sections in cases:
            cfg = make_config(**sections)
            ours = world_for(cfg, world)
            model = build(cfg, ours)
            ids = torch.randint(
                0, cfg.model.vocab_size, (cfg.train.micro_batch_size, cfg.train.seq_len + 1)
            )
            one_step(model, cfg, ours, ids)  # FSDP2 learns its order in the first one
            with torch.no_grad():  # an evaluation between changes nothing
                model(*own_inputs(ids, ours))
            reshard(model)
            with Collectives() as counted:
                one_step(model, cfg, ours, ids)
            found.append({kind: tuple(value) for kind, value in counted.found.items()})
            del model
    return found


@contextlib.contextmanager
def fake_process_group(ranks: int, rank: int = 0):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield World(rank, ranks, torch.device("cpu"), build_mesh("cpu", (1, ranks, 1, 1)))
    finally:
        dist.destroy_process_group()


def one_step(model: Llama, cfg: config.Config, world: World, ids: torch.Tensor) -> None:
    """A step's collectives: forward and backward of every micro-batch, the gradient norm, the scales of 8 bits."""
    from optim import clip_gradients

    accumulation = config.accumulation_steps(cfg.train, world.dp_size)
    unshard_first_units(model, cfg.parallel)
    for i in range(accumulation):
        set_communication(model, cfg.parallel, world, i == accumulation - 1)
        model(*own_inputs(ids, world))[0]["loss"].backward()
    clip_gradients(model, torch.optim.SGD(model.parameters()), 1.0)
    after_weight_update(model)


def train_to(steps: int, sections: dict, output: str) -> list[dict]:
    """Trains, or goes on, to a step in a folder that runs of any number of ranks share; the rows so far."""
    sections = {
        **sections,
        "train": {**sections["train"], "steps": steps},
        "run": {"name": "r", "output_dir": output},
    }
    cfg = make_config(**sections)
    with process_group() as world:
        run_training(cfg, world_for(cfg, world))
        return rows(config.run_folder(cfg.run)) if world.rank == 0 else []


class HostReads(TorchDispatchMode):
    """Notes each read of a tensor's value by the host, but for those of a tensor that is the host's own."""

    def __init__(self, own: torch.Tensor):
        super().__init__()
        self.own, self.found = own.data_ptr(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            function is torch.ops.aten._local_scalar_dense.default
            and args[0].data_ptr() != self.own
        ):
            self.found.append(str(args[0]))
        return function(*args, **(kwargs or {}))


def host_reads(sections: dict, output: str) -> tuple[list[list[str]], list[str]]:
    """(what the host reads from the device within each training_step() of a run, what reading its loss is seen as)."""
    import train

    reads = []
    control = []
    training_step = train.training_step

    def counted(model, optimizer, guard, *rest):
        with HostReads(guard.on_host) as seen:
            sums, scalars = training_step(model, optimizer, guard, *rest)
        reads.append(seen.found)
        with HostReads(guard.on_host) as seen:
            sums["loss"].item()
        control[:] = seen.found
        return sums, scalars

    cfg = make_config(**sections, run={"name": "reads", "output_dir": output})
    with process_group() as world, mock.patch("train.training_step", counted):
        run_training(cfg, world_for(cfg, world))
    return reads, control


def train_with_units(steps: int, sections: dict, output: str, units: list[bool]) -> str:
    """train_to(), where rank i's device has bfloat16 units or not; the dtype that the model computed in."""
    computed, forward = set(), torch.nn.functional.linear

    def noting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        computed.add(str(weight.dtype).removeprefix("torch."))
        return forward(x, weight)

    sections = {
        **sections,
        "train": {**sections["train"], "steps": steps},
        "run": {"name": "r", "output_dir": output},
    }
    cfg = make_config(**sections)
    with (
        process_group() as world,
        mock.patch("torch.nn.functional.linear", noting),
        mock.patch("run.rank.has_native_bfloat16", lambda device: units[world.rank]),
    ):
        run_training(cfg, world)
    return " and ".join(computed)


def without_kernels() -> contextlib.AbstractContextManager:
    """What is compiled within is traced and partitioned, but has no kernels: these take half a minute."""
    return compiled_by("aot_eager_decomp_partition")
