"""What preparing prints to stderr: lines that stay, and one of progress."""

import contextlib
import shutil
import sys


def report(text: str, stays: bool = True) -> None:
    """Prints to stderr; on a terminal, overwrites a line with stays=False. Ignores a closed or full stderr."""
    terminal = on_terminal()
    end = "\n" if stays or not terminal else "\r"
    with contextlib.suppress(OSError, ValueError):
        print(f"\x1b[K{text}" if terminal else text, end=end, file=sys.stderr, flush=True)


def progress(name: str, manifest: dict, share: float, before: int, seconds: float) -> str:
    """A tqdm progress bar. share: fraction done, from 0 to 1; before: tokens from an earlier preparation."""
    from tqdm import tqdm  # comes with `datasets`, which a machine that only trains need not have

    tokens = sum(manifest["tokens"].values())
    documents = sum(manifest["documents"].values())
    return tqdm.format_meter(
        tokens,
        tokens / share if share else None,
        seconds,
        initial=before,
        prefix=name,
        unit=" tokens",
        unit_scale=True,
        postfix=f"{documents:,} documents",
        ncols=shutil.get_terminal_size().columns - 1 if on_terminal() else None,
    )


def on_terminal() -> bool:
    return bool(sys.stderr) and sys.stderr.isatty()
