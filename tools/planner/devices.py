"""Estimates a step's time from the GPU's rates, each phase's work, and how much communication
overlaps with it.

plan.py passes the phases that simulate.py has counted. timeline() computes when they run, and
step_seconds() adds them up.

A phase's compute time is FLOP / rate for matmuls and attention, plus bytes / bandwidth for
everything else, on the slowest rank. FSDP2's collectives overlap with it, and occupy some of the
GPU's multiprocessors. Collectives of tensor and context parallelism are exposed (on the critical
path). A collective takes NCCL's latency for its ring, plus the bytes that a rank sends / the rate
of its links.
"""

import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import config
from config import ConfigError
from metrics import PEAK_TFLOPS
from tools.planner.counted import Phase

# Collectives slow down the computation that they overlap with. NCCL shares no multiprocessor with
# other kernels (github.com/NVIDIA/nccl/issues/689). It needs 16 of an H100's 132 to fill the links
# (issue 1453).
OF_MULTIPROCESSORS = 16 / 132
LINK_FILLED_BY_THEM = 450  # GB/s
# Relative standard deviation of the speed of GPUs of one kind. In the clusters of five centers,
# speeds vary by 8 % on average (arXiv 2208.11035). This is taken as the range without outliers,
# which spans 5.4 standard deviations.
SPREAD = 0.08 / 5.4
OF_LINK = 0.8  # share of a link's bandwidth that NCCL's rings reach
OF_BANDWIDTH = 0.9  # share of memory bandwidth that copies reach: 4.3 of 4.8 TB/s on an H200

# Lowest and highest measured speed, relative to the planned speed: of three models on one H200, and
# of one of them with both float8 recipes (docs/performance.md)
REACHED = (0.83, 0.94)
REACHED_IN_FLOAT8 = (0.74, 0.86)
# Lowest speed if ranks communicate, which this repository has not measured. Published compiled runs
# of 8B on 8 to 128 GPUs reached 0.71 to 0.75 (docs/performance.md).
REACHED_BY_SEVERAL = 0.70


class Protocol(NamedTuple):
    """A protocol of NCCL. Latencies are in seconds."""

    of_bandwidth: float
    base: float
    step: float  # to a rank on the same node
    network_step: float


