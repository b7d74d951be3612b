"""Text <-> token ids: a sentencepiece model or a tokenizer.json from a file, or a model trained here."""

import collections
import contextlib
import functools
import io
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable

import config
from config import ConfigError
from data.tokens import TokenStream

TOKENIZERS = ("tokenizer.model", "tokenizer.json")
SPACE = "\u2581"  # sentencepiece writes a space as this character, and decodes the character to a space
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")  # Llama 3; Llama 2; GPT-2 and SmolLM; Gemma
LINE = 1 << 14  # characters; a longer line is split for training


def local_path(name: str) -> pathlib.Path:
    """The folder or file that an option names; of a Hugging Face repository the folder in the hub's cache, with its
    tokenizer and settings, fetched if they are not there. Raises ConfigError."""
    if not config.has("huggingface/"):
        return pathlib.Path(name)
    from huggingface.hub import local

    return local(name)


def tokenizer_files(path: str | pathlib.Path) -> dict[str, bytes]:
    """Content, by file name, of tokenizer.model, or of tokenizer.json and (if present) tokenizer_config.json.
    `path`: the file, a folder that holds one, or the id of a Hugging Face repository. Raises ConfigError."""
    path = local_path(str(path))
    try:
        if path.is_dir():
            found = [path / name for name in TOKENIZERS if (path / name).exists()]
            if not found:
                raise ConfigError(f"{path}: holds neither tokenizer.model nor tokenizer.json")
            # A sentencepiece model begins with a line feed, the tag of its first field; Llama 3's file does not. A
            # tokenizer.json next to one is used if a fine-tune has added tokens that its model has rows for.
            path = found[0] if found[0].read_bytes()[:1] == b"\n" and not has_added_tokens(found[-1]) else found[-1]
        content = path.read_bytes()
        if not content.lstrip().startswith(b"{"):
            return {"tokenizer.model": content}
        settings = path.with_name("tokenizer_config.json")
        return {"tokenizer.json": content, **({settings.name: settings.read_bytes()} if settings.exists() else {})}
    except OSError as error:
        raise ConfigError(f"{path}: tokenizer cannot be read: {error.strerror}") from None


