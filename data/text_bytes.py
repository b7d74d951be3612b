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
    with contextlib.suppress(ImportError, ConfigError, IndexError):
        # IndexError: the data has no tokenizer
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
    tokenizer, total = Tokenizer(folder), 0
    for _, begin, end in stream.documents(0, stop)[rank::size]:
        ids = stream.read(begin, end)[1].tolist()
        first = ids[:1] if masked or begin == 0 else []
        text = text_before(tokenizer, ids, stop - begin)
        total += len(text.encode()) - len(tokenizer.decode(first).encode())
    return total


def text_before(tokenizer: Tokenizer, ids: list[int], count: int) -> str:
    """The text of a document's first `count` tokens, without a character that the last of them begins. That decodes to
    U+FFFD, as a U+FFFD of the text itself does."""
    whole = tokenizer.decode(ids)
    if count >= len(ids):
        return whole
    cut = tokenizer.decode(ids[:count])
    length = 0
    while length < min(len(whole), len(cut)) and whole[length] == cut[length]:
        length += 1
    ends_inside = cut + tokenizer.decode(ids[count:]) != whole
    if length == len(cut) and cut.endswith("\ufffd") and ends_inside:
        length -= 1
    return whole[:length]
