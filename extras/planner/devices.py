"""Estimates a step's time from the GPU's rates, each phase's work, and how much communication overlaps with it.

A phase's compute time is FLOP / rate for matrix products and attention, plus bytes / bandwidth for everything else.
FSDP2's collectives overlap with it. Those of tensor and context parallelism are exposed (on the critical path).
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, fields, replace

import config
from config import ConfigError
from extras.planner.counted import Phase
from metrics import PEAK_TFLOPS

LATENCY = 10e-6  # seconds per collective
HOP = 1e-6  # seconds more per node of its ring
OF_LINK = 0.8  # share of a link's bandwidth that NCCL's rings reach
OF_BANDWIDTH = 0.9  # share that copies reach: 4.3 of 4.8 TB/s on an H200


@dataclass(frozen=True)
class Device:
    """Rates per second. `products` is the rate of 16-bit matrices of a block's size, sustained for minutes. Where no
    measurement is published it is an estimate, and the first rate to replace (--gpu NAME,products=...)."""

    memory: float  # GiB available to a process
    peak: float  # TFLOP, dense bfloat16, by the data sheet
    products: float  # TFLOP
    bandwidth: float  # TB, of device memory
    link: float  # GB sent to the other GPUs of the node
    network: float  # GB sent to other nodes, each GPU's share
    watts: float
    float8: float = 2  # rate of 8-bit products, relative to 16-bit ones; 0: it has none


# Memory, peak, bandwidth, link and watts: NVIDIA's data sheets. Products: 720 for H100 and H200, whose best shape
# reaches 788; less at 500 W, as power grows with the clock's cube; for most others about 0.8 of the peak.
DEVICES = {
    "A100-40": Device(39.4, PEAK_TFLOPS["A100"], 250, 1.56, 300, 25, 400, 0),
    "A100-80": Device(79.2, PEAK_TFLOPS["A100"], 250, 2.04, 300, 25, 400, 0),
    "H100": Device(79.1, PEAK_TFLOPS["H100"], 720, 3.35, 450, 50, 700),
    "H100-96": Device(
        94.5, PEAK_TFLOPS["H100"], 640, 2.4, 450, 50, 500
    ),  # HBM2e, 500 W: the one in torchtitan's tables
    "H200": Device(139.8, PEAK_TFLOPS["H200"], 720, 4.8, 450, 50, 700),
    "B200": Device(178.4, PEAK_TFLOPS["B200"], 1750, 8.0, 900, 50, 1000),
    "L40S": Device(44.4, PEAK_TFLOPS["L40S"], 230, 0.86, 32, 12, 350),
    "RTX3090": Device(23.6, PEAK_TFLOPS["RTX 3090"], 60, 0.94, 16, 3, 350, 0),
    "RTX4090": Device(23.5, PEAK_TFLOPS["RTX 4090"], 140, 1.01, 32, 3, 450),
    "RTX5090": Device(31.4, PEAK_TFLOPS["RTX 5090"], 175, 1.79, 64, 3, 575),
}
# Rate of attention, forward and backward, relative to that of products (less power slows both): cuDNN's TFLOP/s on an
# H200. True: heads are at least 128 wide.
ATTENTION = {True: 554 / 720, False: 376 / 720}


def device(name: str) -> Device:
    """NAME, or NAME,rate=value,... for other rates. Raises ConfigError."""
    name, *changes = name.split(",")
    found = {key.lower(): device for key, device in DEVICES.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu {name}: unknown; known are {', '.join(DEVICES)}")
    rates = [f.name for f in fields(Device)]
    for change in changes:
        rate, _, value = change.partition("=")
        try:
            if rate not in rates or not 1e-6 <= float(value) <= 1e9:
                # times are finite, and none is 0
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--gpu {name},{change}: write rate=value, a number of 1e-6 to 1e9; rates are "
                f"{', '.join(rates)}"
            ) from None
        found = replace(found, **{rate: float(value)})
    return found


def known_as(name: str, memory_gib: float) -> str | None:
    """The key in DEVICES for a device name of CUDA, such as "NVIDIA A100-SXM4-80GB"; None if there is none."""
    words = {*re.split("[ -]", name.replace("RTX ", "RTX"))}
    if {"Laptop", "MIG", "NVL"} & words or {
        "H100",
        "PCIe",
    } <= words:  # other chips, or a slice, of the same name
        return None
    same = [key for key in DEVICES if key.split("-")[0] in words]
    return min(same, key=lambda key: abs(DEVICES[key].memory - memory_gib), default=None)


@dataclass(frozen=True)
class Cluster:
    device: Device
    gpus_per_node: int
    shape: tuple[int, int, int, int]  # of the mesh

    def within(self, dimension: str) -> tuple[int, int]:
        """(ranks in a group of this dimension, how many of them share a node; the fewest, if groups straddle nodes)."""
        dp_replicate, dp_shard, cp, tp = self.shape
        replica = dp_shard * cp * tp
        ranks, stride = {
            "tp": (tp, 1),
            "cp": (cp, tp),
            "dp_shard": (dp_shard * cp, tp),
            "replica": (replica, 1),
            "dp_replicate": (dp_replicate, replica),
        }[dimension]
        if math.prod(self.shape) <= self.gpus_per_node:
            return ranks, ranks
        return ranks, max(1, math.gcd(self.gpus_per_node, ranks * stride) // stride)

    def sending(self, phase: Phase, dimensions: tuple[str, ...]) -> float:
        """Seconds of a phase's collectives over these dimensions. A ring over several nodes uses the network links of
        all its ranks in a node, an all-to-all each rank's own."""
        seconds = 0.0
        for (dimension, kind, what), sent in phase.sent.items():
            if dimension in dimensions:
                ranks, here = self.within(dimension)
                nodes = math.ceil(ranks / here)
                network = self.device.network * (1 if kind == "all_to_all" else here)
                rate = self.device.link if nodes == 1 else min(self.device.link, network)
                if what == "number":
                    seconds += sent * (LATENCY + HOP * nodes)
                else:
                    seconds += (
                        sent
                        * (2 if kind == "all_reduce" else 1)
                        * (ranks - 1)
                        / ranks
                        / (rate * OF_LINK * 1e9)
                    )
        return seconds

    def computing(self, phase: Phase, wide_heads: bool, best: bool = False) -> float:
        """Seconds of a phase's work. best: at rates that short benchmarks of the best shapes reach."""
        d, work = self.device, phase.work
        products = max(d.products, 0.8 * d.peak) if best else d.products
        return (
            work["products"] / products
            + work["float8"] / (products * (d.float8 or 1))
            + work["attention"] / (d.products * ATTENTION[wide_heads])
        ) / 1e12 + work["moved"] / (d.bandwidth * (1 if best else OF_BANDWIDTH) * 1e12)