# NCCL's own cost model for rings, by which it selects a protocol (src/graph/tuning.cc, 2.27)
PROTOCOLS = (
    Protocol(1 / 2, 6.6e-6, 0.6e-6, 2.7e-6),  # LL
    Protocol(120 / 128, 14e-6, 1.9e-6, 4e-6),  # LL128
    Protocol(1, 8.4e-6, 3.4e-6, 14e-6),  # Simple
)
GATHERS = ("all_gather",)
REDUCES = ("reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Device:
    """A GPU's memory, and its rates per second.

    `products` is the rate of 16-bit matmuls of a block's size, sustained for minutes. It is an
    estimate where no measurement is published: replace it by your own.
    """

    memory: float  # GiB available to a process
    peak: float  # TFLOP, dense bfloat16, from the data sheet
    products: float  # TFLOP
    bandwidth: float  # TB, of device memory
    link: float  # GB sent to the other GPUs of the node
    network: float  # GB sent to other nodes, per GPU
    float8: float = 2  # rate of 8-bit matmuls, relative to 16-bit ones; 0 if unsupported
    workspace: float = 32  # MiB that torch allocates for each handle of cuBLAS


# Memory, peak, bandwidth and link are from NVIDIA's data sheets. The rate of matmuls is 720 for
# H100 and H200, whose best shape reaches 788. It is lower at 500 W, since power grows with the cube
# of the clock. For most others it is about 0.8 of the peak. H100-96 is the GPU in torchtitan's
# tables, with HBM2e and 500 W.
# fmt: off
DEVICES = {
    #                memory  peak                     products bandwidth link network float8 workspace
    #                   GiB  TFLOP/s                   TFLOP/s      TB/s GB/s    GB/s      x       MiB
    "A100-40": Device( 39.4, PEAK_TFLOPS["A100"],        250,     1.56, 300,     25,     0,    8.125),
    "A100-80": Device( 79.2, PEAK_TFLOPS["A100"],        250,     2.04, 300,     25,     0,    8.125),
    "H100":    Device( 79.1, PEAK_TFLOPS["H100"],        720,     3.35, 450,     50,     2,       32),
    "H100-96": Device( 94.5, PEAK_TFLOPS["H100"],        640,      2.4, 450,     50,     2,       32),
    "H200":    Device(139.8, PEAK_TFLOPS["H200"],        720,      4.8, 450,     50,     2,       32),
    "B200":    Device(178.4, PEAK_TFLOPS["B200"],       1750,      8.0, 900,     50,     2,       32),
    "L40S":    Device( 44.4, PEAK_TFLOPS["L40S"],        230,     0.86,  32,     12,     2,    8.125),
    "RTX3090": Device( 23.6, PEAK_TFLOPS["RTX 3090"],     60,     0.94,  16,      3,     0,    8.125),
    "RTX4090": Device( 23.5, PEAK_TFLOPS["RTX 4090"],    140,     1.01,  32,      3,     2,    8.125),
    "RTX5090": Device( 31.4, PEAK_TFLOPS["RTX 5090"],    175,     1.79,  64,      3,     2,       32),
}
# fmt: on
# Rate of attention, forward and backward, relative to the rate of matmuls, since lower power slows
# both. From cuDNN's TFLOP/s on an H200. Wide heads have a width of 128 or more.
ATTENTION_OF_WIDE_HEADS = 554 / 720
ATTENTION_OF_NARROW_HEADS = 376 / 720


def device(name: str) -> Device:
    """Looks up a device in DEVICES. Raises ConfigError."""
    by_lower_name = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in by_lower_name:
        raise ConfigError(f"--gpu {name}: unknown; known are {', '.join(DEVICES)}")
    return by_lower_name[name.lower()]


def known_as(name: str, memory_gib: float) -> str | None:
    """The key in DEVICES for CUDA's name of a device, such as "NVIDIA A100-SXM4-80GB", or None."""
    words = set(re.split("[ -]", name.replace("RTX ", "RTX")))
    # these have the same name, but are other chips, or a slice of a chip
    if {"Laptop", "MIG", "NVL"} & words or {"H100", "PCIe"} <= words:
        return None
    same = [key for key in DEVICES if key.split("-")[0] in words]
    return min(same, key=lambda key: abs(DEVICES[key].memory - memory_gib), default=None)


def reached(cfg: config.Config, ranks: int) -> tuple[float, float]:
    """Returns (lowest, highest) share of its planned speed that a run is expected to reach."""
    low, high = REACHED if cfg.parallel.float8 == "none" else REACHED_IN_FLOAT8
    return (REACHED_BY_SEVERAL if ranks > 1 else low), high


@dataclass(frozen=True)
class Cluster:
    device: Device
    gpus_per_node: int
    shape: tuple[int, int, int, int]  # the mesh's: (dp_replicate, dp_shard, cp, tp)

    def within(self, dimension: str) -> tuple[int, int]:
        """Returns (ranks in a group of this dimension, how many of them share a node).

        If groups straddle nodes, the second is the smallest number in any node.
        """
        dp_replicate, dp_shard, cp, tp = self.shape
        replica = dp_shard * cp * tp
        # (ranks in a group, distance between neighbors in the group)
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

        A ring of N ranks sends (N - 1) / N of the larger buffer; an all-reduce sends twice that. A
        ring over several nodes uses the network links of all its ranks in a node. An all-to-all
        uses only each rank's own link.
        """
        seconds = 0.0
        for dimension in dimensions:
            ranks, in_a_node = self.within(dimension)
            nodes = math.ceil(ranks / in_a_node)
            for kind in kinds:
                number = phase.sent[dimension, kind, "number"]
                size = phase.sent[dimension, kind, "bytes"]
                rate = self.device.link
                if nodes > 1:
                    links = 1 if kind == "all_to_all" else in_a_node
                    rate = min(rate, self.device.network * links)
                rounds = 2 if kind == "all_reduce" else 1
                sending = size * rounds * (ranks - 1) / ranks / (rate * OF_LINK * 1e9)
                seconds += min(
                    number * latency(protocol, kind, ranks, nodes) + sending / protocol.of_bandwidth
                    for protocol in PROTOCOLS
                )
        return seconds

    def slowest(self) -> float:
        """The expected time of the slowest rank, relative to the mean. Collectives wait for it."""
        ranks = math.prod(self.shape)
        # expected maximum of normally distributed numbers, by Blom's approximation
        return 1 + SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def taken_by_nccl(self) -> float:
        """The share of the multiprocessors that a collective of FSDP2 occupies."""
        return OF_MULTIPROCESSORS * min(1.0, self.device.link / LINK_FILLED_BY_THEM)

    def computing(self, phase: Phase, wide_heads: bool) -> float:
        """Seconds of a phase's work."""
        d = self.device
        share = ATTENTION_OF_WIDE_HEADS if wide_heads else ATTENTION_OF_NARROW_HEADS
        rates = {
            "matmuls": d.products,
            "float8": d.products * (d.float8 or 1),  # without float8, no plan uses it
            "attention": d.products * share,
            "moved": d.bandwidth * OF_BANDWIDTH,
        }
        return sum(phase.work[kind] / (rate * 1e12) for kind, rate in rates.items())


def latency(protocol: Protocol, kind: str, ranks: int, nodes: int) -> float:
    """Seconds of a collective without its bytes: one step per rank in a ring, and down and up in an
    all-reduce's tree."""
    if kind == "all_to_all":
        return protocol.base
    if kind == "all_reduce":
        steps = 2 * (math.ceil(ranks / nodes) - 1)
        network_steps = 2 * math.log2(nodes)
    else:
        steps = ranks - nodes
        network_steps = nodes - 1
    return protocol.base + steps * protocol.step + network_steps * protocol.network_step


@dataclass(frozen=True)
class Moment:
    """When a phase, and the FSDP2 collectives that it issues, run, in seconds from the step's
    start."""

    phase: Phase
    begin: float
    end: float
    sends: dict[str, tuple[float, float]]  # "gathers" or "reduces": (begin, end)


def timeline(
    phases: list[Phase],
    cfg: config.Config,
    cluster: Cluster,
    waiting: bool = True,
) -> list[Moment]:
    """The phases in order; identical micro-batches appear once.

    A phase waits for the all-gathers whose output FSDP2 copies during the phase. All-gathers that
    it issues itself begin while the previous phase runs, because the host is ahead. Gradient
    reductions start when a phase ends, but not before the previous reduce-scatter has ended,
    because FSDP2 keeps one input buffer. FSDP2 runs one collective at a time. waiting=False: no
    phase waits for FSDP2.
    """
    wide_heads = cfg.model.width_per_head >= 128
    slowest = cluster.slowest()
    taken = cluster.taken_by_nccl()
    # the ends of: the previous phase, FSDP2's previous collective, the previous reduction, and the
    # reduce-scatter in it
    now = 0.0
    free = 0.0
    reduced = 0.0
    scattered = 0.0
    # for each phase, when the all-gathers that it issues end
    gathered: list[float] = []
    # (begin, end) of each FSDP2 collective
    sent: list[tuple[float, float]] = []
    moments: list[Moment] = []
    for i, phase in enumerate(phases):
        begin = now
        if waiting:
            begin = max([begin, *(gathered[i - n] for n in phase.gathered_before if n)])
        is_for_itself = 0 in phase.gathered_before
        issued = moments[-1].begin if is_for_itself and moments else begin
        gather_begin = max(free, issued)
        free = gather_begin + cluster.sending(phase, ("dp_shard",), GATHERS)
        gathered.append(free)
        sent.append((gather_begin, free))
        sends = {"gathers": sent[-1]}
        if waiting and is_for_itself:
            begin = max(begin, free)

        end = begin + slowest * cluster.computing(phase, wide_heads)
        end += taken * overlap(begin, end, sent)
        end += cluster.sending(phase, ("tp", "cp"))
        now = end
        scattering = cluster.sending(phase, ("dp_shard",), REDUCES)
        reducing = scattering + cluster.sending(phase, ("dp_replicate", "replica"), REDUCES)
        if reducing:
            if waiting:
                now = max(now, scattered)
            reduce_begin = max(free, now)
            scattered = reduce_begin + scattering
            free = reduce_begin + reducing
            reduced = free
            sent.append((reduce_begin, free))
            sends["reduces"] = sent[-1]
            if waiting and phase.name == "update":
                # the update needs the result, the gradients' norm
                end = free
        now = max(now, end)
        if waiting and phase.ends_reduced:
            now = max(now, reduced)
        moments.append(Moment(phase, begin, end, sends))
    return moments


def overlap(begin: float, end: float, intervals: list[tuple[float, float]]) -> float:
    """The seconds from begin to end that lie in one of the intervals, which are in order and
    disjoint."""
    seconds = 0.0
    for first, last in reversed(intervals):
        if last <= begin:
            break
        seconds += max(0.0, min(end, last) - max(begin, first))
    return seconds


def next_begins(moments: list[Moment]) -> list[float]:
    """For each phase, when the next one begins; for the last, when it ends."""
    return [*(moment.begin for moment in moments[1:]), moments[-1].end]


def step_seconds(moments: list[Moment]) -> float:
    """The seconds of a full step. Counts each phase as often as it occurs."""
    seconds = 0.0
    for moment, end in zip(moments, next_begins(moments)):
        seconds += (end - moment.begin) * moment.phase.times
    return seconds
