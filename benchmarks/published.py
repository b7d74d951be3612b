"""The plan against runs that others have published, before and after what their programs do otherwise.

    python -m benchmarks.published

Each row is a plan of our program with the peer's sizes, at the rates of parallel/devices.py; nothing is set to meet a
figure. Prints a table in Markdown. docs/plan.md says where the figures are from.
"""

from dataclasses import dataclass

import config
from model.loss import CHUNK
from parallel.devices import ATTENTION, Moment, device
from parallel.plan import GIB, RESERVED, Asked, planned

FLASH_2 = 330e12  # FLOP/s of FlashAttention 2 on an H100, forward and backward
TITAN = ("--parallel.prefetch_forward=0", "--parallel.prefetch_backward=0")  # leaves the order to FSDP2
EAGER, FULL = "--parallel.compile=false", "--parallel.recompute=full"
LLAMA_70B = *TITAN, "--train.micro_batch_size=16", "--train.global_batch_size=512"
ADAPTERS = ("--lora.rank=8", '--lora.targets=["q_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]',
            "--optim.state_dtype=bfloat16", "--train.micro_batch_size=2", "--train.global_batch_size=2")
LLAMA_2 = ("--model.vocab_size=32000", "--train.seq_len=2048", "--train.micro_batch_size=2", EAGER, "--lora.rank=64",
           "--train.global_batch_size=4", "--parallel.cpu_offload=true")


@dataclass(frozen=True)
class Run:
    who: str
    name: str  # of the configuration
    options: tuple[str, ...]
    ranks: int
    gpu: str
    gib: float | None
    speed: float | None  # tokens per second and GPU
    logit: int = 10  # bytes of each that the peer's loss has: bfloat16, float32, gradient; 0: its loss is chunked
    flash_2: bool = True
    float8: bool = False  # the peer's blocks are in float8, which ours cannot be


def fsdp(batch: int, ranks: int, *more: str) -> tuple[str, ...]:
    return (*TITAN, f"--train.micro_batch_size={batch}", f"--train.global_batch_size={batch * ranks}",
            "--parallel.recompute=selective", *more)


def long(cp: int, gib: float, speed: float) -> Run:
    sizes = f"--train.seq_len={32768 * cp}", f"--parallel.cp={cp}", f"--train.global_batch_size={8 // cp}"
    return Run(f"torchtitan 8B float8, FSDP {8 // cp} x CP {cp}, {32768 * cp:,} tokens", "llama8b-float8",
               (*TITAN, *sizes, FULL), 8, "H100-96", gib, speed)


RUNS = [
    Run("torchtitan 8B, 8 GPUs, compiled", "llama8b", fsdp(2, 8), 8, "H100-96", 77.0, 6667),
    Run("torchtitan 8B, 128 GPUs, compiled", "llama8b", fsdp(2, 128), 128, "H100-96", 62.0, 6514),
    Run("torchtitan 8B, 8 GPUs", "llama8b", fsdp(2, 8, EAGER), 8, "H100-96", 82.4, 5762),
    Run("torchtitan 8B, 8 GPUs, batch 1", "llama8b", fsdp(1, 8, EAGER), 8, "H100-96", 49.6, 5960),
    Run("torchtitan 8B float8, 8 GPUs, compiled", "llama8b-float8", fsdp(2, 8), 8, "H100-96", 76.8, 8532),
    Run("Trainy 8B float8, 32 H200, compiled", "llama8b-float8", fsdp(2, 32), 32, "H200", 48.0, 10938, logit=4),
    long(1, 83.9, 3890), long(2, 84.2, 2540), long(4, 84.0, 1071), long(8, 84.5, 548),
    Run("torchtitan 70B float8, FSDP 32 x TP 8", "llama70b", LLAMA_70B, 256, "H100-96", None, 829, float8=True),
    Run("the same, its memory", "llama70b", (*LLAMA_70B, FULL, EAGER), 256, "H100-96", 71.9, None, flash_2=False),
    Run("torchtune 8B LoRA, RTX 4090", "llama8b-lora", ADAPTERS, 1, "RTX4090", 16.2, 3083, 0, False),
    Run("torchtune 8B QLoRA, RTX 4090", "llama8b-qlora", ADAPTERS, 1, "RTX4090", 7.4, 2413, 0, False),
    Run("fsdp_qlora 70B, 2 x RTX 3090, offload", "llama70b-qlora", LLAMA_2, 2, "RTX3090", 14.9, None, flash_2=False),
]


def after_terms(run: Run, cfg: config.Config, row: dict, moments: list[Moment]) -> tuple[float, float, str]:
    """(GiB at the peak, seconds of a step) with what the peer's program does otherwise, and the terms."""
    p, gpu, seconds = cfg.parallel, device(run.gpu), row["step_seconds"]
    tokens = row["micro_batch_size"] * cfg.train.seq_len // p.cp
    head, others = (max(m.phase.peak.total() for m in moments if m.phase.name.endswith("head") is at) / GIB
                    for at in (True, False))
    more = dict.fromkeys(("logits", "down_proj", "head's copy", "attention", "float8"), 0.0)
    if run.logit:
        ours = min(tokens, CHUNK["cuda compiled" if p.compile else "cuda"]) * (2 if p.compile else 2 + 4)
        more["logits"] = (tokens * run.logit - ours) * cfg.model.vocab_size / p.tp / GIB
    if p.recompute == "selective" and not p.compile:
        more["down_proj"] = 2 * cfg.model.n_layers * tokens * cfg.model.dim / GIB
    if run.ranks == 1:  # FSDP2 copies a unit even then
        more["head's copy"] = -2 * cfg.model.vocab_size * cfg.model.dim / GIB
    if run.flash_2:
        flop = sum(m.phase.work["attention"] * m.phase.times for m in moments)
        more["attention"] = flop / FLASH_2 - flop / (ATTENTION[True] * gpu.peak * 1e12)
    if run.float8:
        flop = sum(m.phase.work["products"] * m.phase.times for m in moments if "block" in m.phase.name)
        more["float8"] = flop / (gpu.products * 1e12) * (1 / gpu.float8 - 1)
    gib, time = sum([*more.values()][:3]), sum([*more.values()][3:])
    words = [f"{name} {size / seconds:+.0%} time" if name in ("attention", "float8") else f"{name} {size:+.1f} GiB"
             for name, size in more.items() if size]
    return max(head + gib, others), seconds + time, ", ".join(words)


def main() -> None:
    print("| run | GiB | planned | ratio | with terms | tok/s | planned | ratio | with terms | terms |")
    print("|---" * 10 + "|")
    for run in RUNS:
        cfg, cells = config.load(f"configs/{run.name}.toml", [*run.options]), []
        row, moments = planned(cfg, run.ranks, Asked(device(run.gpu)), None)
        (peak, seconds, terms), speed = after_terms(run, cfg, row, moments), row["tokens_per_second_per_device"]
        for real, found, then, digits in ((run.gib, row["peak_gib"] * RESERVED, peak * RESERVED, 1),
                                          (run.speed, speed, speed * row["step_seconds"] / seconds, 0)):
            words = f"{real} {found:.{digits}f} {found / real:.2f} {then / real:.2f}" if real else ""
            cells += words.split() or [""] * 4
        print(f"| {run.who} | {' | '.join(cells)} | {terms} |", flush=True)


if __name__ == "__main__":
    main()
