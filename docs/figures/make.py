"""The figures of README and docs, written again or compared.

python -m docs.figures.make            writes docs/figures/ and the tables of the pages, by the plan
python -m docs.figures.make --check    exits with 1 and names what differs
python -m docs.figures.make --train    trains configs/tiny.toml on five meshes first: 15 minutes
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

import config
from tools.planner.devices import Moment, device
from tools.planner.plan import GIB, Asked, planned
from tools.planner.show import COLORS, SHADES, draw, expected_speed
from tools.svg import GRAY, Drawing, ticks

REPO = pathlib.Path(__file__).parents[2]
FIGURES = REPO / "docs/figures"
TABLE = re.compile(r"(?<=<!-- docs/figures/make.py: fit -->\n).*?(?=<!-- end -->)", re.S)
# the tables' rows, by page: configuration, GPUs, GPU
FIT = {
    "README.md": """llama1b 8 H100, llama8b 8 H100, llama3.1-8b-128k 8 H100, llama70b 64 H100,
        llama8b-qlora 1 RTX4090, llama70b-qlora 8 H100""",
    "docs/finetune.md": """qwen3-0.6b-chat 1 RTX4090, qwen3-8b-chat-qlora 1 RTX4090,
        llama3.1-8b-chat-lora 1 H100""",
}
COLUMNS = "| configuration | GPUs | predicted memory needed, GiB | predicted tokens/s per GPU |"
MESHES = {"1 process": 1, "2 processes": 2, "4 processes": 4, "tp = 2": 2, "cp = 2": 2}
LINES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2")


@functools.cache
def plan_of(name: str, ranks: int, *options: str, gpu: str = "H100") -> tuple[dict, list[Moment]]:
    cfg = config.load(str(REPO / f"configs/{name}.toml"), list(options))
    return planned(cfg, ranks, Asked(device(gpu)), None)


def scale(page: Drawing, left: int, floor: int, wide: int, per_unit: float, most: float) -> None:
    """Lines across at round numbers from 0 to the most."""
    for number in ticks(0, most):
        y = floor - number * per_unit
        page.path(f"M{left} {y:.1f}h{wide}", dashes="1 5")
        page.text(left - 8, y + 4, f"{number:g}", "end")


def step() -> str:
    """Memory, computation and collectives over a step of Llama 3 8B on a node of H100s."""
    row, moments = plan_of("llama8b", 8, "--train.global_batch_size=8")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "step.svg"
        title = "Llama 3 8B on 8 x H100, one micro-batch"
        draw(row, moments, str(path), title, device("H100").memory)
        return path.read_text()


def prefetch() -> str:
    """The beginning of a micro-batch by how many units are prefetched, where an all-gather takes
    nearly as long as a block's computation."""
    page = Drawing(1200, 330)
    left, ms_wide = 100, 1080 / 16

    def box(begin: float, end: float, y: float, color: str, name: str) -> tuple[float, float]:
        """Of a time in seconds, cut off at 16 ms. Returns (its left side, its width)."""
        x = left + 1e3 * begin * ms_wide
        width = left + min(16.0, 1e3 * end) * ms_wide - x
        if width > 0:
            page.box(x, y, width, 20, color, name, "#fff" if color == SHADES["forward"] else GRAY)
        return x, width

    title = "Llama 3 8B on 64 x H100, 2,048 tokens per GPU: the first 16 ms of a step"
    page.text(left, 24, title, size=17)
    for units in (0, 1, 2):
        units_ahead = [f"--parallel.prefetch_{way}={units}" for way in ("forward", "backward")]
        sizes = ["--train.seq_len=2048", "--train.global_batch_size=64"]
        row, moments = plan_of("llama8b", 64, *units_ahead, *sizes)
        top = 54 + 86 * units
        name = f"prefetch_forward = {units}" if units else "prefetch_forward = 0: implicit"
        page.text(left, top + 10, name, size=12)
        page.text(90, top + 32, "compute", "end", 12)
        page.text(90, top + 58, "all-gathers", "end", 12)
        for moment in moments:
            name = moment.phase.name
            x, width = box(moment.begin, moment.end, top + 18, SHADES["forward"], name)
            if width > 0 and "block" in name:
                page.text(x + width / 2, top + 33, name.split()[-1], "middle", 12, "#fff")
            if "gathers" in moment.sends:
                box(*moment.sends["gathers"], top + 44, COLORS["gathered units"], name)
        total, waiting = 1e3 * row["step_seconds"], 1e3 * row["waiting_seconds"]
        words = f"a step: {total:.0f} ms, of which {waiting:.0f} ms waiting"
        page.text(1180, top + 10, words, "end", 12)
    for ms in range(0, 17, 2):
        page.text(left + ms * ms_wide, 318, f"{ms} ms", "middle", 12)
    return page.svg()


