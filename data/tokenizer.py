"""Text <-> token ids: a sentencepiece model from a file, or one trained here."""

import io
import pathlib
import re
from collections.abc import Iterable, Iterator

from config import ConfigError

# sentencepiece writes a space as this character, and reads it back as a space
SPACE = "\u2581"
LINE = 1 << 14  # characters of a line that are trained on at once


def read_model(path: str | pathlib.Path) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: tokenizer cannot be read: {error.strerror}") from None


def what_it_is(content: bytes) -> str:
    """What a file is that was given for a sentencepiece model, as far as its first bytes tell."""
    first = content[:1000].lstrip()
    if re.match(rb"<(!doctype|html|\?xml)", first, re.I):
        return "an HTML page: a download that failed, perhaps for want of a login"
    if re.match(rb"version https://git-lfs", first):
        return "a git-lfs pointer: fetch the file itself (git lfs pull)"
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", first):
        return "a tiktoken vocabulary, as Llama 3's original tokenizer.model; that is not supported"
    if first.startswith(b"{"):
        return "JSON, as Hugging Face's tokenizer.json; that is not supported"
    return f"something that begins with {content[:16]!r}" if content else "empty"


class Tokenizer:
    """A sentencepiece model. encode() and decode() are inverse to each other for models trained here (byte fallback,
    no normalisation), also on text that holds sentencepiece's own space mark."""

    def __init__(self, path: str | pathlib.Path):
        """Raises ConfigError where the file is missing or is no sentencepiece model."""
        import sentencepiece

        self.model_bytes = read_model(path)
        self.model = sentencepiece.SentencePieceProcessor()
        try:
            self.model.LoadFromSerializedProto(self.model_bytes)
            self.vocab_size = self.model.vocab_size()
        except (RuntimeError, ValueError):
            self.vocab_size = 0
        if not self.vocab_size:
            raise ConfigError(f"{path}: is no sentencepiece model, but {what_it_is(self.model_bytes)}")
        self.bos = [self.model.bos_id()] if self.model.bos_id() >= 0 else []
        self.eos = [self.model.eos_id()] if self.model.eos_id() >= 0 else []
        mark = [self.model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        exact = self.model.unk_id() not in mark and self.model.encode("a", out_type=str)[:1] == ["a"]
        self.mark = mark if exact else None  # the space mark spelt in bytes, which decode() leaves alone

    def encode(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        """Ids of each text, without begin and end marks."""
        ids = self.model.encode(texts, num_threads=threads)
        if self.mark:
            for i, text in enumerate(texts):
                if SPACE in text:
                    ids[i] = self._encode_with_mark(text)
        return ids

    def _encode_with_mark(self, text: str) -> list[int]:
        first, *rest = self.model.encode(text.split(SPACE))
        return first + [token for part in rest for token in (*self.mark, *part)]

    def decode(self, ids: list[int]) -> str:
        """Text of ids; begin and end marks, and ids that the model does not have, give nothing."""
        return self.model.decode([i for i in ids if 0 <= i < self.vocab_size])


def train_tokenizer(texts: Iterable[str], vocab_size: int, threads: int) -> bytes:
    """Trains a byte-pair model of `vocab_size` pieces: no normalisation, all white space kept, unknown characters as
    bytes. Returns the model file's content. Raises ConfigError with a vocabulary that works where this one does not."""
    import sentencepiece

    model = io.BytesIO()
    failures = []

    def lines() -> Iterator[str]:
        try:
            for line in (line for text in texts for line in text.splitlines() if "\0" not in line):
                # in pieces, since sentencepiece leaves out lines beyond max_sentence_length (bytes) without a word
                yield from (line[i : i + LINE] for i in range(0, len(line), LINE))
        except ConfigError as error:  # sentencepiece would wrap it in an error of its own
            failures.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],  # lines are trained one by one, so no piece would hold their end
            max_sentence_length=4 * LINE,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        where = f"[model] vocab_size = {vocab_size}"
        if most := re.search(r"value <= (\d+)", str(error)):
            raise ConfigError(f"{where}: the text is too little to train so large a tokenizer; the largest that works "
                              f"is {most[1]}") from None
        if least := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
            raise ConfigError(f"{where}: too small for a tokenizer of this text; the smallest that works is "
                              f"{least[1]}") from None
        raise ConfigError(f"{where}: no tokenizer could be trained: {error}") from None
    if failures:
        raise failures[0]
    return model.getvalue()
