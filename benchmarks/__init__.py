"""Measurements that README and docs print; each file is a command."""

import json
import pathlib
import random
from collections.abc import Callable

REPO = pathlib.Path(__file__).parent.parent


def read_rows(path: pathlib.Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def interval(values: list, of: Callable[[list], float], draws: int = 2000) -> tuple[float, float]:
    """95 % of a figure of these values, by bootstrap."""
    chance = random.Random(0)
    drawn = sorted(of(chance.choices(values, k=len(values))) for _ in range(draws))
    return drawn[draws // 40], drawn[-1 - draws // 40]
