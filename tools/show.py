"""Prints what a run reads in a step: each sample as text, document by document.

    ./run_train.sh -m show configs/tiny.toml --step 3

Prints the samples of all ranks, in order.
"""

import io
import sys
from collections.abc import Iterator

import config
from config import ConfigError, run_tool
from data.dataset import PreparedDataset
from data.order import SamplePosition
from data.tokens import Span
from system import print_line, printable
from tools.prepare.formats import row_format
from tools.prepare.tokenizer import Tokenizer


def samples(cfg: config.Config, step: int) -> Iterator[str]:
    """Yields the text to print for each sample of a step (from 1). Raises ConfigError."""
    dataset = PreparedDataset(cfg)
    if not dataset.tokenizer_files:
        raise ConfigError("[data] tokenizer: is needed to print token files as text")
    tokenizer = Tokenizer(dataset.tokenizer_files[0].parent)
    rows = row_format(cfg.data)
    batch_size = cfg.train.global_batch_size
    for number in range((step - 1) * batch_size, step * batch_size):
        position = dataset.position(number)
        span = dataset.windows(dataset.sources[position.source].stream).span(position.window)
        lines = [heading(dataset, step, number, position, span)]
        for line in rows.lines(span, tokenizer):
            lines.append(printable(line))
        yield "\n".join(lines)


def heading(
    dataset: PreparedDataset, step: int, number: int, position: SamplePosition, span: Span
) -> str:
    """The heading of a sample: its number, epoch, source, window and tokens."""
    sources = dataset.data.sources
    of_source = f" of {sources[position.source].source}" if sources else ""
    last = span.stop - 1  # it is only a target
    return (
        f"=== step {step}, sample {number}: epoch {position.epoch}{of_source}, window "
        f"{position.window}, tokens {span.start} to {last}"
    )


def main(argv: list[str]) -> int:
    parser = config.argument_parser()
    parser.add_argument("--step", type=int, default=1)
    args, cfg = config.from_command_line(argv, __doc__, parser)
    if args.step < 1:
        raise ConfigError(f"--step {args.step}: steps count from 1")
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None if it was closed
        # the terminal's encoding may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    for text in samples(cfg, args.step):
        print_line(text)
    return 0


if __name__ == "__main__":
    run_tool(main)
