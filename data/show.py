"""Prints what a run reads in a step: each sample as text, document by document.

    python -m data.show configs/tiny.toml --step 3

The samples of all ranks together, in their order.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from typing import Any

import config
from config import ConfigError, run_tool
from data.dataset import data_folders, open_dataset
from data.tokenizer import Tokenizer
from files import print_line, printable


def samples(cfg: config.Config, step: int) -> Iterator[str]:
    """Yields the text to print for each sample of a step (from 1). Raises ConfigError."""
    t, dataset = cfg.train, open_dataset(cfg)
    if dataset.growing and not dataset.growing.covers(step):
        raise ConfigError(
            f"--step {step}: its text is not prepared yet ({dataset.growing.waits_for(step)}); `python "
            "-m data.prepare CONFIG` prepares it"
        )
    show = show_text
    if cfg.data.messages_field:
        from extras.chat.packing import show_conversations as show
    order, tokenizer = dataset.order, Tokenizer(data_folders(cfg)[0])
    for number in range((step - 1) * t.global_batch_size, step * t.global_batch_size):
        source, epoch, window = order(number)
        stream, first, stop = dataset.train[source].span(window, t.seq_len)
        last = stop - 1  # a target only
        of = f" of {cfg.data.sources[source].source}" if cfg.data.sources else ""
        lines = [
            f"=== step {step}, sample {number}: epoch {epoch}{of}, window {window}, tokens {first} to "
            f"{last}"
        ]
        yield "\n".join([*lines, *map(printable, show(stream, first, stop, tokenizer))])


def show_text(stream: Any, first: int, stop: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the lines of each document in a window."""
    _, ids = stream.read(first, stop)
    for document, start, end in stream.documents(first, stop):
        begins, ends = max(start, first), min(end, stop)
        cut = " (begins before)" * (start < first) + " (continues)" * (end > stop)
        yield f"--- document {document}, {ends - begins} of its {end - start} tokens{cut}"
        yield tokenizer.decode(ids[begins - first : ends - first].tolist())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step", type=int, default=1)
    args, rest = parser.parse_known_args(argv)
    _, cfg = config.from_command_line(rest, __doc__, tool=True)
    if args.step < 1:
        raise ConfigError(f"--step {args.step}: steps count from 1")
    if isinstance(sys.stdout, io.TextIOWrapper):  # None: closed
        # for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    for text in samples(cfg, args.step):
        print_line(text)
    return 0


if __name__ == "__main__":
    run_tool(main)
