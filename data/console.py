"""What preparing prints to stderr: lines that stay, and one of progress."""

import contextlib
import shutil
import sys

CLEAR_LINE = "\x1b[K"


def report(text: str, stays: bool = True) -> None:
    """Prints to stderr, and ignores that it is closed or full. On a terminal the next line replaces
    one with stays=False."""
    end = "\n"
    if on_terminal():
        text = f"{CLEAR_LINE}{text}"
        if not stays:
            end = "\r"
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


def progress(name: str, manifest: dict, share: float, before: int, seconds: float) -> str:
    """A tqdm progress bar. share: fraction done, from 0 to 1. before: tokens from an earlier
    preparation."""
    # comes with `datasets`, which a machine that only trains need not have
    from tqdm import tqdm

    tokens = sum(manifest["tokens"].values())
    documents = sum(manifest["documents"].values())
    expected_tokens = tokens / share if share else None
    columns = None
    if on_terminal():
        columns = shutil.get_terminal_size().columns - 1
    return tqdm.format_meter(
        tokens,
        expected_tokens,
        seconds,
        initial=before,
        prefix=name,
        unit=" tokens",
        unit_scale=True,
        postfix=f"{documents:,} documents",
        ncols=columns,
    )


def on_terminal() -> bool:
    return bool(sys.stderr) and sys.stderr.isatty()
