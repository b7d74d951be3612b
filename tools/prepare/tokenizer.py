"""Text <-> token ids, with a sentencepiece model or a tokenizer.json."""

import hashlib
import os
import pathlib
from typing import Any

from config import ConfigError
from tools.prepare.tokenizer_json import SPACE, TOKEN_MAP, JsonModel, choose_file, json_files

TOKENIZERS = ("tokenizer.model", "tokenizer.json")


def tokenizer_files(path: str | pathlib.Path) -> dict[str, bytes]:
    """Reads tokenizer.model, or tokenizer.json and (if present) the settings next to it.

    Returns their bytes by file name. path: the file, a folder that contains it, or the id of a
    Hugging Face repository. Raises ConfigError.
    """
    if not os.path.exists(path):
        from extras.huggingface.hub import local

        path = local(str(path))
    path = pathlib.Path(path)
    try:
        candidates = [path]
        if path.is_dir():
            candidates = [path / name for name in TOKENIZERS if (path / name).exists()]
        if not candidates:
            raise ConfigError(f"{path}: holds neither tokenizer.model nor tokenizer.json")
        file = candidates[0]
        if len(candidates) == 2:
            file = choose_file(*candidates)
        file_bytes = file.read_bytes()
        if file_bytes.lstrip().startswith(b"{"):
            return json_files(file, file_bytes)
        return {"tokenizer.model": file_bytes}
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: tokenizer cannot be read: {error.strerror}"
        ) from None


def tokenizer_hash(contents: dict[str, bytes]) -> str:
    """SHA-256 of the files of tokenizer_files(). Skips special_tokens_map.json, which repeats
    tokenizer_config.json."""
    hashed = [content for name, content in contents.items() if name != TOKEN_MAP]
    return hashlib.sha256(b"".join(hashed)).hexdigest()


class Tokenizer:
    """Text <-> ids, by sentencepiece or `tokenizers`.

    Lossless for byte-level models (Llama 3's) and for models trained here, with one exception: a
    model trained on text without a space decodes a space as SPACE.
    """

    def __init__(self, path: str | pathlib.Path):
        """path: as for tokenizer_files(). Raises ConfigError."""
        self.path = path
        self.files = tokenizer_files(path)
        self.model: Any  # JsonModel or sentencepiece.SentencePieceProcessor
        self.vocab_size: int
        # the ids before and after a document; empty if the tokenizer has no such token
        self.bos: list[int]
        self.eos: list[int]
        self.unknown: int  # the id of UNK; -1 if there is none
        # the ids for the character SPACE, if the model itself would decode it to a space
        self.space: list[int] | None = None
        if "tokenizer.json" in self.files:
            self.model = JsonModel(path, self.files)
            self.vocab_size = self.model.vocab_size
            self.bos = self.model.bos
            self.eos = self.model.eos
            self.unknown = self.model.unknown
        else:
            self._load_sentencepiece(self.files["tokenizer.model"])

    def require_size(self, vocab_size: int) -> None:
        """Raises ConfigError if the tokenizer has more than model.vocab_size entries."""
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"[model] vocab_size = {vocab_size}: smaller than the tokenizer {self.path}, of "
                f"{self.vocab_size} entries"
            )

    def decode(self, ids: list[int]) -> str:
        """The text of ids. BOS, EOS and ids outside the vocabulary decode to nothing."""
        return self.model.decode([i for i in ids if 0 <= i < self.vocab_size])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without BOS and EOS. Encodes names of special tokens as plain
        text."""
        encoded = self.model.encode(texts)
        for i, text in enumerate(texts):
            if self.space and SPACE in text:
                ids, *following = self.model.encode(text.split(SPACE))
                for part in following:
                    ids += self.space + part
                encoded[i] = ids
        return encoded

    def _load_sentencepiece(self, content: bytes) -> None:
        """Loads the bytes of a tokenizer.model. Raises ConfigError."""
        import sentencepiece

        # one thread, because prepare.py already uses every core
        self.model = sentencepiece.SentencePieceProcessor(num_threads=1)
        try:
            self.model.LoadFromSerializedProto(content)
            self.vocab_size = self.model.vocab_size()
        except (RuntimeError, ValueError):
            self.vocab_size = 0
        if not self.vocab_size:
            raise ConfigError(
                f"{self.path}: is no tokenizer (an HTML page, a tiktoken vocabulary?): it begins "
                f"with {content[:24]!r}"
            )
        bos = self.model.bos_id()
        eos = self.model.eos_id()
        # sentencepiece returns -1 for a token that a model lacks
        self.bos = [bos] if bos >= 0 else []
        self.eos = [eos] if eos >= 0 else []
        self.unknown = self.model.unk_id()
        self.space = self._space_bytes()

    def _space_bytes(self) -> list[int] | None:
        """The byte tokens of a sentencepiece model that decode to the character SPACE.

        None for a model without byte fallback. None also for a model that adds a space in front of
        a text, since encode() would add it to each segment of a text, too.
        """
        ids = [self.model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if self.model.unk_id() in ids:
            return None
        first_entry = self.model.encode("a", out_type=str)[0]
        # a vocabulary of another script may contain "a" only as a byte
        return ids if first_entry in ("a", "<0x61>") else None
