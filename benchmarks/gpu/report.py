"""The report of benchmarks.gpu: what compares rows, and the tables."""

import json

from benchmarks.gpu.arms import AGAIN, CHECKS, GROUPS, PARTS, SHIPPED

SAME_LOSS, STEADY = 0.02, 0.015  # difference of losses; share of speed
NUMBERS = {
    "step_seconds": ".3f",
    "micro_batch_seconds": ".4f",
    "optimizer_seconds": ".4f",
    "tokens_per_second": ",.0f",
    "mfu": ".1%",
    "peak_gib": ".1f",
    "reserved_gib": ".1f",
    "first_step_seconds": ".1f",
    "vs_shipped": ".3f",
}
PLANNED = {"peak_gib": ".2f", "reserved_gib": ".2f", "step_seconds": ".3f"}
# what a check's row says beside its status
DETAILS = ("largest_difference", "allowed", "loss", "during_training", "text", "tests", "output")


def has_result(row: dict) -> bool:
    """Whether a row need not be measured again: all but what failed, was skipped or was cut off."""
    return row["status"].startswith(("ok", "out of memory", "refused"))


def in_order(rows: list[dict]) -> list[dict]:
    """Rows in the order of GROUPS, each with what compares it to the others."""
    places = {}
    for group, arms in GROUPS.items():
        for arm in arms:
            places[group, arm] = len(places)
    rows = sorted(rows, key=lambda row: places[row["group"], row["arm"]])
    for number, row in enumerate(rows):
        compare(row, rows[: number + 1])
        compare_with_plan(row)
    return rows


def compare(row: dict, rows: list[dict]) -> None:
    """Adds to a row its speed relative to its model as shipped, when that was last measured."""
    shipped = None
    for other in rows:
        if (
            other["model"] == row["model"]
            and other["arm"].endswith(SHIPPED)
            and "tokens_per_second" in other
        ):
            shipped = other
    if shipped is None or "tokens_per_second" not in row:
        return
    row["vs_shipped"] = row["tokens_per_second"] / shipped["tokens_per_second"]
    same_batch = shipped["micro_batch_size"] == row["micro_batch_size"]
    same_loss = abs(row["loss"] - shipped["loss"]) <= SAME_LOSS  # not where one is NaN
    if same_batch and not same_loss:
        row["marked"] = f"void: loss {row['loss']:.3f}, as shipped {shipped['loss']:.3f}"
    elif row["arm"] == AGAIN and abs(row["vs_shipped"] - 1) > STEADY:
        row["marked"] = "not steady: differences smaller than this one mean nothing"


def compare_with_plan(row: dict) -> None:
    """Adds to a row what was measured relative to what was planned."""
    ratios = {}
    for key in PLANNED:
        measured = row.get(key)
        predicted = row.get("planned", {}).get(key)
        if measured and predicted:
            ratios[key] = measured / predicted
    if ratios:
        row["measured_over_planned"] = ratios


def line(row: dict) -> str:
    """A row on one line, as it is measured."""
    words = [f"{row['group']}: {row['arm']}: {row['status']}"]
    if "tokens_per_second" in row:
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        words.append(f"{speed}, allocated peak {row['peak_gib']:.2f} GiB")
    for key, ratio in row.get("measured_over_planned", {}).items():
        words.append(f"{key} {ratio:.3f} of the plan")
    if "marked" in row:
        words.append(row["marked"])
    return ", ".join(words)


def text(rows: list[dict]) -> str:
    """Checks and parts as they are, arms as Markdown tables."""
    sections = [of_checks(rows)]
    for row in rows:
        if row["arm"] in PARTS:
            sections.append(of_part(row))
    sections += [of_arms(rows), of_plans(rows)]
    return "\n\n".join(section for section in sections if section)


def of_checks(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        if row["group"] in CHECKS:
            details = [f"{key} {row[key]!r}" for key in DETAILS if key in row]
            lines.append("; ".join([f"{row['group']}: {row['arm']}: {row['status']}", *details]))
    return "\n".join(lines)


def of_part(row: dict) -> str:
    rounded = json.loads(json.dumps(row), parse_float=lambda number: float(f"{float(number):.4g}"))
    return "\n".join(f"{key}: {value}" for key, value in rounded.items())


def of_arms(rows: list[dict]) -> str:
    lines = []
    for row in trained(rows):
        cells = [row["model"], row["arm"]]
        for key, form in NUMBERS.items():
            cells.append(formatted(row.get(key), form))
        notes = [row[key] for key in ("status", "note", "marked") if row.get(key, "ok") != "ok"]
        lines.append([*cells, "; ".join(notes)])
    return table(["model", "arm", *NUMBERS, "note"], lines)


def of_plans(rows: list[dict]) -> str:
    """Of arms with a plan: measured, planned, and the ratio."""
    heads = ["model", "arm"]
    for key in PLANNED:
        heads += [key, "planned", "ratio"]
    lines = []
    for row in trained(rows):
        if "planned" not in row:
            continue
        cells = [row["model"], row["arm"]]
        for key, form in PLANNED.items():
            cells.append(formatted(row.get(key), form))
            cells.append(formatted(row["planned"].get(key), form))
            cells.append(formatted(row.get("measured_over_planned", {}).get(key), ".3f"))
        lines.append([*cells, row["planned"].get("status", "")])
    return table([*heads, "note"], lines)


def trained(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["group"] not in CHECKS and row["arm"] not in PARTS]


def formatted(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table(heads: list[str], lines: list[list[str]]) -> str:
    """In Markdown; nothing without lines."""
    if not lines:
        return ""
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
