"""The figures of README and docs, written again or compared.

python -m benchmarks.figures            writes docs/figures/ and the table in README.md, by the plan
python -m benchmarks.figures --check    exits with 1 and names what differs
python -m benchmarks.figures --train    trains configs/tiny.toml on five meshes first: 15 minutes
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import config
from tools.planner.counted import Phase
from tools.planner.devices import Moment, device
from tools.planner.plan import GIB, Asked, planned
from tools.planner.show import COLORS, SHADES, draw, expected_speed
from tools.svg import GRAY, Drawing, ticks

REPO = pathlib.Path(__file__).parent.parent
FIGURES = REPO / "docs/figures"
TABLE = re.compile(r"(?<=<!-- benchmarks.figures: fit -->\n).*?(?=<!-- end -->)", re.S)
# rows, by page
FIT = {
    "README.md": [
        ("llama1b", 8, "H100"),
        ("llama8b", 8, "H100"),
        ("llama3.1-8b-128k", 8, "H100"),
        ("llama70b", 64, "H100"),
        ("llama8b-qlora", 1, "RTX4090"),
        ("llama70b-qlora", 8, "H100"),
    ],
    "docs/finetune.md": [
        ("qwen3-0.6b-chat", 1, "RTX4090"),
        ("qwen3-8b-chat-qlora", 1, "RTX4090"),
        ("llama3.1-8b-chat-lora", 1, "H100"),
    ],
}
MESHES = {
    "1 process": (1, []),
    "2 processes": (2, []),
    "4 processes": (4, []),
    "tp = 2": (2, ["--parallel.tp=2"]),
    "cp = 2": (2, ["--parallel.cp=2"]),
}
LINES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2")


@functools.cache
def plan_of(name: str, ranks: int, *options: str, gpu: str = "H100") -> tuple[dict, list[Moment]]:
    return planned(
        config.load(str(REPO / f"configs/{name}.toml"), list(options)),
        ranks,
        Asked(device(gpu)),
        None,
    )


def step() -> str:
    """Memory, computation and collectives over a step of Llama 3 8B on a node of H100s."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "step.svg"
        draw(
            *plan_of("llama8b", 8, "--train.global_batch_size=8"),
            str(path),
            "Llama 3 8B on 8 x H100, one micro-batch",
            device("H100").memory,
        )
        return path.read_text()


def prefetch() -> str:
    """The beginning of a micro-batch by how many units are prefetched, where an all-gather takes
    nearly as long as a block's computation."""
    page = Drawing(1200, 330)
    left = 100
    scale = 1080 / 16  # units per ms

    def span(begin: float, end: float) -> tuple[float, float]:
        """(x, width) of a time in seconds, cut off at 16 ms."""
        x = left + 1e3 * begin * scale
        return x, left + min(16.0, 1e3 * end) * scale - x

    page.text(
        left,
        24,
        "Llama 3 8B on 64 x H100, 2,048 tokens per GPU: the first 16 ms of a step",
        size=17,
    )
    for i, units in enumerate((0, 1, 2)):
        row, moments = plan_of(
            "llama8b",
            64,
            f"--parallel.prefetch_forward={units}",
            "--train.seq_len=2048",
            f"--parallel.prefetch_backward={units}",
            "--train.global_batch_size=64",
        )
        top = 54 + 86 * i
        page.text(
            left,
            top + 10,
            f"prefetch_forward = {units}" if units else "prefetch_forward = 0: implicit",
            size=12,
        )
        page.text(left - 10, top + 32, "compute", "end", 12)
        page.text(left - 10, top + 58, "all-gathers", "end", 12)
        for moment in moments:
            name = moment.phase.name
            x, width = span(moment.begin, moment.end)
            if width > 0:
                page.box(x, top + 18, width, 20, SHADES["forward"], name, "#fff")
                if "block" in name:
                    page.text(x + width / 2, top + 33, name.split()[-1], "middle", 12, "#fff")
            if "gathers" in moment.sends:
                x, width = span(*moment.sends["gathers"])
                if width > 0:
                    page.box(x, top + 44, width, 20, COLORS["gathered units"], name, GRAY)
        total = 1e3 * row["step_seconds"]
        waiting = 1e3 * row["waiting_seconds"]
        page.text(
            1180, top + 10, f"a step: {total:.0f} ms, of which {waiting:.0f} ms waiting", "end", 12
        )
    for ms in range(0, 17, 2):
        page.text(left + ms * scale, 318, f"{ms} ms", "middle", 12)
    return page.svg()


