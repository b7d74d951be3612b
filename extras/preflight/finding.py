"""What a check returns: a line that says where, what value, which rule and what to type."""

from typing import NamedTuple


class Finding(NamedTuple):
    text: str
    is_error: bool  # the run would fail for certain


def error(text: str) -> Finding:
    return Finding(text, is_error=True)


def warning(text: str) -> Finding:
    return Finding(text, is_error=False)
