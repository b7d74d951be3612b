"""The plan of a run: memory, communication and step time, from a simulated step and a GPU's rates.

plan() is what `--json` prints: simulate() counts a step (simulate.py), devices.py times it, and the
functions here add up what a reader asks for, each a part of the row. show.py renders the row;
advice.py compares rows.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import config
from config import ConfigError, check_for_gpus
from extras.planner.counted import COLLECTIVES
from extras.planner.devices import Cluster, Device, Moment, device, step_seconds, timeline
from extras.planner.pools import COMPUTATION
from extras.planner.simulate import Step, plus, simulate
from model.build import meta_model
from model.llama import Llama, flops_per_token, parameter_count
from parallel.fsdp import units

GIB = 2**30
# what torch's allocator does not allocate: CUDA's context, NCCL's buffers, cuDNN. An estimate
CONTEXT_GIB = 1.5
# memory between steps: its names in the row, and those of Step.held
STATES = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer state"}
DIMENSIONS = ("dp_shard", "dp_replicate", "cp", "tp", "replica")
KINDS = tuple(dict.fromkeys(COLLECTIVES.values()))


@dataclass(frozen=True)
class Asked:
    """The hardware that a plan is for."""

    gpu: Device | None = None
    gpu_memory_gib: float | None = None  # overrides the GPU's
    gpus_per_node: int = 8
    # None: follows run.device; False: plans for a CPU, as a run on one does
    on_gpu: bool | None = None
    # without what CUDA needs for itself
    without_cuda: bool = False

    @property
    def memory_gib(self) -> float | None:
        if self.gpu_memory_gib:
            return self.gpu_memory_gib
        return self.gpu.memory if self.gpu else None


def plan(
    cfg: config.Config, ranks: int, asked: Asked = Asked(), epoch: float | None = None
) -> dict:
    """The plan for one world size, as --json prints it. It describes rank 0, which has the largest
    shards.

    epoch: samples in an epoch of the prepared data; None if it is not prepared. Raises ConfigError
    for a mesh or options that the ranks or the GPU do not support.
    """
    row, _ = planned(cfg, ranks, asked, epoch)
    return row


def planned(
    cfg: config.Config, ranks: int, asked: Asked, epoch: float | None = None
) -> tuple[dict, list[Moment]]:
    """The row of plan(), and the step's timeline. Times assume an H100 if no GPU is given."""
    if cfg.parallel.param_dtype == "auto":
        # a plan assumes GPUs with bfloat16 units
        cfg = replace(cfg, parallel=replace(cfg.parallel, param_dtype="bfloat16"))
    shape = config.mesh_shape(cfg, ranks)
    on_gpu = cfg.run.device != "cpu" if asked.on_gpu is None else asked.on_gpu
    if on_gpu:
        check_options(cfg, asked.gpu)
    step = simulate(cfg, ranks, on_gpu)
    cluster = Cluster(asked.gpu or device("H100"), asked.gpus_per_node, shape)
    if on_gpu and not asked.without_cuda:
        step = with_workspaces(step, cluster.device)
    moments = timeline(step.phases, cfg, cluster)
    model = meta_model(cfg.model, cfg.lora)
    row = size_of_run(model, ranks, shape)
    for name, kind in STATES.items():
        row[f"{name}_bytes_per_rank"] = step.held[kind]
    row |= batches(cfg, shape, epoch)
    row |= flops(model, cfg, ranks, step)
    row |= traffic(step, cluster)
    row |= memory(cfg, step, asked)
    row |= not_counted(cfg, step)
    timing = times(cfg, ranks, step, cluster, moments, row["flops_per_token"])
    if not asked.gpu:
        timing = dict.fromkeys(timing)
    return row | timing, moments


def check_options(cfg: config.Config, gpu: Device | None) -> None:
    """Raises ConfigError for options that GPUs, or this one, do not support."""
    check_for_gpus(cfg)
    if gpu and not gpu.float8 and cfg.parallel.float8 != "none":
        raise ConfigError(
            f'[parallel] float8 = "{cfg.parallel.float8}": the GPU given has no float8 products'
        )


def with_workspaces(step: Step, gpu: Device) -> Step:
    """The step with cuBLAS's workspaces, which torch allocates in the first matmul of a thread: one
    for forward, one for backward."""
    size = int(2 * gpu.workspace * 2**20)
    kinds = {"cuBLAS workspaces": size}
    pools = {COMPUTATION: size}
    phases = []
    for phase in step.phases:
        phases.append(
            replace(
                phase,
                peak=plus(phase.peak, kinds),
                end=plus(phase.end, kinds),
                peak_of_pools=plus(phase.peak_of_pools, pools),
                end_of_pools=plus(phase.end_of_pools, pools),
            )
        )
    return replace(step, phases=phases)