def context() -> str:
    """What a GPU's memory holds as GPUs are added, and as the sequence is sharded."""
    bars = [  # (name, ranks, cp)
        ("8 GPUs", 8, 1),
        ("16 GPUs", 16, 1),
        ("64 GPUs", 64, 1),
        ("8, cp = 8", 8, 8),
        ("64, cp = 8", 64, 8),
    ]
    page = Drawing(1000, 420)
    left = 70
    floor = 340
    tall = 270  # the highest bar
    limit = device("H100").memory
    peaks = [peak_of_long_sequences(ranks, cp) for _, ranks, cp in bars]
    most = max(row["device_gib"] for row, _ in peaks)
    page.text(
        left,
        24,
        "Llama 3 8B, sequences of 32,768 tokens, one per micro-batch: memory that a GPU needs",
        size=17,
    )
    for gib in ticks(0, most):
        page.path(f"M{left} {floor - gib / most * tall:.1f}h900", dashes="1 5")
        page.text(left - 8, floor - gib / most * tall + 4, f"{gib:g}", "end")
    page.path(f"M{left} {floor - limit / most * tall:.1f}h900", dashes="8 4")
    page.text(
        left + 900, floor - limit / most * tall - 6, f"an H100's memory: {limit:g} GiB", "end"
    )
    page.text(left - 8, 50, "GiB", "end")
    for i, ((name, _, _), (row, phase)) in enumerate(zip(bars, peaks)):
        x = left + 40 + 178 * i
        y = float(floor)
        for kind, color in COLORS.items():
            gib = phase.peak[kind] / GIB
            height = gib / most * tall
            y -= height
            page.box(x, y, 100, height, color, f"{name}: {kind} {gib:.1f} GiB")
        height = (row["device_gib"] - row["peak_gib"]) / most * tall
        y -= height
        page.box(x, y, 100, height, GRAY, f"{name}: pools, CUDA's own")
        page.text(x + 50, y - 6, f"{row['device_gib']:.0f}", "middle")
        page.text(x + 50, floor + 20, name, "middle")
    for i, (kind, color) in enumerate((*COLORS.items(), ("pools, CUDA's own", GRAY))):
        page.box(left + 200 * (i % 5), 378 + 20 * (i // 5), 12, 12, color)
        page.text(left + 200 * (i % 5) + 16, 389 + 20 * (i // 5), kind, size=12)
    return page.svg()


def peak_of_long_sequences(ranks: int, cp: int) -> tuple[dict, Phase]:
    """(row, phase of the peak) of Llama 3 8B's plan."""
    row, moments = plan_of(
        "llama8b",
        ranks,
        "--train.seq_len=32768",
        "--train.micro_batch_size=1",
        f"--train.global_batch_size={ranks}",
        f"--parallel.cp={cp}",
    )
    phases = [moment.phase for moment in moments]
    return row, max(phases, key=lambda phase: phase.peak.total())


def mesh() -> str:
    """Sixteen ranks as 2 replicas x 2 shards x cp 2 x tp 2, in the order of parallel/mesh.py."""
    page = Drawing(1000, 330)
    size = 92  # of a rank's square
    page.text(20, 26, "16 ranks: dp_replicate = 2, dp_shard = 2, cp = 2, tp = 2", size=17)
    for rank, (replica, shard, cp, tp) in enumerate(itertools.product(range(2), repeat=4)):
        x, y = 30 + 490 * replica + 230 * shard + size * tp, 76 + size * cp
        data = 2 * replica + shard
        page.box(x, y, size - 8, size - 8, LINES[data], f"rank {rank}")
        page.text(x + 42, y + 34, f"rank {rank}", "middle", 15, "#fff")
        page.text(x + 42, y + 54, f"cp {cp}, tp {tp}", "middle", 11, "#fff")
    for replica, shard in itertools.product(range(2), repeat=2):
        x = 30 + 490 * replica + 230 * shard
        page.text(x, 71, f"data rank {2 * replica + shard}: its own sequences", size=12)
        page.text(x, 278, "upper and lower row (cp): half", size=12)
        page.text(x, 294, "of each sequence; left and right", size=12)
        page.text(x, 310, "(tp): half of each block's matmuls", size=12)
    for replica in range(2):
        x = 30 + 490 * replica
        page.path(f"M{x} 56h414", width=2)
        page.text(
            x + 414, 50, f"replica {replica}: its eight ranks hold all weights once", "end", 12
        )
    return page.svg()


def losses() -> str:
    """The default run's loss on five meshes, as --train found it."""
    rows_of_mesh = json.loads((FIGURES / "losses.json").read_text())  # {name: [[step, loss], ...]}
    page = Drawing(1000, 380)
    left = 70
    floor = 320
    low, high = 2, 9
    last = max(step for rows in rows_of_mesh.values() for step, _ in rows)
    apart = 0.0
    for rows in zip(*rows_of_mesh.values()):  # of one step
        step_losses = [loss for _, loss in rows]
        apart = max(apart, max(step_losses) - min(step_losses))
    page.text(
        left,
        24,
        "configs/tiny.toml on five meshes: mean loss over ten steps, computed in bfloat16",
        size=17,
    )
    page.text(left, 46, f"the largest distance between two of them: {apart:.3f}")
    for loss in range(low, high + 1):
        y = floor - (loss - low) / (high - low) * 250
        page.path(f"M{left} {y:.1f}h900", dashes="1 5")
        page.text(left - 8, y + 4, f"{loss}", "end")
    for at in ticks(0, last):
        page.text(left + at / last * 900, floor + 20, f"{at:g}", "middle")
    page.text(left + 900, floor + 40, "step", "end")
    for i, ((name, rows), color) in enumerate(zip(rows_of_mesh.items(), LINES)):
        # the lines lie on each other: dashed and ever thinner, so that all are seen
        dashes = f"{4 + 2 * i} {12 - i}" if i > 0 else ""
        thick = 5 - 0.9 * i
        points = []
        for step, loss in rows:
            x = left + step / last * 900
            y = floor - (loss - low) / (high - low) * 250
            points.append(f"{x:.1f} {y:.1f}")
        page.path("M" + "L".join(points), color, dashes, thick)
        page.path(f"M{left + 560} {84 + 22 * i}h36", color, dashes, thick)
        page.text(left + 606, 88 + 22 * i, name)
    return page.svg()


def recompute() -> str:
    """What activation checkpointing keeps of a block against what it computes again."""
    page = Drawing(1000, 400)
    left = 90
    floor = 330
    top = 70
    modes = []  # (mode, GiB of activations, FLOP, row)
    for mode in ("none", "elementwise", "selective", "2", "full"):
        row, moments = plan_of(
            "llama8b", 8, f"--parallel.recompute={mode}", "--train.micro_batch_size=1"
        )
        phases = [moment.phase for moment in moments]
        kept = max(phase.peak["activations"] for phase in phases) / GIB
        flop = sum(phase.work["matmuls"] + phase.work["attention"] for phase in phases)
        modes.append((mode, kept, flop, row))
    least = min(flop for _, _, flop, _ in modes)
    most = max(kept for _, kept, _, _ in modes)
    page.text(
        left,
        24,
        "Llama 3 8B on 8 x H100, 8,192 tokens per micro-batch: parallel.recompute",
        size=17,
    )
    for gib in ticks(0, most):
        page.path(f"M{left} {floor - gib / most * (floor - top):.1f}h860", dashes="1 5")
        page.text(left - 8, floor - gib / most * (floor - top) + 4, f"{gib:g}", "end")
    for percent in range(0, 41, 10):
        page.text(left + 20 + percent * 20, floor + 20, f"+{percent} %", "middle")
    page.text(left, 52, "activations at their peak, GiB", size=12)
    page.text(left + 860, floor + 42, "FLOP of a step, against none", "end", 12)
    for (mode, kept, flop, row), color in zip(modes, LINES):
        x = left + 20 + 2000 * (flop / least - 1)
        y = floor - kept / most * (floor - top)
        page.box(x - 6, y - 6, 12, 12, color, mode)
        name = mode if mode.isalpha() else f"{mode} (every second block)"
        fits = "" if row["fits"] else ", does not fit"
        page.text(x + 12, y + 4, f"{name}: {row['peak_gib']:.0f} GiB allocated{fits}")
    return page.svg()


DRAWN: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (step, prefetch, context, mesh, losses, recompute)
}


def fit_table(rows: list[tuple[str, int, str]]) -> str:
    """Will it fit, and how fast is it? A row of Markdown for each configuration, number of GPUs and
    GPU."""
    lines = [
        "| configuration | GPUs | predicted memory needed, GiB | predicted tokens/s per GPU |",
        "|---|---|---|---|",
    ]
    for name, ranks, gpu in rows:
        row, _ = plan_of(name, ranks, gpu=gpu)
        speed = expected_speed(row, config.load(str(REPO / f"configs/{name}.toml")))
        lines.append(
            f"| `{name}` | {ranks} x {gpu} | {row['device_gib']:.1f} of {device(gpu).memory:g} | "
            f"{speed} |"
        )
    return "\n".join(lines) + "\n"


def train() -> None:
    """Writes losses.json: step and mean loss of each row."""
    rows_of_mesh = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (processes, options) in MESHES.items():
            run_name = re.sub("[ =]+", "-", name)
            subprocess.run(
                [
                    REPO / "run_train.sh",
                    "configs/tiny.toml",
                    f"--run.output_dir={folder}",
                    f"--run.name={run_name}",
                    *options,
                ],
                check=True,
                cwd=REPO,
                env={**os.environ, "NPROC": str(processes), "PYTHON": sys.executable},
            )
            rows_of_mesh[name] = []
            metrics = pathlib.Path(folder, run_name, "metrics.jsonl").read_text()
            for row in map(json.loads, metrics.splitlines()):
                if row["kind"] == "train":
                    rows_of_mesh[name].append([row["step"], round(row["loss_mean"], 4)])
    (FIGURES / "losses.json").write_text(json.dumps(rows_of_mesh) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    parser.add_argument("--train", action="store_true", help="first train on five meshes")
    args = parser.parse_args(argv)
    if args.train:
        train()
    wanted = {FIGURES / f"{name}.svg": function() for name, function in DRAWN.items()}
    for name, rows in FIT.items():
        table = fit_table(rows)
        wanted[REPO / name] = TABLE.sub(lambda _, table=table: table, (REPO / name).read_text())
    different = [
        path for path, text in wanted.items() if not path.exists() or path.read_text() != text
    ]
    for path in different:
        print(f"{path.relative_to(REPO)}: {'differs' if args.check else 'written'}")
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
    return int(args.check and bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
