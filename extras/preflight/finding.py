"""What a check returns: a line that says where, what value, which rule and what to type."""

from typing import NamedTuple

import config
from system.machine import visible_gpus


class Finding(NamedTuple):
    text: str
    is_error: bool  # the run would fail for certain


def error(text: str) -> Finding:
    return Finding(text, is_error=True)


def warning(text: str) -> Finding:
    return Finding(text, is_error=False)


def trains_on_gpus(cfg: config.Config) -> bool:
    """Whether a run would train on this machine's GPUs."""
    return cfg.run.device == "cuda" or (cfg.run.device == "auto" and visible_gpus() > 0)
