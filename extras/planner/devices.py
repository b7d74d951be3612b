"""Estimates a step's time from the GPU's rates, each phase's work, and how much communication
overlaps with it.

plan.py calls it with the phases that simulate.py has counted: timeline() places them,
step_seconds() adds them up.

A phase's compute time is FLOP / rate for matmuls and attention, plus bytes / bandwidth for
everything else. FSDP2's collectives overlap with it. Those of tensor and context parallelism are
exposed (on the critical path). A collective takes a latency, plus the bytes that a rank sends / the
rate of its links.
"""

import math
import re
from dataclasses import dataclass, fields, replace

import config
from config import ConfigError
from extras.planner.counted import Phase
from metrics import PEAK_TFLOPS

LATENCY = 10e-6  # seconds per collective
HOP = 1e-6  # seconds more per node of its ring
OF_LINK = 0.8  # share of a link's bandwidth that NCCL's rings reach
OF_BANDWIDTH = 0.9  # share that copies reach: 4.3 of 4.8 TB/s on an H200
OF_PEAK = 0.8  # share of the peak that the best shapes reach at least, in short benchmarks

# Lowest and highest measured speed relative to the planned one: three models on one H200, and one of
# them with either recipe of float8 (docs/performance.md)
REACHED = (0.84, 0.95)
REACHED_IN_FLOAT8 = (0.75, 0.86)

