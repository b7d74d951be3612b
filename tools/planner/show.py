"""Renders a plan: text tables with a bar per kind of memory, and an SVG of the step's timeline.

The rows come from plan.py, the timeline from devices.py. verdict() renders a plan in one line, and
table() in detail. compared() renders several world sizes. __main__.py prints these; draw() writes a
file.
"""

import pathlib

import config
from tools.planner.devices import Moment, next_begins, reached
from tools.planner.plan import GIB, STATES, Asked
from tools.svg import Chart, Drawing

BAR = 40  # length of the longest bar, in characters
# Show both FLOP counts, MFU's and the plan's, if they differ by more than this
OTHER_FLOP = 0.05
COLORS = {
    "parameters": "#4c78a8",
    "optimizer state": "#72b7b2",
    "gradients": "#54a24b",
    "gathered units": "#eeca3b",
    "reductions": "#f58518",
    "activations": "#e45756",
    "working memory": "#b279a2",
    "cuBLAS workspaces": "#9d755d",
}
# colors of compute, by the first word of a phase's name
SHADES = {"batch": "#bbb", "forward": "#999", "backward": "#666", "update": "#bbb"}

# (name, value) of a line in a table
Line = tuple[str, str]


def table(row: dict, cfg: config.Config, asked: Asked) -> str:
    """A plan in detail, with one figure per line."""
    lines = [*lines_of_run(row, cfg), *lines_of_memory(row, asked), *lines_of_traffic(row)]
    if row["step_seconds"]:
        lines += lines_of_time(row, cfg)
    lines += [("not counted", note) for note in row["not_counted"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines) + "\n"


def lines_of_run(row: dict, cfg: config.Config) -> list[Line]:
    mesh = f"{row['world_size']} = {row['replicas']} replicas x {row['shards']} shards"
    if row["cp"] > 1 or row["tp"] > 1:
        mesh += f" (of them cp {row['cp']}) x tp {row['tp']}"
    epoch = "known when the data is prepared"
    if row["steps_per_epoch"]:
        epoch = f"{row['steps_per_epoch']:,.1f}"
    flop = f"{row['flops_per_token']:,}"
    counted = row["counted_flops_per_token"]
    if abs(counted / row["flops_per_token"] - 1) > OTHER_FLOP:
        flop += f" in MFU, by flops_per_token; the plan's time has {counted:,.0f}"
    batch = f"{cfg.train.global_batch_size} sequences of {cfg.train.seq_len}"
    micro_batch = f"{row['micro_batch_size']} sequences"
    micro_batches = f"{row['accumulation_steps']} of {micro_batch} per rank and step"
    if row["accumulation_steps"] > 1 and not cfg.parallel.gather_once:
        micro_batches += "; gather_once would gather weights once"
    return [
        ("ranks", mesh),
        ("parameters", f"{row['parameters']:,} in {row['units']} units"),
        ("tokens per step", f"{row['tokens_per_step']:,} = {batch}"),
        ("micro-batches", micro_batches),
        ("steps per epoch", epoch),
        ("FLOP per token", flop),
    ]


def lines_of_memory(row: dict, asked: Asked) -> list[Line]:
    between_steps = "per rank, the largest"
    if row["host_gib"] > 0:
        between_steps += ", in host memory"
    lines = [("between steps", between_steps)]
    for state in STATES:
        lines.append((f"  {state}", f"{row[f'{state}_bytes_per_rank'] / GIB:10.3f} GiB"))
    lines.append(("allocated peak", f"{row['peak_gib']:.3f} GiB in the {row['peak_at']}, of these"))
    for kind, gib in row["parts_gib"].items():
        bar = "#" * round(BAR * gib / row["peak_gib"])
        lines.append((f"  {kind}", f"{gib:10.3f} GiB  {bar}"))
    if asked.without_cuda:
        return lines
    pools = ", ".join(f"{name} {gib:.2f}" for name, gib in row["pools_gib"].items())
    reserved = f"{row['reserved_gib']:.3f} GiB by torch's allocator: {pools}, holes"
    lines.append(("reserved peak", reserved))
    limit = f" of {asked.memory_gib:g}" if asked.memory_gib else ""
    lines.append(("needed", f"{row['device_gib']:.3f}{limit} GiB, with CUDA's own"))
    return lines


def lines_of_traffic(row: dict) -> list[Line]:
    if not row["traffic_per_step"]:
        return [("sent per step", "nothing")]
    meaning = "per rank: number of collectives, and their larger buffers together"
    lines = [("sent per step", meaning)]
    for dimension, sent in row["traffic_per_step"].items():
        distance = "between nodes" if sent["ranks"] > sent["ranks_in_a_node"] else "within a node"
        for kind, counts in sent.items():
            # skip the keys "ranks" and "ranks_in_a_node"
            if isinstance(counts, tuple):
                number, size = counts
                value = f"{number:7,} {size / GIB:12,.3f} GiB  {distance}"
                lines.append((f"  {kind}, {dimension}", value))
    return lines


def lines_of_time(row: dict, cfg: config.Config) -> list[Line]:
    days = row["step_seconds"] * cfg.train.steps / 86400
    speed = row["tokens_per_second_per_device"]
    waiting = f"{row['waiting_seconds']:.2g} of them waiting for FSDP2"
    low, high = reached(cfg, row["world_size"])
    runs = "on one H200"
    if row["world_size"] > 1:
        runs += ", or on several GPUs of others"
    return [
        ("a step", f"{row['step_seconds']:.3g} s, {waiting}"),
        ("tokens/s per GPU", f"{speed:,.0f} planned, MFU {row['mfu']:.1%}"),
        ("the whole run", f"{days:,.2f} days, {row['gpu_hours']:,.0f} GPU-hours"),
        ("measured runs", f"reached {low:.2f} to {high:.2f} of the planned speed, {runs}"),
    ]


def expected_speed(row: dict, cfg: config.Config) -> str:
    """Tokens/s per GPU, as a range: the planned speed times the shares that real runs reached."""
    shares = reached(cfg, row["world_size"])
    speeds = [share * row["tokens_per_second_per_device"] for share in shares]
    return " to ".join(f"{float(f'{speed:.3g}'):,.0f}" for speed in speeds)


def expected_duration(row: dict, cfg: config.Config) -> str:
    """The duration of the run in days or hours, as a range."""
    low, high = reached(cfg, row["world_size"])
    planned_hours = row["step_seconds"] * cfg.train.steps / 3600
    shortest = planned_hours / high
    longest = planned_hours / low
    if longest > 24:
        return f"{shortest / 24:,.1f} to {longest / 24:,.1f} days"
    return f"{shortest:.2g} to {longest:.2g} hours"


def compared(rows: list[dict]) -> str:
    """A table with one line per world size."""
    lines = ["   ranks  peak GiB  between steps  activations  sent GiB"]
    if rows[0]["step_seconds"]:
        lines[0] += "   s/step  waiting  tok/s/GPU   MFU"
    for row in rows:
        between_steps = sum(row[f"{state}_bytes_per_rank"] for state in STATES) / GIB
        sent = sum(size for _, size in row["collectives_per_step"].values()) / GIB
        line = (
            f"{row['world_size']:8,} {row['peak_gib']:9.2f} {between_steps:14.2f} "
            f"{row['parts_gib'].get('activations', 0):12.2f} {sent:9.1f}"
        )
        if row["step_seconds"]:
            line += (
                f" {row['step_seconds']:8.3g} {row['waiting_seconds']:8.2g} "
                f"{row['tokens_per_second_per_device']:10,.0f} {row['mfu']:5.0%}"
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def verdict(row: dict, cfg: config.Config, asked: Asked) -> str:
    """A line with the verdict: whether the run fits, the memory that it needs and, if known, its
    speed and duration."""
    ranks = "1 rank" if row["world_size"] == 1 else f"{row['world_size']} ranks"
    limit = asked.memory_gib
    needed = f"needs {row['device_gib']:.4g}"
    clauses = []
    if limit:
        needed += f" of {limit:g}"
        spare = f"fits, {limit - row['device_gib']:.3g} GiB left"
        clauses.append(spare if row["fits"] else "does not fit")
    memory = "GiB of tensors on this CPU" if asked.without_cuda else "GiB"
    clauses.append(f"{needed} {memory} (peak in the {row['peak_at']})")
    # a plan does not know the time of copies to the host
    if row["step_seconds"] and row["fits"] and not row["host_gib"]:
        clauses.append(f"{expected_speed(row, cfg)} tokens/s per GPU")
        clauses.append(f"{expected_duration(row, cfg)} in all")
    return f"{ranks}: {'; '.join(clauses)}"


def draw(row: dict, moments: list[Moment], path: str, title: str, limit: float | None) -> None:
    """Writes an SVG of the step.

    Draws each phase's peak memory above, and compute and FSDP2's collectives below. Draws identical
    micro-batches once. Times assume an H100 if no GPU is given. `limit` is the GPU's memory in GiB,
    if known. Raises OSError.
    """
    page = Drawing(1200, 530)
    most = max([limit or 0, *(moment.phase.peak.total() / GIB for moment in moments)])
    chart = Chart(page, (80, 60, 1100, 320), (0, moments[-1].end), (0, most))
    chart.scales(" s")
    previous = ""
    for moment, end in zip(moments, next_begins(moments)):
        draw_memory(chart, moment, end)
        draw_time(chart, moment)
        direction = direction_of(moment)
        if direction == "update":
            page.text(chart.x(end), chart.floor + 41, direction, "end")
        elif direction not in (previous, "batch"):
            page.text(chart.x(moment.begin), chart.floor + 41, direction)
        previous = direction
    for name, y in (("GiB", 48), ("compute", chart.floor + 65), ("collectives", chart.floor + 95)):
        page.text(chart.left - 8, y, name, "end")
    if limit:
        page.path(f"M{chart.left} {chart.y(limit):.1f}h{chart.width}", dashes="8 4")
        words = f"the GPU's memory: {limit:g} GiB"
        page.text(chart.left + chart.width, chart.y(limit) - 6, words, "end")
    peak = f"allocated peak {row['peak_gib']:.2f} GiB in the {row['peak_at']}"
    page.text(chart.left, 22, f"{title}: {peak}", size=17)
    for i, (kind, color) in enumerate(COLORS.items()):
        x = chart.left + 135 * i
        page.box(x, chart.floor + 122, 12, 12, color, kind)
        page.text(x + 18, chart.floor + 133, kind)
    pathlib.Path(path).write_text(page.svg())


def draw_memory(chart: Chart, moment: Moment, end: float) -> None:
    """Draws a phase's peak until the next phase begins, with the kinds of memory stacked."""
    phase = moment.phase
    floor = chart.floor
    gib = 0.0
    for kind, color in COLORS.items():
        if phase.peak[kind]:
            gib += phase.peak[kind] / GIB
            top = chart.y(gib)
            title = f"{phase.name}: {kind} {phase.peak[kind] / GIB:.2f} GiB"
            bar(chart, (moment.begin, end), top, floor - top, color, title)
            floor = top


def draw_time(chart: Chart, moment: Moment) -> None:
    """Draws a phase's compute and, below it, the FSDP2 collectives that the phase issues."""
    name = moment.phase.name
    bars = [((moment.begin, moment.end), 48, SHADES[direction_of(moment)], name)]
    colors = {"gathers": COLORS["gathered units"], "reduces": COLORS["reductions"]}
    for kind, span in moment.sends.items():
        bars.append((span, 78, colors[kind], f"{name} {kind}"))
    for (begin, end), below, color, words in bars:
        if end > begin:
            title = f"{words}: {1e3 * (end - begin):.2f} ms"
            bar(chart, (begin, end), chart.floor + below, 24, color, title)


def bar(
    chart: Chart, span: tuple[float, float], y: float, tall: float, color: str, title: str
) -> None:
    """Draws a box over a span of seconds, wide enough to be visible."""
    begin, end = map(chart.x, span)
    chart.page.box(begin, y, max(0.3, end - begin), tall, color, title)


def direction_of(moment: Moment) -> str:
    """The first word of a phase's name, a key of SHADES."""
    return moment.phase.name.partition(" ")[0]
