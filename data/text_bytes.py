"""The bytes of text behind a validation loss: bits per byte, which compare models with different tokenizers."""

import contextlib
import functools
import math
import pathlib

import config
from config import ConfigError
from data.dataset import Dataset
from data.loader import validation_tokens
from data.tokenizer import Tokenizer
from data.tokens import TokenStream


def bytes_of_targets(cfg: config.Config, dataset: Dataset, rank: int, ranks: int) -> list[float]:
    """Of each source, this rank's share of the bytes that the validation targets encode; NaN if it cannot decode
    them, or they are answers in conversations."""
    with contextlib.suppress(
        ImportError, ConfigError, IndexError
    ):  # IndexError: the data has no tokenizer
        folder, masked = dataset.tokenizer_files[0].parent, cfg.data.document_mask
        if not cfg.data.messages_field:
            return [
                target_bytes(stream, validation_tokens(stream, cfg), masked, folder, rank, ranks)
                for stream in dataset.validation
            ]
    return [math.nan] * len(dataset.validation)


@functools.cache
def target_bytes(
    stream: TokenStream, stop: int, masked: bool, folder: pathlib.Path, rank: int, size: int
) -> int:
    """UTF-8 bytes of the text that a stream's tokens 1 ... stop-1 encode, in every size-th document; the sum over the
    ranks is that of the whole. BOS and EOS have none, nor has a character that `stop` cuts. masked: the first token of
    a document is no target. Raises ConfigError if documents or tokenizer cannot be read."""
    tokenizer, found = Tokenizer(folder), 0
    for _, begin, end in stream.documents(0, stop)[rank::size]:
        ids = stream.read(begin, min(end, stop))[1].tolist()
        first = ids[:1] if masked or begin == 0 else []
        text = tokenizer.decode(ids)
        found += len((text.rstrip("\ufffd") if end > stop else text).encode()) - len(
            tokenizer.decode(first).encode()
        )
    return found
