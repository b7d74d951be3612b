"""The plan against published runs, with and without terms for what their programs do otherwise.

    python -m benchmarks.published

Plans our program with the peers' sizes, at the rates of tools/planner/devices.py. Nothing is
fitted to a figure. Prints a table in Markdown, that of docs/performance.md.

Sources: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB at 500 W; Llama 3
of 8,192 tokens, batch 2, selective; cp: batch 1, full, so cp = 1 at 32,768 tokens and 8 at 262,144),
its pull request 996 (batch 1) and Trainy's llama3-8b_h200_202506; torchtune's README (batch 2 of
2,048 tokens, compiled); fsdp_qlora's benchmarks_03_2024.md (Llama 2, batch 2 of 2,048).

Assumed: memory is what the allocator reserves. Trainy uses selective activation checkpointing and
compiles its loss (logits and gradient in bfloat16). torchtune uses activation checkpointing, LoRA
rank 8 on all projections except k, and AdamW in bfloat16. fsdp_qlora's LoRA rank is 64.
"""

import pathlib
from dataclasses import dataclass

import config
from model.loss import CHUNK
from tools.planner.counted import Phase
from tools.planner.devices import ATTENTION_OF_WIDE_HEADS, OF_BANDWIDTH, Moment, device
from tools.planner.plan import GIB, Asked, planned

# FlashAttention 2, forward and backward, to products on an H100 of 700 W; both fall with its power
FLASH_2 = 330 / 720
# Bytes per logit of eager F.cross_entropy of float32 copies
EAGER_LOSS = 12  # held in backward: log-probabilities, their gradient, the logits' gradient
EAGER_LOSS_MOVES = 36  # moved by all its kernels
# Bytes per parameter that AdamW moves
FOREACH = 80
FUSED = 28
CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
# leaves the order to FSDP2
TITAN = ("--parallel.prefetch_forward=0", "--parallel.prefetch_backward=0")
EAGER = "--parallel.compile=false"
FULL = "--parallel.recompute=full"
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


def long_sequences(cp: int, gib: float, speed: float) -> Run:
    """torchtitan's runs with context parallelism on eight GPUs."""
    options = (
        *TITAN,
        FULL,
        f"--train.seq_len={32768 * cp}",
        f"--parallel.cp={cp}",
        f"--train.global_batch_size={8 // cp}",
    )
    who = f"torchtitan 8B float8, cp {cp}, {32768 * cp:,} tokens"
    return Run(who, "llama8b-float8", options, 8, "H100-96", gib, speed)


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
    long_sequences(1, 83.9, 3890),
    long_sequences(2, 84.2, 2540),
    long_sequences(4, 84.0, 1071),
    long_sequences(8, 84.5, 548),
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
    """(GiB at the peak, seconds of a step, the terms as text) with what the peer's program does
    otherwise.

    The terms are those of docs/performance.md: of memory in GiB, of time in % of a step.
    """
    phases = [moment.phase for moment in moments]
    gib = memory_terms(run, cfg, row)
    delays = time_terms(run, cfg, row, phases)
    seconds = row["step_seconds"]
    words = [f"{term}{value:+.1f}" for term, value in gib.items() if value]
    for term, delay in delays.items():
        if abs(delay) > seconds / 200:
            words.append(f"{term}{delay / seconds:+.0%}")
    head = max(phase.peak.total() / GIB for phase in phases if is_head(phase))
    elsewhere = max(phase.peak.total() / GIB for phase in phases if not is_head(phase))
    peak = max(head + gib["L"] + gib["R"] + gib["D"] + gib["H"], elsewhere)
    return peak, seconds + delays["A"] + delays["E"] + delays["F"], " ".join(words)


def is_head(phase: Phase) -> bool:
    return phase.name.endswith("head")


def is_titan(run: Run) -> bool:
    return run.who.startswith(("torchtitan", "the same"))


def micro_batch_tokens(cfg: config.Config, row: dict) -> int:
    """Tokens of a micro-batch on one rank."""
    return row["micro_batch_size"] * cfg.train.seq_len // cfg.parallel.cp


def memory_terms(run: Run, cfg: config.Config, row: dict) -> dict[str, float]:
    """GiB by term."""
    p = cfg.parallel
    m = cfg.model
    tokens = micro_batch_tokens(cfg, row)
    embedding = m.vocab_size * m.dim
    gib = dict.fromkeys("LRDH", 0.0)
    if run.logit:
        if p.compile:
            ours = min(tokens, CHUNK["cuda compiled"]) * 2
        else:
            ours = min(tokens, CHUNK["cuda"]) * (2 + 4 * 4)
        gib["L"] = (tokens * run.logit - ours) * m.vocab_size / p.tp / GIB
    if is_titan(run):
        block = (row["parameters"] - 2 * embedding) / m.n_layers
        gib["R"] = 2 * (embedding + block) / p.tp / GIB
    if p.recompute == "selective" and not p.compile:
        gib["D"] = 2 * m.n_layers * tokens * m.dim / GIB
    if run.ranks == 1:  # FSDP2 copies a unit even then
        gib["H"] = -2 * embedding / GIB
    return gib


def time_terms(run: Run, cfg: config.Config, row: dict, phases: list[Phase]) -> dict[str, float]:
    """Seconds by term."""
    gpu = device(run.gpu)
    tp = cfg.parallel.tp
    seconds = dict.fromkeys("AEF", 0.0)
    if is_titan(run):
        loss_bytes = micro_batch_tokens(cfg, row) * EAGER_LOSS_MOVES * cfg.model.vocab_size / tp
        loss_bytes -= sum(phase.work["moved"] for phase in phases if is_head(phase))
        update_bytes = (FOREACH - FUSED) * row["parameter_bytes_per_rank"] / 4
        moved = loss_bytes * row["accumulation_steps"] + update_bytes
        seconds["E"] = moved / (gpu.bandwidth * OF_BANDWIDTH * 1e12)
    if run.flash_2:
        flop = sum(phase.work["attention"] * phase.times for phase in phases)
        seconds["A"] = flop / (gpu.products * 1e12) * (1 / FLASH_2 - 1 / ATTENTION_OF_WIDE_HEADS)
    if tp > 1 and run.speed:  # the peer's blocks are in float8, which ours cannot be
        blocks = [phase for phase in phases if "block" in phase.name]
        flop = sum(phase.work["matmuls"] * phase.times for phase in blocks)
        seconds["F"] = flop / (gpu.products * 1e12) * (1 / gpu.float8 - 1)
    return seconds


def cells(published: float | None, plan: float, with_terms: float, digits: int) -> list[str]:
    """The published figure, the plan's, and the ratios of the plan to it without and with terms."""
    if not published:
        return [""] * 4
    return [
        str(published),
        f"{plan:.{digits}f}",
        f"{plan / published:.2f}",
        f"{with_terms / published:.2f}",
    ]


def main() -> None:
    print(
        "| run | GiB | planned | ratio | with terms | tok/s | planned | ratio | with terms | terms |"
    )
    print("|" + "|".join(["---"] * 10) + "|")
    for run in RUNS:
        cfg = config.load(str(CONFIGS / f"{run.name}.toml"), [*run.options])
        row, moments = planned(cfg, run.ranks, Asked(device(run.gpu)), None)
        peak, seconds, terms = after_terms(run, cfg, row, moments)
        speed = row["tokens_per_second_per_device"]
        reserved = row["reserved_gib"]
        line = [
            run.who,
            *cells(run.gib, reserved, reserved + peak - row["peak_gib"], digits=1),
            *cells(run.speed, speed, speed * row["step_seconds"] / seconds, digits=0),
            terms,
        ]
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
