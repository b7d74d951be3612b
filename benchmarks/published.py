"""The plan against runs that others have published, before and after what their programs do otherwise.

    python -m benchmarks.published

Plans of our program with the peers' sizes, at the rates of extras/planner/devices.py; nothing is set to meet a
figure, and docs/published_runs.md names their sources. Prints a table in Markdown.
"""

import pathlib
from dataclasses import dataclass

import config
from extras.planner.devices import ATTENTION, OF_BANDWIDTH, Moment, device
from extras.planner.plan import GIB, RESERVED, Asked, planned
from model.loss import CHUNK

# FlashAttention 2, forward and backward, to products on an H100 of 700 W; both fall with its power
FLASH_2 = 330 / 720
# Bytes of eager F.cross_entropy of float32 copies, a logit: that are there in backward, and that all its kernels move
EAGER_LOSS, EAGER_LOSS_MOVES = 12, 36
FOREACH, FUSED = 80, 28  # bytes a parameter that AdamW moves, by its foreach kernels and fused
CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
# leaves the order to FSDP2
TITAN = ("--parallel.prefetch_forward=0", "--parallel.prefetch_backward=0")
EAGER, FULL = "--parallel.compile=false", "--parallel.recompute=full"
LLAMA_70B = *TITAN, "--train.micro_batch_size=16", "--train.global_batch_size=512"
ADAPTERS = (
    "--lora.rank=8",
    '--lora.targets=["q_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]',
    "--optim.state_dtype=bfloat16",
    "--train.micro_batch_size=2",
    "--train.global_batch_size=2",
)
LLAMA_2 = (
    "--model.vocab_size=32000",
    "--train.seq_len=2048",
    "--train.micro_batch_size=2",
    EAGER,
    "--lora.rank=64",
    "--train.global_batch_size=4",
    "--parallel.cpu_offload=true",
)


@dataclass(frozen=True)
class Run:
    who: str
    name: str  # of the configuration
    options: tuple[str, ...]
    ranks: int
    gpu: str
    gib: float | None
    speed: float | None  # tokens per second and GPU
    # bytes of each that the peer's loss has at once; 0: its loss is chunked
    logit: int = EAGER_LOSS
    flash_2: bool = True


def fsdp(batch: int, ranks: int, *more: str) -> tuple[str, ...]:
    sizes = f"--train.micro_batch_size={batch}", f"--train.global_batch_size={batch * ranks}"
    return *TITAN, *sizes, "--parallel.recompute=selective", *more


RUNS = [
    Run("torchtitan 8B, 8 GPUs, compiled", "llama8b", fsdp(2, 8), 8, "H100-96", 77.0, 6667),
    Run("torchtitan 8B, 128 GPUs, compiled", "llama8b", fsdp(2, 128), 128, "H100-96", 62.0, 6514),
    Run("torchtitan 8B, 8 GPUs", "llama8b", fsdp(2, 8, EAGER), 8, "H100-96", 82.4, 5762),
    Run("torchtitan 8B, 8 GPUs, batch 1", "llama8b", fsdp(1, 8, EAGER), 8, "H100-96", 49.6, 5960),
    Run(
        "torchtitan 8B float8, 8 GPUs, compiled",
        "llama8b-float8",
        fsdp(2, 8),
        8,
        "H100-96",
        76.8,
        8532,
    ),
    Run(
        "Trainy 8B float8, 32 H200, compiled",
        "llama8b-float8",
        fsdp(2, 32),
        32,
        "H200",
        48.0,
        10938,
        logit=4,
    ),
    *(
        Run(
            f"torchtitan 8B float8, cp {cp}, {32768 * cp:,} tokens",
            "llama8b-float8",
            (
                *TITAN,
                FULL,
                f"--train.seq_len={32768 * cp}",
                f"--parallel.cp={cp}",
                f"--train.global_batch_size={8 // cp}",
            ),
            8,
            "H100-96",
            *found,
        )
        for cp, *found in ((1, 83.9, 3890), (2, 84.2, 2540), (4, 84.0, 1071), (8, 84.5, 548))
    ),
    Run("torchtitan 70B float8, 256 GPUs, tp 8", "llama70b", LLAMA_70B, 256, "H100-96", None, 829),
    Run(
        "the same, its memory",
        "llama70b",
        (*LLAMA_70B, FULL, EAGER),
        256,
        "H100-96",
        71.9,
        None,
        flash_2=False,
    ),
    Run(
        "torchtune 8B LoRA, RTX 4090", "llama8b-lora", ADAPTERS, 1, "RTX4090", 16.2, 3083, 0, False
    ),
    Run(
        "torchtune 8B QLoRA, RTX 4090", "llama8b-qlora", ADAPTERS, 1, "RTX4090", 7.4, 2413, 0, False
    ),
    Run(
        "fsdp_qlora 70B, 2 x RTX 3090, offload",
        "llama70b-qlora",
        LLAMA_2,
        2,
        "RTX3090",
        14.9,
        None,
        flash_2=False,
    ),
]


