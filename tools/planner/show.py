"""Renders a plan: text tables with a bar per kind of memory, and an SVG of the step's timeline.

The rows come from plan.py, the timeline from devices.py. __main__.py prints what is rendered here:
verdict() in a line, table() in detail, compared() for several world sizes, draw() as a file.
"""

import math
import pathlib

import config
from tools.planner.devices import REACHED, REACHED_IN_FLOAT8, Moment, next_begins
from tools.planner.plan import GIB, STATES, Asked
from tools.planner.svg import Drawing

BAR = 40  # characters of the longest bar
# difference between the FLOP in MFU and those in the plan's time from which both are shown
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
SHADES = {"forward": "#999", "backward": "#666", "update": "#bbb"}

# name and value of a table's line
Line = tuple[str, str]


def table(row: dict, cfg: config.Config, asked: Asked) -> str:
    """All that the plan knows, a line each."""
    lines = [*lines_of_run(row, cfg), *lines_of_memory(row, asked), *lines_of_traffic(row)]
    if row["step_seconds"]:
        lines += lines_of_time(row, cfg)
    lines += [("not counted", note) for note in row["not_counted"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines) + "\n"


def lines_of_run(row: dict, cfg: config.Config) -> list[Line]:
    t = cfg.train
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
    return [
        ("ranks", mesh),
        ("parameters", f"{row['parameters']:,} in {row['units']} units"),
        (
            "tokens per step",
            f"{row['tokens_per_step']:,} = {t.global_batch_size} sequences of {t.seq_len}",
        ),
        (
            "micro-batches",
            f"{row['accumulation_steps']} of {row['micro_batch_size']} sequences per rank and step",
        ),
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
    lines.append(("reserved peak", f"{row['reserved_gib']:.3f} GiB by torch's allocator: {pools}"))
    needed = f"{row['device_gib']:.3f}"
    if asked.memory_gib:
        needed += f" of {asked.memory_gib:g}"
    lines.append(("needed", f"{needed} GiB, with CUDA's own"))
    return lines


def lines_of_traffic(row: dict) -> list[Line]:
    if not row["traffic_per_step"]:
        return [("sent per step", "nothing")]
    lines = [
        ("sent per step", "per rank: number of collectives, and their larger buffers together")
    ]
    for dimension, sent in row["traffic_per_step"].items():
        distance = "between nodes" if sent["ranks"] > sent["ranks_in_a_node"] else "within a node"
        for kind, counts in sent.items():
            # next to these are "ranks" and "ranks_in_a_node"
            if isinstance(counts, tuple):
                number, size = counts
                value = f"{number:7,} {size / GIB:12,.3f} GiB  {distance}"
                lines.append((f"  {kind}, {dimension}", value))
    return lines


def lines_of_time(row: dict, cfg: config.Config) -> list[Line]:
    days = row["step_seconds"] * cfg.train.steps / 86400
    low, high = reached(cfg)
    return [
        (
            "a step",
            f"{row['step_seconds']:.3g} s, {row['waiting_seconds']:.2g} of them waiting for FSDP2",
        ),
        (
            "tokens/s per GPU",
            f"{row['tokens_per_second_per_device']:,.0f} planned, MFU {row['mfu']:.1%}; at best "
            f"{row['best_tokens_per_second_per_device']:,.0f}",
        ),
        (
            "the whole run",
            f"{days:,.2f} days, {row['gpu_hours']:,.0f} GPU-hours, "
            f"{row['kilowatt_hours']:,.0f} kWh at the GPUs' power",
        ),
        ("measured runs", f"reached {low:g} to {high:g} of the planned speed, on one H200"),
    ]


def reached(cfg: config.Config) -> tuple[float, float]:
    """The lowest and the highest share of its planned speed that a measured run reached."""
    return REACHED if cfg.parallel.float8 == "none" else REACHED_IN_FLOAT8


def expected_speed(row: dict, cfg: config.Config) -> str:
    """Tokens/s per GPU, as a range: the planned speed times what measured runs reached of theirs."""
    speeds = [share * row["tokens_per_second_per_device"] for share in reached(cfg)]
    return " to ".join(f"{float(f'{speed:.3g}'):,.0f}" for speed in speeds)


def expected_duration(row: dict, cfg: config.Config) -> str:
    """Days or hours of the whole run, as a range."""
    low, high = reached(cfg)
    planned_hours = row["step_seconds"] * cfg.train.steps / 3600
    shortest = planned_hours / high
    longest = planned_hours / low
    if longest > 24:
        return f"{shortest / 24:,.1f} to {longest / 24:,.1f} days"
    return f"{shortest:.2g} to {longest:.2g} hours"


def compared(rows: list[dict]) -> str:
    """A table with a line for each world size."""
    timed = any(row.get("step_seconds") is not None for row in rows)
    header = f"{'ranks':>8} {'allocated GiB':>13} {'between steps':>14} {'activations':>12} {'sent GiB':>9}"
    if timed:
        header += f" {'s/step':>8} {'waiting':>8} {'tok/s/GPU':>10}  MFU"
    lines = [header]
    for row in rows:
        if "problems" in row:
            lines.append(f"{row['world_size']:8,}   refused")
            continue
        between_steps = sum(row[f"{state}_bytes_per_rank"] for state in STATES) / GIB
        sent = sum(size for _, size in row["collectives_per_step"].values()) / GIB
        activations = row["parts_gib"].get("activations", 0)
        line = (
            f"{row['world_size']:8,} {row['peak_gib']:13.2f} {between_steps:14.2f} "
            f"{activations:12.2f} {sent:9.1f}"
        )
        if timed:
            line += (
                f" {row['step_seconds']:8.3g} {row['waiting_seconds']:8.2g} "
                f"{row['tokens_per_second_per_device']:10,.0f} {row['mfu']:4.0%}"
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def verdict(row: dict, cfg: config.Config, asked: Asked) -> str:
    """Whether the run fits, the memory it needs, speed and duration, as far as they are known, in a
    line; or why this world size is refused."""
    ranks = "1 rank" if row["world_size"] == 1 else f"{row['world_size']} ranks"
    if "problems" in row:
        return f"{ranks}: refused: {'; '.join(row['problems'])}"
    limit = asked.memory_gib
    needed = f"needs {row['device_gib']:.4g}"
    clauses = []
    if limit:
        needed += f" of {limit:g}"
        spare = f"fits, {limit - row['device_gib']:.3g} GiB left"
        clauses.append(spare if row["fits"] else "does not fit")
    memory = "GiB of tensors on this CPU" if asked.without_cuda else "GiB"
    clauses.append(f"{needed} {memory} (peak in the {row['peak_at']})")
    # the time of copies to the host is not known
    if row["step_seconds"] and row["fits"] and not row["host_gib"]:
        clauses.append(f"{expected_speed(row, cfg)} tokens/s per GPU")
        clauses.append(f"{expected_duration(row, cfg)} in all")
    return f"{ranks}: {'; '.join(clauses)}"


def draw(row: dict, moments: list[Moment], path: str, title: str, limit: float | None) -> None:
    """Writes an SVG of the step, micro-batches that are alike once: above, each phase's peak
    memory; below, compute and FSDP2's collectives.

    Times assume an H100 if no GPU is given. limit: the GPU's memory in GiB, if it is known. Raises
    OSError.
    """
    peaks = [moment.phase.peak.total() / GIB for moment in moments]
    chart = Chart(seconds=moments[-1].end, gib=max([limit or 0, *peaks]))
    page = chart.page
    chart.draw_memory_scale()
    for moment, end in zip(moments, next_begins(moments)):
        chart.draw_memory(moment, end)
        chart.draw_time(moment)
    chart.draw_directions(moments)
    chart.draw_time_scale()
    if limit:
        chart.draw_limit(limit)
    peak = f"allocated peak {row['peak_gib']:.2f} GiB in the {row['peak_at']}"
    page.text(chart.LEFT, 22, f"{title}: {peak}", size=17)
    chart.draw_legend()
    pathlib.Path(path).write_text(page.svg())


class Chart:
    """The drawing of a step: GiB over seconds, and below two rows, compute and collectives."""

    # of the area of memory, in units of the page
    LEFT = 80
    TOP = 60
    WIDTH = 1100
    HEIGHT = 320
    FLOOR = TOP + HEIGHT
    # upper edges of the two rows of bars, and their height
    COMPUTE = FLOOR + 48
    COLLECTIVES = FLOOR + 78
    TALL = 24

    def __init__(self, seconds: float, gib: float):
        """seconds, gib: the ends of the scales."""
        self.seconds = seconds
        self.gib = gib
        self.page = Drawing(self.LEFT + self.WIDTH + 20, self.FLOOR + 150)

    def x(self, seconds: float) -> float:
        return self.LEFT + seconds / self.seconds * self.WIDTH

    def y(self, gib: float) -> float:
        return self.FLOOR - gib / self.gib * self.HEIGHT

    def bar(self, begin: float, end: float, y: float, tall: float, color: str, title: str) -> None:
        """A box from begin to end, in seconds; a short one stays visible."""
        wide = max(0.3, (end - begin) / self.seconds * self.WIDTH)
        self.page.box(self.x(begin), y, wide, tall, color, title)

    def line(self, y: float, dashes: str) -> None:
        self.page.path(f"M{self.LEFT} {y:.1f}h{self.WIDTH}", dashes=dashes)

    def draw_memory_scale(self) -> None:
        for gib in ticks(self.gib):
            y = self.y(gib)
            self.line(y, "1 5")
            self.page.text(self.LEFT - 8, y + 4, f"{gib:g}", "end")

    def draw_memory(self, moment: Moment, end: float) -> None:
        """A phase's peak by kind, one on top of the other, until the next phase begins."""
        phase = moment.phase
        total = phase.peak.total() / GIB
        y = self.FLOOR
        for kind, color in COLORS.items():
            gib = phase.peak[kind] / GIB
            tall = gib / self.gib * self.HEIGHT
            if tall > 0:
                y -= tall
                title = f"{phase.name}: {kind} {gib:.2f} of {total:.2f} GiB"
                self.bar(moment.begin, end, y, tall, color, title)

    def draw_time(self, moment: Moment) -> None:
        """A phase's compute, and below FSDP2's collectives that it issues."""
        name = moment.phase.name
        title = f"{name}: {1e3 * (moment.end - moment.begin):.2f} ms"
        shade = SHADES[direction(name)]
        self.bar(moment.begin, moment.end, self.COMPUTE, self.TALL, shade, title)
        colors = {"gathers": COLORS["gathered units"], "reduces": COLORS["reductions"]}
        for kind, (begin, end) in moment.sends.items():
            if end > begin:
                title = f"{name} {kind}: {1e3 * (end - begin):.2f} ms"
                self.bar(begin, end, self.COLLECTIVES, self.TALL, colors[kind], title)

    def draw_directions(self, moments: list[Moment]) -> None:
        """Labels forward, backward and update, each stretch of phases once."""
        labels: list[tuple[str, float, float]] = []
        for moment, end in zip(moments, next_begins(moments)):
            name = direction(moment.phase.name)
            begin = moment.begin
            if labels and labels[-1][0] == name:
                _, begin, _ = labels.pop()
            labels.append((name, begin, end))
        for name, begin, end in labels:
            at = (begin + end) / 2
            anchor = "middle"
            room = (end - begin) / self.seconds * self.WIDTH
            if room <= 8 * len(name):
                at = end
                anchor = "end"
            self.page.text(self.x(at), self.FLOOR + 41, name, anchor)

    def draw_time_scale(self) -> None:
        for seconds in ticks(self.seconds):
            self.page.text(self.x(seconds), self.FLOOR + 20, f"{seconds:g} s", "middle")
        names = {"GiB": self.TOP - 12, "compute": self.FLOOR + 65, "collectives": self.FLOOR + 95}
        for name, y in names.items():
            self.page.text(self.LEFT - 8, y, name, "end")

    def draw_limit(self, gib: float) -> None:
        y = self.y(gib)
        self.line(y, "8 4")
        self.page.text(self.LEFT + self.WIDTH, y - 6, f"the GPU's memory: {gib:g} GiB", "end")

    def draw_legend(self) -> None:
        for i, (kind, color) in enumerate(COLORS.items()):
            x = self.LEFT + 140 * i
            self.page.box(x, self.FLOOR + 122, 12, 12, color, kind)
            self.page.text(x + 18, self.FLOOR + 133, kind)


def direction(phase: str) -> str:
    """forward, backward or, for what is neither, update: a key of SHADES."""
    return next((name for name in SHADES if phase.startswith(name)), "update")


def ticks(most: float) -> list[float]:
    """Five to ten round numbers from 0 to most."""
    unit = 10 ** math.floor(math.log10(most / 4))
    step = next(size * unit for size in (5, 2, 1) if most / (size * unit) >= 4)
    return [i * step for i in range(math.floor(most / step) + 1)]