@dataclass(frozen=True)
class Moment:
    """When a phase and the FSDP2 collectives that it issues run, in seconds from the step's start."""

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
    """The phases in order; micro-batches that are alike appear once. A phase's all-gather serves the next phase, or
    the one that explicit prefetch reaches, which waits for it. Its gradient reductions start when it ends. FSDP2 runs
    one collective at a time. waiting = False: no phase waits for FSDP2. best: see computing()."""
    p, wide = cfg.parallel, cfg.model.width_per_head >= 128
    now = free = 0.0
    ready: dict[int, float] = {}
    found = []
    for i, phase in enumerate(phases):
        update = phase.name == "update"
        begin = max(now, ready.get(i, 0), free if update else 0) if waiting else now
        now = begin + cluster.computing(phase, wide, best) + cluster.sending(phase, ("tp", "cp"))
        gathers = replace(
            phase, sent=Counter({k: v for k, v in phase.sent.items() if k[1] == "all_gather"})
        )
        reduces = replace(
            phase, sent=Counter({k: v for k, v in phase.sent.items() if k[1] != "all_gather"})
        )
        sends = {
            "gathers": (
                max(free, begin),
                max(free, begin) + cluster.sending(gathers, ("dp_shard",)),
            )
        }
        free = sends["gathers"][1]
        ahead = p.prefetch_backward if phase.name.startswith("backward") else p.prefetch_forward
        ready[i + max(1, ahead)] = free
        if seconds := cluster.sending(reduces, ("dp_shard", "dp_replicate", "replica")):
            sends["reduces"] = max(free, now), max(free, now) + seconds
            free = sends["reduces"][1]
            now = free if update and waiting else now  # waits for what it sends
        found.append(Moment(phase, begin, now, sends))
    return found


def step_seconds(moments: list[Moment]) -> float:
    """Seconds of a full step, with each phase as often as it occurs."""
    return sum(
        (b.begin if b else a.end) * a.phase.times - a.begin * a.phase.times
        for a, b in zip(moments, [*moments[1:], None])
    )
