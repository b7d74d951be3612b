"""The plan of a run: memory, communication and step time, from a simulated step (simulate.py) and a GPU's rates."""

from collections import Counter
from dataclasses import dataclass, replace

import config
from config import ConfigError, check_for_gpus
from extras.planner.counted import COLLECTIVES
from extras.planner.devices import Cluster, Device, Moment, device, step_seconds, timeline
from extras.planner.simulate import Step, plus, simulate
from model.build import meta_model
from model.llama import flops_per_token, parameter_count
from parallel.fsdp import units

GIB = 2**30
CONTEXT_GIB = 1.5  # CUDA's context and the buffers of cuBLAS, cuDNN and NCCL: an estimate
# the allocator's reserved / allocated memory, with expandable segments: an estimate
RESERVED = 1.03


@dataclass(frozen=True)
class Asked:
    """The hardware that a plan is for."""

    gpu: Device | None = None
    gpu_memory_gib: float | None = None  # overrides the GPU's
    gpus_per_node: int = 8
    # None: follows run.device; False: plans for a CPU, as a run on one does
    on_gpu: bool | None = None

    @property
    def memory_gib(self) -> float | None:
        return self.gpu_memory_gib or (self.gpu.memory if self.gpu else None)


def plan(
    cfg: config.Config, ranks: int, asked: Asked = Asked(), epoch: float | None = None
) -> dict:
    """The plan for one world size, as --json prints it. It describes rank 0, which has the largest shards. epoch:
    samples in an epoch of the prepared data; None if it is not prepared."""
    return planned(cfg, ranks, asked, epoch)[0]


def planned(
    cfg: config.Config, ranks: int, asked: Asked, epoch: float | None = None
) -> tuple[dict, list[Moment]]:
    """The row of plan(), and the step's timeline. Times assume an H100 if no GPU is given."""
    if cfg.parallel.param_dtype == "auto":  # a plan assumes GPUs with bfloat16 units
        cfg = replace(cfg, parallel=replace(cfg.parallel, param_dtype="bfloat16"))
    shape = dp_replicate, dp_shard, cp, tp = config.mesh_shape(cfg, ranks)
    on_gpu = cfg.run.device != "cpu" if asked.on_gpu is None else asked.on_gpu
    if on_gpu:
        check_for_gpus(cfg)
        if asked.gpu and not asked.gpu.float8 and cfg.parallel.float8 != "none":
            raise ConfigError(
                f'[parallel] float8 = "{cfg.parallel.float8}": the GPU given has no float8 products'
            )
    step, model = simulate(cfg, ranks, on_gpu), meta_model(cfg.model, cfg.lora)
    peak, sent, needed = step.peak(), Counter(), device_gib(step)
    for phase in step.phases:
        sent = plus(sent, phase.sent, phase.times)
    peak_gib, flops = peak.peak.total() / GIB, flops_per_token(model, cfg.train.seq_len)
    cluster = Cluster(asked.gpu or device("H100"), asked.gpus_per_node, shape)
    moments = timeline(step.phases, cfg, cluster)
    seconds, tokens = step_seconds(moments), config.tokens_per_step(cfg) / ranks
    uncounted = sum(
        (
            Counter({name: n * phase.times for name, n in phase.uncounted.items()})
            for phase in step.phases
        ),
        Counter(),
    )
    computed = step_seconds(timeline(step.phases, cfg, cluster, waiting=False))
    best = step_seconds(timeline(step.phases, cfg, cluster, waiting=False, best=True))
    kinds, over = (
        dict.fromkeys(COLLECTIVES.values()),
        ("dp_shard", "dp_replicate", "cp", "tp", "replica"),
    )
    row = {
        "parameters": parameter_count(model),
        "world_size": ranks,
        "replicas": dp_replicate,
        "shards": dp_shard * cp,
        "cp": cp,
        "tp": tp,
        "units": len(units(model)),
        **{
            f"{name}_bytes_per_rank": step.held[kind]
            for name, kind in (
                ("parameter", "parameters"),
                ("gradient", "gradients"),
                ("optimizer", "optimizer state"),
            )
        },
        "micro_batch_size": config.micro_batch_size(cfg, dp_replicate * dp_shard),
        "accumulation_steps": config.accumulation_steps(cfg, dp_replicate * dp_shard),
        "tokens_per_step": config.tokens_per_step(cfg),
        "steps_per_epoch": epoch / cfg.train.global_batch_size if epoch else None,
        "flops_per_token": flops,
        "counted_flops_per_token": sum(
            phase.work["model"] * phase.times for phase in step.phases[:-1]
        )
        / tokens,
        "collectives_per_step": {
            kind: tuple(sum(sent[dim, kind, what] for dim in over) for what in ("number", "bytes"))
            for kind in kinds
        },
        "traffic_per_step": {
            dim: {
                "ranks": cluster.within(dim)[0],
                "ranks_in_a_node": cluster.within(dim)[1],
                **{
                    kind: (sent[dim, kind, "number"], sent[dim, kind, "bytes"])
                    for kind in kinds
                    if sent[dim, kind, "number"]
                },
            }
            for dim in over
            if any(sent[dim, kind, "number"] for kind in kinds)
        },
        "peak_gib": peak_gib,
        "peak_at": peak.name,
        "parts_gib": {kind: size / GIB for kind, size in peak.peak.most_common() if size},
        "host_gib": step.held.total() / GIB if cfg.parallel.cpu_offload else 0.0,
        "device_gib": needed,
        "fits": needed <= asked.memory_gib if asked.memory_gib else None,
        "not_counted": [
            "the time of copies to the host, and of the update there",
            "of host memory, what torch rounds pinned parameters and gradients up to: powers of two, each",
        ]
        * cfg.parallel.cpu_offload
        + [f"state of {step.optimizer} that optim.build_optimizer does not make"]
        * (not step.state_is_made)
        + [
            "what masks by data, such as document numbers, save of attention: each sequence is planned as one document"
        ]
        * step.masks_by_data
        + [
            f"the FLOP of {name}: {calls:,} calls a step, the first in {step.first[name]}; the time is too short, and "
            "speed and MFU too high"
            for name, calls in uncounted.items()
        ],
        "operators_not_counted": [
            {"operator": name, "calls": calls, "first_in": step.first[name]}
            for name, calls in uncounted.items()
        ],
    }
    hours = seconds * cfg.train.steps * ranks / 3600
    timed = {
        "step_seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds,
        "best_tokens_per_second_per_device": tokens / best,
        "waiting_seconds": seconds - computed,
        "mfu": tokens / seconds * flops / (cluster.device.peak * 1e12),
        "gpu_hours": hours,
        "kilowatt_hours": hours * cluster.device.watts / 1000,
    }
    return row | (timed if asked.gpu else dict.fromkeys(timed)), moments


def device_gib(step: Step) -> float:
    """GPU memory that a step needs, with the allocator's overhead and CUDA's context."""
    return step.peak().peak.total() / GIB * RESERVED + CONTEXT_GIB
