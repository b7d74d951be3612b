"""Text <-> token ids: a sentencepiece model from a file, or trained here; tokenizer.json by tokenizer_json.py."""

import collections
import hashlib
import io
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from config import ConfigError
from data.hub import local

TOKENIZERS = ("tokenizer.model", "tokenizer.json")
# sentencepiece writes a space as this character, and decodes the character to a space
SPACE = "\u2581"
LINE = 1 << 14  # characters; a longer line is split for training


def local_path(name: str) -> pathlib.Path:
    """The folder or file that an option names; of a Hugging Face repository the folder in the hub's cache, with its
    tokenizer and settings, fetched if they are not there. Raises ConfigError."""
    return local(name)


def tokenizer_files(path: str | pathlib.Path) -> dict[str, bytes]:
    """Content, by file name, of tokenizer.model, or of tokenizer.json and (if present) tokenizer_config.json.
    `path`: the file, a folder that holds one, or the id of a Hugging Face repository. Raises ConfigError."""
    path = local_path(str(path))
    try:
        found = (
            [path / name for name in TOKENIZERS if (path / name).exists()]
            if path.is_dir()
            else [path]
        )
        if not found:
            raise ConfigError(f"{path}: holds neither tokenizer.model nor tokenizer.json")
        if len(found) == 1 and not (content := found[0].read_bytes()).lstrip().startswith(b"{"):
            return {"tokenizer.model": content}
        from data.tokenizer_json import choose_files

        return choose_files(found)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: tokenizer cannot be read: {error.strerror}"
        ) from None


def tokenizer_hash(contents: dict[str, bytes]) -> str:
    """SHA-256 of a tokenizer's files, as tokenizer_files() returns them."""
    return hashlib.sha256(b"".join(contents.values())).hexdigest()


class Tokenizer:
    """Text <-> ids, by sentencepiece or `tokenizers`; lossless for models trained here (unless on text without a space,
    which they then decode as SPACE) and byte-level ones (Llama 3's).
    bos, eos: the ids before and after a document, one or none each. Raises ConfigError."""

    def __init__(self, path: str | pathlib.Path):
        self.path, self.files = path, tokenizer_files(path)
        self.model: Any
        # ids to write for SPACE, if the model would make a space of it
        self.space: list[int] | None = None
        if "tokenizer.json" in self.files:
            from data.tokenizer_json import JsonModel

            self.model = JsonModel(path, self.files)
            self.vocab_size, self.bos, self.eos = self.model.size, self.model.bos, self.model.eos
        else:
            self._load_sentencepiece(self.files["tokenizer.model"])

    def decode(self, ids: list[int]) -> str:
        """Text of ids; BOS, EOS and ids outside the vocabulary decode to nothing."""
        return self.model.decode([i for i in ids if 0 <= i < self.vocab_size])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS and EOS. Names of special tokens in a text are encoded as plain text."""
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
            raise ConfigError(
                f"{self.path}: is no tokenizer (an HTML page, git-lfs pointer or tiktoken vocabulary?): "
                f"it begins with {content[:24]!r}"
            )
        self.bos, self.eos = (
            [i] if i >= 0 else [] for i in (self.model.bos_id(), self.model.eos_id())
        )
        # SPACE as byte tokens, which decode() keeps; only if the model has byte fallback and adds no dummy prefix (a
        # vocabulary of another script has no "a", only its byte)
        space = [self.model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        exact = self.model.unk_id() not in space and self.model.encode("a", out_type=str)[0] in (
            "a",
            "<0x61>",
        )
        self.space = space if exact else None


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
            sentence_iterator=iter(
                lines.popleft, None
            ),  # frees each line when sentencepiece has copied it
            model_writer=model,
            vocab_size=max(vocab_size, 3),
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=[
                "\n"
            ],  # training sees single lines, so it would learn no entry for the line end
            max_sentence_length=4 * LINE,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
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
