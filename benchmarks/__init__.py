"""Measurements of what the trainer promises; each file is a command."""

from schema import positive


def count(text: str) -> int:
    """A number from 1 on of the command line, for argparse."""
    return positive(text, int)