GATHERS = ("all_gather",)
REDUCES = ("reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Device:
    """Rates per second. `products` is the rate of 16-bit matmuls of a block's size, sustained for
    minutes. Where no measurement is published it is an estimate, and the first rate to replace
    (--gpu NAME,products=...)."""

    memory: float  # GiB available to a process
    peak: float  # TFLOP, dense bfloat16, by the data sheet
    products: float  # TFLOP
    bandwidth: float  # TB, of device memory
    link: float  # GB sent to the other GPUs of the node
    network: float  # GB sent to other nodes, each GPU's share
    watts: float
    float8: float = 2  # rate of 8-bit matmuls, relative to 16-bit ones; 0: it has none
    workspace: float = 32  # MiB that torch allocates for each handle of cuBLAS


# Memory, peak, bandwidth, link and watts: NVIDIA's data sheets. Products: 720 for H100 and H200,
# whose best shape reaches 788; less at 500 W, as power grows with the clock's cube; for most others
# about 0.8 of the peak. H100-96 is the one in torchtitan's tables: HBM2e, 500 W.
# fmt: off
DEVICES = {
    #                memory  peak                     products bandwidth link network watts float8 workspace
    #                   GiB  TFLOP/s                   TFLOP/s      TB/s GB/s    GB/s             x       MiB
    "A100-40": Device( 39.4, PEAK_TFLOPS["A100"],        250,     1.56, 300,     25,  400,     0,    8.125),
    "A100-80": Device( 79.2, PEAK_TFLOPS["A100"],        250,     2.04, 300,     25,  400,     0,    8.125),
    "H100":    Device( 79.1, PEAK_TFLOPS["H100"],        720,     3.35, 450,     50,  700,     2,       32),
    "H100-96": Device( 94.5, PEAK_TFLOPS["H100"],        640,      2.4, 450,     50,  500,     2,       32),
    "H200":    Device(139.8, PEAK_TFLOPS["H200"],        720,      4.8, 450,     50,  700,     2,       32),
    "B200":    Device(178.4, PEAK_TFLOPS["B200"],       1750,      8.0, 900,     50, 1000,     2,       32),
    "L40S":    Device( 44.4, PEAK_TFLOPS["L40S"],        230,     0.86,  32,     12,  350,     2,    8.125),
    "RTX3090": Device( 23.6, PEAK_TFLOPS["RTX 3090"],     60,     0.94,  16,      3,  350,     0,    8.125),
    "RTX4090": Device( 23.5, PEAK_TFLOPS["RTX 4090"],    140,     1.01,  32,      3,  450,     2,    8.125),
    "RTX5090": Device( 31.4, PEAK_TFLOPS["RTX 5090"],    175,     1.79,  64,      3,  575,     2,       32),
}
# fmt: on
# Rate of attention, forward and backward, relative to that of matmuls (less power slows both):
# cuDNN's TFLOP/s on an H200. Wide: heads of 128 or more.
ATTENTION_OF_WIDE_HEADS = 554 / 720
ATTENTION_OF_NARROW_HEADS = 376 / 720


def device(name: str) -> Device:
    """NAME, or NAME,rate=value,... for other rates. Raises ConfigError."""
    name, *changes = name.split(",")
    by_lower_name = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in by_lower_name:
        raise ConfigError(f"--gpu {name}: unknown; known are {', '.join(DEVICES)}")
    rates = [f.name for f in fields(Device)]
    values = {}
    for change in changes:
        rate, _, value = change.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        # so that times are finite, and none is 0
        if rate not in rates or not 1e-6 <= number <= 1e9:
            raise ConfigError(
                f"--gpu {name},{change}: write rate=value, a number of 1e-6 to 1e9; rates are "
                f"{', '.join(rates)}"
            )
        values[rate] = number
    return replace(by_lower_name[name.lower()], **values)


def known_as(name: str, memory_gib: float) -> str | None:
    """The key in DEVICES for CUDA's name of a device, such as "NVIDIA A100-SXM4-80GB", if any."""
    words = set(re.split("[ -]", name.replace("RTX ", "RTX")))
    # other chips, or a slice, of the same name
    if {"Laptop", "MIG", "NVL"} & words or {"H100", "PCIe"} <= words:
        return None
    same = [key for key in DEVICES if key.split("-")[0] in words]
    return min(same, key=lambda key: abs(DEVICES[key].memory - memory_gib), default=None)


@dataclass(frozen=True)
class Cluster:
    device: Device
    gpus_per_node: int
    shape: tuple[int, int, int, int]  # of the mesh: (dp_replicate, dp_shard, cp, tp)

    def within(self, dimension: str) -> tuple[int, int]:
        """(ranks in a group of this dimension, how many of them share a node).

        If groups straddle nodes, the fewest that do.
        """
        dp_replicate, dp_shard, cp, tp = self.shape
        replica = dp_shard * cp * tp
        # (ranks in a group, distance of neighbors in it)
        groups = {
            "tp": (tp, 1),
            "cp": (cp, tp),
            "dp_shard": (dp_shard * cp, tp),
            "replica": (replica, 1),
            "dp_replicate": (dp_replicate, replica),
        }
        ranks, stride = groups[dimension]
        if math.prod(self.shape) <= self.gpus_per_node:
            return ranks, ranks
        return ranks, max(1, math.gcd(self.gpus_per_node, ranks * stride) // stride)

    def sending(
        self, phase: Phase, dimensions: tuple[str, ...], kinds: tuple[str, ...] = GATHERS + REDUCES
    ) -> float:
        """Seconds of a phase's collectives of these kinds over these dimensions.

        A ring of N ranks sends (N - 1) / N of the larger buffer, an all-reduce twice that. A ring
        over several nodes uses the network links of all its ranks in a node, an all-to-all each
        rank's own.
        """
        seconds = 0.0
        for (dimension, kind, unit), amount in phase.sent.items():
            if dimension not in dimensions or kind not in kinds:
                continue
            ranks, in_a_node = self.within(dimension)
            nodes = math.ceil(ranks / in_a_node)
            if unit == "number":
                seconds += amount * (LATENCY + HOP * nodes)
                continue
            rate = self.device.link
            if nodes > 1:
                links = 1 if kind == "all_to_all" else in_a_node
                rate = min(rate, self.device.network * links)
            rounds = 2 if kind == "all_reduce" else 1
            seconds += amount * rounds * (ranks - 1) / ranks / (rate * OF_LINK * 1e9)
        return seconds

    def computing(self, phase: Phase, wide_heads: bool, best: bool = False) -> float:
        """Seconds of a phase's work. best: at the rates of short benchmarks of the best shapes."""
        d = self.device
        work = phase.work
        matmuls = d.products
        bandwidth = d.bandwidth * OF_BANDWIDTH
        if best:
            matmuls = max(d.products, OF_PEAK * d.peak)
            bandwidth = d.bandwidth
        # a plan with float8 on a GPU without it is refused
        float8 = matmuls * (d.float8 or 1)
        share = ATTENTION_OF_WIDE_HEADS if wide_heads else ATTENTION_OF_NARROW_HEADS
        attention = d.products * share
        computed = (
            work["matmuls"] / matmuls + work["float8"] / float8 + work["attention"] / attention
        )
        return computed / 1e12 + work["moved"] / (bandwidth * 1e12)


@dataclass(frozen=True)
class Moment:
    """When a phase and the FSDP2 collectives that it issues run: seconds from the step's start."""

    phase: Phase
    begin: float
    end: float
    sends: dict[str, tuple[float, float]]  # "gathers" or "reduces": (begin, end)


def timeline(
    phases: list[Phase],
    cfg: config.Config,
    cluster: Cluster,
    waiting: bool = True,
    best: bool = False,
) -> list[Moment]:
    """The phases in order; micro-batches that are alike appear once.

    A phase's all-gather serves the next phase, or the one that explicit prefetch reaches, which
    waits for it. Its gradient reductions start when it ends. FSDP2 runs one collective at a time.
    waiting = False: no phase waits for FSDP2. best: see computing().
    """
    p = cfg.parallel
    wide_heads = cfg.model.width_per_head >= 128
    # when the previous phase ends, and FSDP2's previous collective
    now = 0.0
    free = 0.0
    # when the all-gather ends that a phase waits for, by the phase's index
    gathered: dict[int, float] = {}
    moments = []
    for i, phase in enumerate(phases):
        is_update = phase.name == "update"
        begin = now
        if waiting:
            begin = max(begin, gathered.get(i, 0.0))
        if waiting and is_update:
            begin = max(begin, free)
        exposed = cluster.sending(phase, ("tp", "cp"))
        now = begin + cluster.computing(phase, wide_heads, best) + exposed

        gather_begin = max(free, begin)
        free = gather_begin + cluster.sending(phase, ("dp_shard",), GATHERS)
        sends = {"gathers": (gather_begin, free)}
        is_backward = phase.name.startswith("backward")
        ahead = p.prefetch_backward if is_backward else p.prefetch_forward
        gathered[i + max(1, ahead)] = free

        reducing = cluster.sending(phase, ("dp_shard", "dp_replicate", "replica"), REDUCES)
        if reducing:
            reduce_begin = max(free, now)
            free = reduce_begin + reducing
            sends["reduces"] = (reduce_begin, free)
            if waiting and is_update:
                # it needs the result: the gradients' norm
                now = free
        moments.append(Moment(phase, begin, now, sends))
    return moments


def next_begins(moments: list[Moment]) -> list[float]:
    """When the phase after each begins; of the last, when it ends."""
    return [*(moment.begin for moment in moments[1:]), moments[-1].end]


def step_seconds(moments: list[Moment]) -> float:
    """Seconds of a full step, with each phase as often as it occurs."""
    seconds = 0.0
    for moment, end in zip(moments, next_begins(moments)):
        seconds += (end - moment.begin) * moment.phase.times
    return seconds