def context() -> str:
    """What a GPU's memory holds as GPUs are added, and as the sequence is sharded."""
    bars = {"8 GPUs": (8, 1), "16 GPUs": (16, 1), "64 GPUs": (64, 1)}  # (ranks, cp)
    bars |= {"8, cp = 8": (8, 8), "64, cp = 8": (64, 8)}
    page = Drawing(1000, 420)
    left, floor = 70, 340
    limit = device("H100").memory
    long = ["--train.seq_len=32768", "--train.micro_batch_size=1"]
    plans = []
    for ranks, cp in bars.values():
        sizes = [f"--train.global_batch_size={ranks}", f"--parallel.cp={cp}"]
        plans.append(plan_of("llama8b", ranks, *long, *sizes))
    most = max(row["device_gib"] for row, _ in plans)
    tall = 270 / most  # of a GiB
    title = "Llama 3 8B, sequences of 32,768 tokens, one per micro-batch: memory that a GPU needs"
    page.text(left, 24, title, size=17)
    scale(page, left, floor, 900, tall, most)
    page.path(f"M{left} {floor - limit * tall:.1f}h900", dashes="8 4")
    page.text(left + 900, floor - limit * tall - 6, f"an H100's memory: {limit:g} GiB", "end")
    page.text(left - 8, 50, "GiB", "end")
    for i, (name, (row, moments)) in enumerate(zip(bars, plans)):
        x, y = left + 40 + 178 * i, float(floor)
        peak = max((m.phase.peak for m in moments), key=lambda peak: peak.total())
        for kind, color in COLORS.items():
            gib = peak[kind] / GIB
            y -= gib * tall
            page.box(x, y, 100, gib * tall, color, f"{name}: {kind} {gib:.1f} GiB")
        rest = (row["device_gib"] - row["peak_gib"]) * tall
        page.box(x, y - rest, 100, rest, GRAY, f"{name}: pools, CUDA's own")
        page.text(x + 50, y - rest - 6, f"{row['device_gib']:.0f}", "middle")
        page.text(x + 50, floor + 20, name, "middle")
    for i, (kind, color) in enumerate((*COLORS.items(), ("pools, CUDA's own", GRAY))):
        page.box(left + 200 * (i % 5), 378 + 20 * (i // 5), 12, 12, color)
        page.text(left + 200 * (i % 5) + 16, 389 + 20 * (i // 5), kind, size=12)
    return page.svg()


def mesh() -> str:
    """Sixteen ranks as 2 replicas x 2 shards x cp 2 x tp 2, in the order of parallel/mesh.py."""
    page = Drawing(1000, 330)
    size = 92  # of a rank's square
    page.text(20, 26, "16 ranks: dp_replicate = 2, dp_shard = 2, cp = 2, tp = 2", size=17)
    for rank, (replica, shard, cp, tp) in enumerate(itertools.product(range(2), repeat=4)):
        x, y = 30 + 490 * replica + 230 * shard + size * tp, 76 + size * cp
        page.box(x, y, size - 8, size - 8, LINES[2 * replica + shard], f"rank {rank}")
        page.text(x + 42, y + 34, f"rank {rank}", "middle", 15, "#fff")
        page.text(x + 42, y + 54, f"cp {cp}, tp {tp}", "middle", 11, "#fff")
    for replica, shard in itertools.product(range(2), repeat=2):
        x = 30 + 490 * replica + 230 * shard
        page.text(x, 71, f"data rank {2 * replica + shard}: its own sequences", size=12)
        page.text(x, 278, "upper and lower row (cp): half", size=12)
        page.text(x, 294, "of each sequence; left and right", size=12)
        page.text(x, 310, "(tp): half of each block's matmuls", size=12)
    for replica in range(2):
        page.path(f"M{30 + 490 * replica} 56h414", width=2)
        words = f"replica {replica}: its eight ranks hold all weights once"
        page.text(444 + 490 * replica, 50, words, "end", 12)
    return page.svg()


def losses() -> str:
    """The default run's loss on five meshes, as --train found it."""
    rows_of_mesh = json.loads((FIGURES / "losses.json").read_text())  # {name: [[step, loss], ...]}
    last = max(step for rows in rows_of_mesh.values() for step, _ in rows)
    page = Drawing(1000, 380)

    def y_of(loss: float) -> float:
        return 320 - (loss - 2) / 7 * 250

    by_step = [[loss for _, loss in rows] for rows in zip(*rows_of_mesh.values())]
    apart = max(max(step_losses) - min(step_losses) for step_losses in by_step)
    title = "configs/tiny.toml on five meshes: mean loss over ten steps, computed in bfloat16"
    page.text(70, 24, title, size=17)
    page.text(70, 46, f"the largest distance between two of them: {apart:.3f}")
    for loss in range(2, 10):
        page.path(f"M70 {y_of(loss):.1f}h900", dashes="1 5")
        page.text(62, y_of(loss) + 4, f"{loss}", "end")
    for at in ticks(0, last):
        page.text(70 + at / last * 900, 340, f"{at:g}", "middle")
    page.text(970, 360, "step", "end")
    for i, ((name, rows), color) in enumerate(zip(rows_of_mesh.items(), LINES)):
        # the lines lie on each other: dashed and ever thinner, so that all are seen
        dashes = f"{4 + 2 * i} {12 - i}" if i > 0 else ""
        thick = 5 - 0.9 * i
        points = [f"{70 + step / last * 900:.1f} {y_of(loss):.1f}" for step, loss in rows]
        page.path("M" + "L".join(points), color, dashes, thick)
        page.path(f"M630 {84 + 22 * i}h36", color, dashes, thick)
        page.text(676, 88 + 22 * i, name)
    return page.svg()


def recompute() -> str:
    """What activation checkpointing keeps of a block against what it computes again."""
    page = Drawing(1000, 400)
    left, floor = 90, 330
    modes = {}  # (GiB of activations, FLOP, row)
    for mode in ("none", "elementwise", "selective", "2", "full"):
        options = [f"--parallel.recompute={mode}", "--train.micro_batch_size=1"]
        row, moments = plan_of("llama8b", 8, *options)
        phases = [moment.phase for moment in moments]
        kept = max(phase.peak["activations"] for phase in phases) / GIB
        flop = sum(phase.work["matmuls"] + phase.work["attention"] for phase in phases)
        modes[mode] = (kept, flop, row)
    least = min(flop for _, flop, _ in modes.values())
    most = max(kept for kept, _, _ in modes.values())
    title = "Llama 3 8B on 8 x H100, 8,192 tokens per micro-batch: parallel.recompute"
    page.text(left, 24, title, size=17)
    scale(page, left, floor, 860, 260 / most, most)
    for percent in range(0, 41, 10):
        page.text(left + 20 + percent * 20, floor + 20, f"+{percent} %", "middle")
    page.text(left, 52, "activations at their peak, GiB", size=12)
    page.text(left + 860, floor + 42, "FLOP of a step, against none", "end", 12)
    for (mode, (kept, flop, row)), color in zip(modes.items(), LINES):
        x = left + 20 + 2000 * (flop / least - 1)
        y = floor - kept / most * 260
        page.box(x - 6, y - 6, 12, 12, color, mode)
        name = mode if mode.isalpha() else f"{mode} (every second block)"
        fits = "" if row["fits"] else ", does not fit"
        page.text(x + 12, y + 4, f"{name}: {row['peak_gib']:.0f} GiB allocated{fits}")
    return page.svg()


DRAWN = {f.__name__: f for f in (step, prefetch, context, mesh, losses, recompute)}


def fit_table(rows: str) -> str:
    """Will it fit, and how fast is it? In Markdown, of each of FIT's rows."""
    lines = [f"{COLUMNS}\n|---|---|---|---|\n"]
    for name, ranks, gpu in map(str.split, rows.split(",")):
        row, _ = plan_of(name, int(ranks), gpu=gpu)
        speed = expected_speed(row, config.load(str(REPO / f"configs/{name}.toml")))
        memory = f"{row['device_gib']:.1f} of {device(gpu).memory:g}"
        lines.append(f"| `{name}` | {ranks} x {gpu} | {memory} | {speed} |\n")
    return "".join(lines)


def train() -> None:
    """Writes losses.json: step and mean loss of each row."""
    rows_of_mesh = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, processes in MESHES.items():
            run_name = re.sub("[ =]+", "-", name)
            options = [f"--run.output_dir={folder}", f"--run.name={run_name}"]
            if "=" in name:
                options.append(f"--parallel.{name.replace(' ', '')}")
            command = ["./run_train.sh", "configs/tiny.toml", *options]
            environment = {**os.environ, "NPROC": str(processes), "PYTHON": sys.executable}
            subprocess.run(command, check=True, cwd=REPO, env=environment)
            lines = pathlib.Path(folder, run_name, "metrics.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
            rows_of_mesh[name] = [[row["step"], round(row["loss_mean"], 4)] for row in rows]
    (FIGURES / "losses.json").write_text(json.dumps(rows_of_mesh) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    parser.add_argument("--train", action="store_true", help="first train on five meshes")
    args = parser.parse_args(argv)
    if args.train:
        train()
    wanted = {FIGURES / f"{name}.svg": function() for name, function in DRAWN.items()}
    for name, rows in FIT.items():
        table = fit_table(rows)
        wanted[REPO / name] = TABLE.sub(lambda _, table=table: table, (REPO / name).read_text())
    different = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in different:
        print(f"{path.relative_to(REPO)}: {'differs' if args.check else 'written'}")
        if not args.check:
            path.write_text(wanted[path])
    return int(args.check and bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
