"""Trains a sentencepiece tokenizer on the texts of sources."""

import collections
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import config
from config import ConfigError
from system import print_error
from tools.prepare.source import ByteRange, documents, list_files

LONGEST_LINE = 1 << 14  # characters; a longer line is split for training


def train_on_sources(
    sources: Sequence[config.Data], weights: Sequence[float], vocab_size: int
) -> bytes:
    """Trains a tokenizer on the start of each source, in proportion to its weight.

    Reads 800 characters per vocabulary entry, and at least 4 million; more would delay the run.
    Returns the bytes of the model file. Raises ConfigError.
    """
    characters = max(4_000_000, vocab_size * 800)
    names = ", ".join(source.source for source in sources)
    print_error(
        f"training a tokenizer of {vocab_size:,} vocabulary entries on up to "
        f"{characters / 1e6:,.0f} MB of {names}"
    )
    return train_tokenizer(first_documents(sources, weights, characters), vocab_size)


def first_documents(
    sources: Sequence[config.Data], weights: Sequence[float], characters: int
) -> Iterator[str]:
    """Yields documents from the start of each source until they have `characters` characters in
    total."""
    for data, weight in zip(sources, weights):
        share = characters * (weight / sum(weights))
        read = 0
        for text in documents(data, map(ByteRange, list_files(data)[0])):
            yield text
            read += len(text)
            if read >= share:
                break


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a BPE model with sentencepiece. Returns the bytes of its file.

    Raises ConfigError, which suggests the nearest vocabulary size that works.
    """
    import sentencepiece

    model = io.BytesIO()
    # Read all texts before training, because sentencepiece turns an error of the source, and
    # Ctrl-C, into a RuntimeError.
    lines: collections.deque[str | None] = collections.deque()
    for text in texts:
        lines.extend(training_lines(text))
    if not lines:
        raise ConfigError("[data] source: holds no text to train a tokenizer on")
    lines.append(None)  # the end
    try:
        sentencepiece.SentencePieceTrainer.train(
            # frees each line once sentencepiece has copied it
            sentence_iterator=iter(lines.popleft, None),
            model_writer=model,
            vocab_size=max(vocab_size, 3),
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            # training sees single lines, so it would learn no entry for the line end
            user_defined_symbols=["\n"],
            max_sentence_length=4 * LONGEST_LINE,  # bytes
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = training_problem(str(error))
        raise ConfigError(f"[model] vocab_size = {vocab_size}: {reason}") from None
    return model.getvalue()


def training_lines(text: str) -> Iterator[str]:
    """Yields the lines of a text for training. Splits long lines, which sentencepiece silently
    drops, and skips lines with a null character, which it cannot read."""
    for line in text.splitlines():
        if "\0" in line:
            continue
        for i in range(0, len(line), LONGEST_LINE):
            yield line[i : i + LONGEST_LINE]


def training_problem(error: str) -> str:
    """Explains an error of sentencepiece's training, with a vocabulary size that works."""
    largest = re.search(r"value <= (\d+)", error)
    if largest:
        return (
            "the text is too little to train so large a tokenizer; the largest that works: "
            f"--model.vocab_size={largest[1]}"
        )
    smallest = re.search(r"smaller than required_chars. \d+ vs (\d+)", error)
    if smallest:
        return (
            "is too few for the bytes and the characters of the text; the smallest that works: "
            f"--model.vocab_size={smallest[1]}"
        )
    return f"no tokenizer could be trained: {error}"
