"""Text <-> token ids: a sentencepiece model or a tokenizer.json from a file, or a model trained here."""

import io
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from config import ConfigError

# sentencepiece writes a space as this character, and reads it back as a space
SPACE = "\u2581"
END_MARKS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")  # Llama 3; Llama 2; GPT-2 and SmolLM; Gemma
LINE = 1 << 14  # characters of a line that are trained on at once


def tokenizer_files(path: str | pathlib.Path) -> dict[str, bytes]:
    """What makes up a tokenizer, by the names under which it is kept: tokenizer.model, or tokenizer.json and, where it
    lies beside, tokenizer_config.json. `path`: the file, or a folder that holds one. Raises ConfigError."""
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            found = [path / name for name in ("tokenizer.model", "tokenizer.json") if (path / name).exists()]
            if not found:
                raise ConfigError(f"{path}: holds neither tokenizer.model nor tokenizer.json")
            # a sentencepiece model begins with a line feed, the tag of its first field; Llama 3's namesake does not
            path = found[-1] if len(found) > 1 and found[0].read_bytes()[:1] != b"\n" else found[0]
        content = path.read_bytes()
        if not content.lstrip().startswith(b"{"):
            return {"tokenizer.model": content}
        marks = path.with_name("tokenizer_config.json")
        return {"tokenizer.json": content, **({marks.name: marks.read_bytes()} if marks.exists() else {})}
    except OSError as error:
        raise ConfigError(f"{path}: tokenizer cannot be read: {error.strerror}") from None


def what_it_is(content: bytes) -> str:
    """What a file is that was given for a tokenizer, as far as its first bytes tell."""
    first = content[:1000].lstrip()
    if re.match(rb"<(!doctype|html|\?xml)", first, re.I):
        return "an HTML page: a download that failed, perhaps for want of a login"
    if re.match(rb"version https://git-lfs", first):
        return "a git-lfs pointer: fetch the file itself (git lfs pull)"
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", first):
        return "a tiktoken vocabulary, as Llama 3's original/tokenizer.model; take the tokenizer.json beside it"
    return f"something that begins with {content[:16]!r}" if content else "empty"


class Tokenizer:
    """Text <-> ids, by sentencepiece or by Hugging Face's `tokenizers`.

    bos, eos: the ids, one or none each, that stand before and after a document. Those of a sentencepiece model are its
    own. A tokenizer.json puts before a text what its post-processor does (Llama: the begin mark; SmolLM: nothing), and
    after a document what that does, else its end-of-text mark, as tokenizer_config.json or the usual names tell.
    """

    def __init__(self, path: str | pathlib.Path):
        """Raises ConfigError where it is missing, or is none."""
        self.files = tokenizer_files(path)
        fast = "tokenizer.json" in self.files
        self.model = (_HuggingFace if fast else _SentencePiece)(path, self.files)
        self.vocab_size, self.bos, self.eos = self.model.vocab_size, self.model.bos, self.model.eos

    def encode(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        """Ids of each text, without begin and end marks. What looks like a mark in the text is text."""
        return self.model.encode(texts, threads)

    def decode(self, ids: list[int]) -> str:
        """Text of ids; begin and end marks, and ids that the tokenizer does not have, give nothing."""
        return self.model.decode([i for i in ids if 0 <= i < self.vocab_size])


class _SentencePiece:
    """encode() and decode() are inverse to each other for models trained here (byte fallback, no normalisation), also
    on text that holds sentencepiece's own space mark."""

    def __init__(self, path: str | pathlib.Path, files: dict[str, bytes]):
        import sentencepiece

        content = files["tokenizer.model"]
        self.model = sentencepiece.SentencePieceProcessor()
        try:
            self.model.LoadFromSerializedProto(content)
            self.vocab_size = self.model.vocab_size()
        except (RuntimeError, ValueError):
            self.vocab_size = 0
        if not self.vocab_size:
            raise ConfigError(f"{path}: is no tokenizer, but {what_it_is(content)}")
        self.bos = [self.model.bos_id()] if self.model.bos_id() >= 0 else []
        self.eos = [self.model.eos_id()] if self.model.eos_id() >= 0 else []
        mark = [self.model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        exact = self.model.unk_id() not in mark and self.model.encode("a", out_type=str)[:1] == ["a"]
        self.mark = mark if exact else None  # the space mark spelt in bytes, which decode() leaves alone

    def encode(self, texts: list[str], threads: int) -> list[list[int]]:
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
        return self.model.decode(ids)


class _HuggingFace:
    """A byte-level tokenizer.json, as Llama 3's and SmolLM's, is inverse to itself on any text."""

    def __init__(self, path: str | pathlib.Path, files: dict[str, bytes]):
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(f"{path}: needs the package `tokenizers`: {sys.executable} -m pip install tokenizers"
                              ) from None

        self.path = path
        try:
            self.model = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(f"{path}: is no tokenizer.json that `tokenizers` can read: {error}") from None
        self.model.no_truncation()
        self.model.no_padding()
        if getattr(self.model.model, "dropout", None):
            self.model.model.dropout = None  # the same text, the same ids
        self.vocab_size = max(self.model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size < 2**31:
            raise ConfigError(f"{path}: has {self.vocab_size} ids; they must be at least one, and fit into 31 bits")
        try:
            settings = json.loads(files.get("tokenizer_config.json", b"{}"))
            named = settings.get("eos_token")
            named = named.get("content") if isinstance(named, dict) else named
        except (ValueError, AttributeError, RecursionError):
            raise ConfigError(f"{path}: tokenizer_config.json beside it is no JSON object") from None
        self.bos, self.eos = self._marks()
        for name in (named, *END_MARKS):
            if not self.eos and isinstance(name, str) and (mark := self.model.token_to_id(name)) is not None:
                self.eos = [mark]
        # After the marks are known: from here on their names in a text are text.
        self.model.encode_special_tokens = True

    def _marks(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text: seen on one of which something is made."""
        for probe in ("a", "the", "0", " ", *sorted(self.model.get_vocab(with_added_tokens=False))[:100]):
            [plain] = self.encode([probe], 1)
            if plain:
                whole = self.model.encode(probe).ids
                before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
                return whole[:before], whole[before + len(plain) :]
        raise ConfigError(f"{self.path}: makes nothing of any text that was tried")

    def encode(self, texts: list[str], threads: int) -> list[list[int]]:
        try:
            return [self.model.encode(text, add_special_tokens=False).ids for text in texts]
        except Exception as error:  # as for a word that is unknown where nothing stands for those
            raise ConfigError(f"{self.path}: its tokenizer fails on a text: {error}") from None

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)


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
        except (ConfigError, OSError) as error:  # sentencepiece would wrap it in an error of its own
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