def size_of_run(model: Llama, ranks: int, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    dp_replicate, dp_shard, cp, tp = shape
    return {
        "parameters": parameter_count(model),
        "world_size": ranks,
        "replicas": dp_replicate,
        "shards": dp_shard * cp,
        "cp": cp,
        "tp": tp,
        "units": len(units(model)),
    }


def batches(
    cfg: config.Config, shape: tuple[int, int, int, int], epoch: float | None
) -> dict[str, Any]:
    dp_replicate, dp_shard, _, _ = shape
    dp_size = dp_replicate * dp_shard
    return {
        "micro_batch_size": config.micro_batch_size(cfg.train, dp_size),
        "accumulation_steps": config.accumulation_steps(cfg.train, dp_size),
        "tokens_per_step": config.tokens_per_step(cfg.train),
        "steps_per_epoch": epoch / cfg.train.global_batch_size if epoch else None,
    }


def flops(model: Llama, cfg: config.Config, ranks: int, step: Step) -> dict[str, Any]:
    """FLOP per token: by the model's own flops_per_token(), and counted without recomputation."""
    # of forward and backward: the last phase is the update
    counted = sum(phase.work["model"] * phase.times for phase in step.phases[:-1])
    return {
        "flops_per_token": flops_per_token(model, cfg.train.seq_len),
        "counted_flops_per_token": counted / tokens_per_rank(cfg, ranks),
    }


def tokens_per_rank(cfg: config.Config, ranks: int) -> float:
    """Tokens per step and rank."""
    return config.tokens_per_step(cfg.train) / ranks


def traffic(step: Step, cluster: Cluster) -> dict[str, Any]:
    """Collectives of a step, by kind, and by mesh dimension and kind.

    Each is (number, bytes of their larger buffers together).
    """
    sent = Counter()
    for phase in step.phases:
        sent = plus(sent, phase.sent, phase.times)
    collectives = {}
    for kind in KINDS:
        number = sum(sent[dimension, kind, "number"] for dimension in DIMENSIONS)
        size = sum(sent[dimension, kind, "bytes"] for dimension in DIMENSIONS)
        collectives[kind] = (number, size)
    by_dimension = {}
    for dimension in DIMENSIONS:
        kinds = [kind for kind in KINDS if sent[dimension, kind, "number"]]
        if not kinds:
            continue
        ranks, in_a_node = cluster.within(dimension)
        counts: dict[str, Any] = {"ranks": ranks, "ranks_in_a_node": in_a_node}
        for kind in kinds:
            number = sent[dimension, kind, "number"]
            counts[kind] = (number, sent[dimension, kind, "bytes"])
        by_dimension[dimension] = counts
    return {"collectives_per_step": collectives, "traffic_per_step": by_dimension}


def memory(cfg: config.Config, step: Step, asked: Asked) -> dict[str, Any]:
    """The phase with the highest peak, in GiB by kind, and whether the GPU has as much."""
    peak = step.peak()
    pools = step.reserved()
    needed = peak.peak.total() / GIB if asked.without_cuda else device_gib(step)
    return {
        "peak_gib": peak.peak.total() / GIB,
        "peak_at": peak.name,
        "parts_gib": {kind: size / GIB for kind, size in peak.peak.most_common() if size},
        "host_gib": step.held.total() / GIB if cfg.parallel.cpu_offload else 0.0,
        "reserved_gib": pools.total() / GIB,
        "pools_gib": {name: size / GIB for name, size in pools.most_common() if size},
        "device_gib": needed,
        "fits": needed <= asked.memory_gib if asked.memory_gib else None,
    }


def device_gib(step: Step) -> float:
    """GPU memory that a step needs: what torch's allocator reserves, and CUDA's own."""
    return step.reserved().total() / GIB + CONTEXT_GIB


def not_counted(cfg: config.Config, step: Step) -> dict[str, Any]:
    """What the plan leaves out, in words, and the operators among it."""
    calls_of = Counter()
    for phase in step.phases:
        calls_of = plus(calls_of, phase.uncounted, phase.times)
    # + drops zeros
    calls_of = +calls_of
    notes = []
    if cfg.parallel.cpu_offload:
        notes += [
            "the time of copies to the host, and of the update there",
            "of host memory, what torch rounds pinned parameters and gradients up to: powers of "
            "two, each",
        ]
    if not step.state_is_made:
        notes.append(f"state of {step.optimizer} that optim.build_optimizer does not make")
    if step.masks_depend_on_data:
        notes.append(
            "what masks by data, such as document numbers, save of attention: each sequence is "
            "planned as one document"
        )
    operators = []
    for name, calls in calls_of.items():
        first = step.first_calls[name]
        notes.append(
            f"the FLOP of {name}: {calls:,} calls a step, the first in {first}; the time is too "
            "short, and speed and MFU too high"
        )
        operators.append({"operator": name, "calls": calls, "first_in": first})
    return {"not_counted": notes, "operators_not_counted": operators}


def times(
    cfg: config.Config,
    ranks: int,
    step: Step,
    cluster: Cluster,
    moments: list[Moment],
    flops_per_token: int,
) -> dict[str, Any]:
    """Step time, throughput, and what the run costs. MFU by the model's own flops_per_token()."""
    tokens = tokens_per_rank(cfg, ranks)
    seconds = step_seconds(moments)
    without_waiting = step_seconds(timeline(step.phases, cfg, cluster, waiting=False))
    at_best = step_seconds(timeline(step.phases, cfg, cluster, waiting=False, best=True))
    gpu_hours = seconds * cfg.train.steps * ranks / 3600
    return {
        "step_seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds,
        "best_tokens_per_second_per_device": tokens / at_best,
        "waiting_seconds": seconds - without_waiting,
        "mfu": tokens / seconds * flops_per_token / (cluster.device.peak * 1e12),
        "gpu_hours": gpu_hours,
        "kilowatt_hours": gpu_hours * cluster.device.watts / 1000,
    }
