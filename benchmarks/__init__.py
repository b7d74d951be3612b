"""Measurements of what the trainer promises; each file is a command."""

import pathlib

from tools.planner.arguments import positive

REPO = pathlib.Path(__file__).parent.parent


def count(text: str) -> int:
    """A number from 1 on of the command line, for argparse."""
    return positive(text, int)