def after_terms(
    run: Run, cfg: config.Config, row: dict, moments: list[Moment]
) -> tuple[float, float, str]:
    """(GiB at the peak, seconds of a step) with what the peer's program does otherwise, and that: GiB, % of time."""
    p, m, gpu, seconds = cfg.parallel, cfg.model, device(run.gpu), row["step_seconds"]
    tokens = row["micro_batch_size"] * cfg.train.seq_len // p.cp
    head, others = (
        max(x.phase.peak.total() / GIB for x in moments if x.phase.name.endswith("head") is at)
        for at in (True, False)
    )
    more, titan = dict.fromkeys("LRDHAEF", 0.0), run.who.startswith(("torchtitan", "the same"))
    if run.logit:  # terms as in docs/published_runs.md, GIB or seconds
        ours = min(tokens, CHUNK["cuda compiled" if p.compile else "cuda"]) * (
            2 if p.compile else 2 + 4
        )
        more["L"] = (tokens * run.logit - ours) * m.vocab_size / p.tp / GIB
    embedding = m.vocab_size * m.dim
    if titan:
        block = (row["parameters"] - 2 * embedding) / m.n_layers
        more["R"] = 2 * (embedding + block) / p.tp / GIB
        moved = tokens * EAGER_LOSS_MOVES * m.vocab_size / p.tp - sum(
            x.phase.work["moved"] for x in moments if x.phase.name.endswith("head")
        )
        moved = (
            moved * row["accumulation_steps"]
            + (FOREACH - FUSED) * row["parameter_bytes_per_rank"] / 4
        )
        more["E"] = moved / (gpu.bandwidth * OF_BANDWIDTH * 1e12)
    more["D"] = (
        2 * m.n_layers * tokens * m.dim / GIB * (p.recompute == "selective" and not p.compile)
    )
    more["H"] = -2 * embedding / GIB * (run.ranks == 1)  # FSDP2 copies a unit even then
    if run.flash_2:
        flop = sum(x.phase.work["attention"] * x.phase.times for x in moments)
        more["A"] = flop / (gpu.products * 1e12) * (1 / FLASH_2 - 1 / ATTENTION[True])
    if p.tp > 1 and run.speed:  # the peer's blocks are in float8, which ours cannot be
        flop = sum(
            x.phase.work["matmuls"] * x.phase.times for x in moments if "block" in x.phase.name
        )
        more["F"] = flop / (gpu.products * 1e12) * (1 / gpu.float8 - 1)
    words = [
        f"{k} {v / seconds:+.0%}" if k in "AEF" else f"{k} {v:+.1f}"
        for k, v in more.items()
        if abs(v) > (seconds / 200 if k in "AEF" else 0)
    ]
    peak = max(head + more["L"] + more["R"] + more["D"] + more["H"], others)
    return peak, seconds + more["A"] + more["E"] + more["F"], " ".join(words)


def main() -> None:
    print(
        "| run | GiB | planned | ratio | with terms | tok/s | planned | ratio | with terms | terms |"
    )
    print("|---" * 10 + "|")
    for run in RUNS:
        cfg, cells = config.load(str(CONFIGS / f"{run.name}.toml"), [*run.options]), []
        row, moments = planned(cfg, run.ranks, Asked(device(run.gpu)), None)
        (peak, seconds, terms), speed = (
            after_terms(run, cfg, row, moments),
            row["tokens_per_second_per_device"],
        )
        for real, found, then, digits in (
            (run.gib, row["peak_gib"] * RESERVED, peak * RESERVED, 1),
            (run.speed, speed, speed * row["step_seconds"] / seconds, 0),
        ):
            words = (
                f"{real} {found:.{digits}f} {found / real:.2f} {then / real:.2f}" if real else ""
            )
            cells += words.split() or [""] * 4
        print(f"| {run.who} | {' | '.join(cells)} | {terms} |", flush=True)


if __name__ == "__main__":
    main()