def has_added_tokens(path: pathlib.Path) -> bool:
    """Whether a tokenizer.json has tokens beyond its model's vocabulary, and the folder's config.json, if any, rows for
    them: a padding token may have none. Raises OSError."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        content, settings = json.loads(path.read_bytes()), path.with_name("config.json")
        rows = json.loads(settings.read_bytes())["vocab_size"] if settings.exists() else math.inf
        last = max(token["id"] for token in content["added_tokens"])
        return len(content["model"]["vocab"]) <= last < rows
    return False


class Tokenizer:
    """Text <-> ids, by sentencepiece or `tokenizers`; lossless for models trained here (unless on text without a space,
    which they then decode as SPACE) and byte-level ones (Llama 3's).
    bos, eos: the ids before and after a document, one or none each. Raises ConfigError."""

    def __init__(self, path: str | pathlib.Path):
        self.path, self.files = path, tokenizer_files(path)
        if "tokenizer.json" in self.files:
            self._load_json()
        else:
            self._load_sentencepiece(self.files["tokenizer.model"])

    def decode(self, ids: list[int]) -> str:
        """Text of ids; BOS, EOS and ids outside the vocabulary decode to nothing."""
        return self.model.decode([i for i in ids if 0 <= i < self.vocab_size])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS and EOS. Names of special tokens in a text are encoded as plain text."""
        if "tokenizer.json" in self.files:
            try:
                return [self.model.encode(text, add_special_tokens=False).ids for text in texts]
            except Exception as error:  # e.g. an unknown word, if the vocabulary has no UNK entry
                raise ConfigError(f"{self.path}: its tokenizer fails on a text: {error}") from None
        ids = self.model.encode(texts)
        for i, text in enumerate(texts):
            if self.space and SPACE in text:
                first, *rest = self.model.encode(text.split(SPACE))
                ids[i] = first + [token for part in rest for token in (*self.space, *part)]
        return ids

    def _load_sentencepiece(self, content: bytes) -> None:
        import sentencepiece

        self.model = sentencepiece.SentencePieceProcessor()
        try:
            self.model.LoadFromSerializedProto(content)
            self.vocab_size = self.model.vocab_size()
        except (RuntimeError, ValueError):
            self.vocab_size = 0
        if not self.vocab_size:
            raise ConfigError(f"{self.path}: is no tokenizer (an HTML page, git-lfs pointer or tiktoken vocabulary?): "
                              f"it begins with {content[:24]!r}")
        self.bos, self.eos = ([i] if i >= 0 else [] for i in (self.model.bos_id(), self.model.eos_id()))
        # SPACE as byte tokens, which decode() keeps; only if the model has byte fallback and adds no dummy prefix (a
        # vocabulary of another script has no "a", only its byte)
        space = [self.model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        exact = self.model.unk_id() not in space and self.model.encode("a", out_type=str)[0] in ("a", "<0x61>")
        self.space = space if exact else None

    def _load_json(self) -> None:
        try:
            import tokenizers
        except ImportError:
            install = f"{sys.executable} -m pip install tokenizers"
            raise ConfigError(f"{self.path}: needs the package `tokenizers`: {install}") from None
        try:
            self.model = tokenizers.Tokenizer.from_str(self.files["tokenizer.json"].decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(f"{self.path}: is no tokenizer.json that `tokenizers` can read: {error}") from None
        self.model.no_truncation()
        self.model.no_padding()
        if getattr(self.model.model, "dropout", None):
            self.model.model.dropout = None  # the same text, the same ids
        self.vocab_size = max(self.model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size < 2**31:
            raise ConfigError(f"{self.path}: has {self.vocab_size} ids; they must be at least one, and fit in 31 bits")
        try:
            named = json.loads(self.files.get("tokenizer_config.json", b"{}")).get("eos_token")
        except (ValueError, AttributeError, RecursionError):
            raise ConfigError(f"{self.path}: tokenizer_config.json beside it is no JSON object") from None
        # BOS and EOS are what the post-processor adds around a text (here the first that yields any tokens). If it adds
        # no EOS: the token that tokenizer_config.json names, else the first of EOS_NAMES
        probes = ("a", *sorted(self.model.get_vocab(with_added_tokens=False))[:100])
        probe, plain = next(((text, ids) for text in probes for ids in self.encode([text]) if ids), (None, []))
        if probe is None:
            raise ConfigError(f"{self.path}: makes nothing of any text that was tried")
        ids = self.model.encode(probe).ids
        before = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
        self.bos, self.eos = ids[:before], ids[before + len(plain) :]
        for name in (named.get("content") if isinstance(named, dict) else named, *EOS_NAMES):
            if not self.eos and isinstance(name, str) and (eos := self.model.token_to_id(name)) is not None:
                self.eos = [eos]
        self.model.encode_special_tokens = True  # from now on their names in a text are encoded as plain text


@functools.cache
def target_bytes(stream: TokenStream, stop: int, masked: bool, folder: pathlib.Path, rank: int, size: int) -> int:
    """UTF-8 bytes of the text that a stream's tokens 1 ... stop-1 encode, in every size-th document; the sum over the
    ranks is that of the whole. BOS and EOS have none, nor has a character that `stop` cuts. masked: the first token of
    a document is no target. Raises ConfigError if documents or tokenizer cannot be read."""
    tokenizer, found = Tokenizer(folder), 0
    for _, begin, end in stream.documents(0, stop)[rank::size]:
        ids = stream.read(begin, min(end, stop))[1].tolist()
        first = ids[:1] if masked or begin == 0 else []
        text = tokenizer.decode(ids)
        found += len((text.rstrip("\ufffd") if end > stop else text).encode()) - len(tokenizer.decode(first).encode())
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a BPE model. Returns the model file's content. Raises ConfigError, naming a vocabulary size that works if
    this one does not."""
    import sentencepiece

    # Read before training: sentencepiece would turn an error of the source, or Ctrl-C, into a RuntimeError.
    model, lines = io.BytesIO(), collections.deque()
    for text in texts:
        for line in text.splitlines():
            if "\0" not in line:
                # split, since sentencepiece silently drops lines longer than max_sentence_length (bytes)
                lines.extend(line[i : i + LINE] for i in range(0, len(line), LINE))
    lines.append(None)  # the end
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines.popleft, None),  # frees each line when sentencepiece has copied it
            model_writer=model, vocab_size=max(vocab_size, 3), model_type="bpe",
            byte_fallback=True, character_coverage=0.9999, normalization_rule_name="identity",
            remove_extra_whitespaces=False, add_dummy_prefix=False, allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],  # training sees single lines, so it would learn no entry for the line end
            max_sentence_length=4 * LINE, num_threads=os.cpu_count() or 1, minloglevel=2,
        )
    except RuntimeError as error:
        if most := re.search(r"value <= (\d+)", str(error)):
            text = f"the text is too little to train so large a tokenizer; the largest that works is {most[1]}"
        elif least := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
            text = f"too small for a tokenizer of this text; the smallest that works is {least[1]}"
        else:
            text = f"no tokenizer could be trained: {error}"
        raise ConfigError(f"[model] vocab_size = {vocab_size}: {text}") from None
    return model.getvalue()
