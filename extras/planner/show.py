"""Renders a plan: text tables with a bar per kind of memory, and an SVG of the step's timeline."""

import math
import pathlib

import config
from extras.planner.devices import Moment
from extras.planner.plan import GIB, Asked
from extras.planner.svg import Drawing

BAR = 40  # characters of the longest bar
OTHER_FLOP = 0.05  # of MFU's FLOP, where those that the time has are shown too
COLORS = {
    "parameters": "#4c78a8",
    "optimizer state": "#72b7b2",
    "gradients": "#54a24b",
    "gathered units": "#eeca3b",
    "reductions": "#f58518",
    "activations": "#e45756",
    "working memory": "#b279a2",
}
SHADES = {"forward": "#999", "backward": "#666", "update": "#bbb"}


def table(row: dict, cfg: config.Config, asked: Asked) -> str:
    epoch, t = row["steps_per_epoch"], cfg.train
    lines = [
        (
            "ranks",
            f"{row['world_size']} = {row['replicas']} replicas x {row['shards']} shards"
            + f" (of them cp {row['cp']}) x tp {row['tp']}" * (row["cp"] * row["tp"] > 1),
        ),
        ("parameters", f"{row['parameters']:,} in {row['units']} units"),
        (
            "tokens per step",
            f"{row['tokens_per_step']:,} = {t.global_batch_size} sequences of {t.seq_len}",
        ),
        (
            "micro-batches",
            f"{row['accumulation_steps']} of {row['micro_batch_size']} sequences per rank and step",
        ),
        ("steps per epoch", f"{epoch:,.1f}" if epoch else "known when the data is prepared"),
        (
            "FLOP per token",
            f"{row['flops_per_token']:,}"
            + (
                f" in MFU, by flops_per_token; the plan's time has {row['counted_flops_per_token']:,.0f}"
                if abs(row["counted_flops_per_token"] / row["flops_per_token"] - 1) > OTHER_FLOP
                else ""
            ),
        ),
        ("between steps", "per rank, the largest" + ", in host memory" * (row["host_gib"] > 0)),
        *(
            (f"  {what}", f"{row[f'{what}_bytes_per_rank'] / GIB:10.3f} GiB")
            for what in ("parameter", "gradient", "optimizer")
        ),
        ("peak", f"{row['peak_gib']:.3f} GiB in the {row['peak_at']}, of these"),
        *(
            (f"  {part}", f"{gib:10.3f} GiB  {'#' * round(BAR * gib / row['peak_gib'])}")
            for part, gib in row["parts_gib"].items()
        ),
        (
            "  with CUDA's own",
            f"{row['device_gib']:10.3f} GiB"
            + (f" of {asked.memory_gib:g}" if asked.memory_gib else ""),
        ),
        (
            "sent per step",
            "per rank: number of collectives, and their larger buffers together"
            if row["traffic_per_step"]
            else "nothing",
        ),
        *(
            (
                f"  {kind}, {dim}",
                f"{sent[kind][0]:7,} {sent[kind][1] / GIB:12,.3f} GiB  "
                + ("between nodes" if sent["ranks"] > sent["ranks_in_a_node"] else "within a node"),
            )
            for dim, sent in row["traffic_per_step"].items()
            for kind in sent
            if isinstance(sent[kind], tuple)
        ),
    ]
    if row["step_seconds"]:
        seconds = row["step_seconds"] * t.steps
        lines += [
            (
                "a step",
                f"{row['step_seconds']:.3g} s, {row['waiting_seconds']:.2g} of them waiting for FSDP2",
            ),
            (
                "tokens/s per GPU",
                f"{row['tokens_per_second_per_device']:,.0f}, MFU {row['mfu']:.1%}; at best "
                f"{row['best_tokens_per_second_per_device']:,.0f}",
            ),
            (
                "the whole run",
                f"{seconds / 86400:,.2f} days, {row['gpu_hours']:,.0f} GPU-hours, "
                f"{row['kilowatt_hours']:,.0f} kWh at the GPUs' power",
            ),
        ]
    lines += [("not counted", what) for what in row["not_counted"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines) + "\n"


def compared(rows: list[dict]) -> str:
    timed = rows[0]["step_seconds"] is not None
    head = f"{'ranks':>8} {'peak GiB':>9} {'between steps':>14} {'activations':>12} {'sent GiB':>9}"
    lines = [head + (f" {'s/step':>8} {'waiting':>8} {'tok/s/GPU':>10}  MFU" if timed else "")]
    for row in rows:
        held = (
            sum(row[f"{what}_bytes_per_rank"] for what in ("parameter", "gradient", "optimizer"))
            / GIB
        )
        sent = sum(size for _, size in row["collectives_per_step"].values()) / GIB
        line = (
            f"{row['world_size']:8,} {row['peak_gib']:9.2f} {held:14.2f} "
            f"{row['parts_gib'].get('activations', 0):12.2f} {sent:9.1f}"
        )
        if timed:
            line += (
                f" {row['step_seconds']:8.3g} {row['waiting_seconds']:8.2g} "
                f"{row['tokens_per_second_per_device']:10,.0f} {row['mfu']:4.0%}"
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def verdict(row: dict, cfg: config.Config, asked: Asked) -> str:
    """Whether the run fits, its peak, speed and duration, as far as they are known, in a line."""
    limit, found = asked.memory_gib, []
    if limit:
        found.append(
            f"fits, {limit - row['device_gib']:.3g} GiB left" if row["fits"] else "does not fit"
        )
    found.append(
        f"{row['device_gib']:.4g}{f' of {limit:g}' if limit else ''} GiB at the peak ({row['peak_at']})"
    )
    if row["step_seconds"] and row["fits"] and not row["host_gib"]:
        # the time of copies to the host is not known
        hours = row["step_seconds"] * cfg.train.steps / 3600
        found += [
            f"{row['tokens_per_second_per_device']:,.0f} tokens/s per GPU",
            f"{hours / 24:,.1f} days in all" if hours > 24 else f"{hours:.2g} hours in all",
        ]
    return f"{row['world_size']} rank{'s' * (row['world_size'] > 1)}: {'; '.join(found)}"


def draw(row: dict, moments: list[Moment], path: str, title: str, limit: float | None) -> None:
    """Writes an SVG of the step, micro-batches that are alike once: above, each phase's peak memory; below, compute
    and FSDP2's collectives. Times assume an H100 if no GPU is given. limit: the GPU's memory in GiB, if it is known.
    Raises OSError."""
    width, height, left, top = 1100, 320, 80, 60
    floor, whole = top + height, moments[-1].end
    most = max([limit or 0, *(moment.phase.peak.total() / GIB for moment in moments)])
    page = Drawing(left + width + 20, floor + 150)

    def span(begin: float, end: float, y: float, tall: float, color: str, title: str) -> None:
        page.box(
            left + begin / whole * width,
            y,
            max(0.3, (end - begin) / whole * width),
            tall,
            color,
            title,
        )

    def line(y: float, dashes: str) -> None:
        page.path(f"M{left} {y:.1f}h{width}", dashes=dashes)

    for gib in ticks(most):
        line(y := floor - gib / most * height, "1 5")
        page.text(left - 8, y + 4, f"{gib:g}", "end")
    labels: list[tuple[str, float, float]] = []  # forward, backward or update, and when
    for moment, until in zip(moments, [*(later.begin for later in moments[1:]), whole]):
        phase, y = moment.phase, floor
        for kind, color in COLORS.items():
            if (tall := phase.peak[kind] / GIB / most * height) > 0:
                y -= tall
                span(
                    moment.begin,
                    until,
                    y,
                    tall,
                    color,
                    f"{phase.name}: {kind} {phase.peak[kind] / GIB:.2f} of {phase.peak.total() / GIB:.2f} GiB",
                )
        kind = next((kind for kind in SHADES if phase.name.startswith(kind)), "update")
        begin = labels.pop()[1] if labels and labels[-1][0] == kind else moment.begin
        labels.append((kind, begin, until))
        span(
            moment.begin,
            moment.end,
            floor + 48,
            24,
            SHADES[kind],
            f"{phase.name}: {1e3 * (moment.end - moment.begin):.2f} ms",
        )
        for (kind, (begin, end)), color in zip(
            moment.sends.items(), ("gathered units", "reductions")
        ):
            if end > begin:
                span(
                    begin,
                    end,
                    floor + 78,
                    24,
                    COLORS[color],
                    f"{phase.name} {kind}: {1e3 * (end - begin):.2f} ms",
                )
    for kind, begin, end in labels:
        wide = (end - begin) / whole * width > 8 * len(kind)
        at, anchor = ((begin + end) / 2, "middle") if wide else (end, "end")
        page.text(left + at / whole * width, floor + 41, kind, anchor)
    for seconds in ticks(whole):
        page.text(left + seconds / whole * width, floor + 20, f"{seconds:g} s", "middle")
    for y, words in (top - 12, "GiB"), (floor + 65, "compute"), (floor + 95, "collectives"):
        page.text(left - 8, y, words, "end")
    if limit:
        line(floor - limit / most * height, "8 4")
        page.text(
            left + width,
            floor - limit / most * height - 6,
            f"the GPU's memory: {limit:g} GiB",
            "end",
        )
    page.text(left, 22, f"{title}: peak {row['peak_gib']:.2f} GiB in the {row['peak_at']}", size=17)
    for i, (kind, color) in enumerate(COLORS.items()):
        page.box(left + 155 * i, floor + 122, 12, 12, color, kind)
        page.text(left + 155 * i + 18, floor + 133, kind)
    pathlib.Path(path).write_text(page.svg())


def ticks(most: float) -> list[float]:
    """Five to ten round numbers from 0 to most."""
    unit = 10 ** math.floor(math.log10(most / 4))
    step = next(size * unit for size in (5, 2, 1) if most / (size * unit) >= 4)
    return [i * step for i in range(math.floor(most / step) + 1)]
