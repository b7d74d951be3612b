"""Measurements that README and docs print; each file is a command."""

import pathlib
import random
from collections.abc import Callable

REPO = pathlib.Path(__file__).parent.parent


def interval(values: list, of: Callable[[list], float], draws: int = 2000) -> tuple[float, float]:
    """95 % of a figure of these values, by bootstrap."""
    chance = random.Random(0)
    drawn = sorted(of(chance.choices(values, k=len(values))) for _ in range(draws))
    return drawn[draws // 40], drawn[-1 - draws // 40]
