"""Tokenizers of the `tokenizers` library: tokenizer.json, and BOS and EOS, which it does not name."""

import contextlib
import json
import math
import pathlib
import sys

from config import ConfigError

# Llama 3; Llama 2; GPT-2 and SmolLM; Gemma
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")


def choose_files(found: list[pathlib.Path]) -> dict[str, bytes]:
    """Content, by file name, of what a tokenizer needs: found is a tokenizer.json, or a tokenizer.model and, if its
    folder holds one, the tokenizer.json next to it. Raises OSError."""
    # A sentencepiece model begins with a line feed, the tag of its first field; Llama 3's file does not. A
    # tokenizer.json next to one is used if a fine-tune has added tokens that its model has rows for.
    path = (
        found[0]
        if found[0].read_bytes()[:1] == b"\n" and not has_added_tokens(found[-1])
        else found[-1]
    )
    content = path.read_bytes()
    if not content.lstrip().startswith(b"{"):
        return {"tokenizer.model": content}
    settings = path.with_name("tokenizer_config.json")
    return {
        "tokenizer.json": content,
        **({settings.name: settings.read_bytes()} if settings.exists() else {}),
    }


def has_added_tokens(path: pathlib.Path) -> bool:
    """Whether a tokenizer.json has tokens beyond its model's vocabulary, and the folder's config.json, if any, rows for
    them: a padding token may have none. Raises OSError."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        content, settings = json.loads(path.read_bytes()), path.with_name("config.json")
        rows = json.loads(settings.read_bytes())["vocab_size"] if settings.exists() else math.inf
        last = max(token["id"] for token in content["added_tokens"])
        return len(content["model"]["vocab"]) <= last < rows
    return False


class JsonModel:
    """A tokenizer.json's model, with the methods of sentencepiece's.
    inner: a tokenizers.Tokenizer. bos, eos: the ids before and after a document. Raises ConfigError."""

    def __init__(self, path: str | pathlib.Path, files: dict[str, bytes]):
        """path: names the tokenizer in messages. files: as choose_files() returns them."""
        try:
            import tokenizers
        except ImportError:
            install = f"{sys.executable} -m pip install tokenizers"
            raise ConfigError(f"{path}: needs the package `tokenizers`: {install}") from None
        self.path = path
        try:
            self.inner = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(
                f"{path}: is no tokenizer.json that `tokenizers` can read: {error}"
            ) from None
        self.inner.no_truncation()
        self.inner.no_padding()
        if getattr(self.inner.model, "dropout", None):
            self.inner.model.dropout = None  # the same text, the same ids
        self.size = max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.size < 2**31:
            raise ConfigError(
                f"{path}: has {self.size} ids; they must be at least one, and fit in 31 bits"
            )
        try:
            named = json.loads(files.get("tokenizer_config.json", b"{}")).get("eos_token")
        except (ValueError, AttributeError, RecursionError):
            raise ConfigError(
                f"{path}: tokenizer_config.json beside it is no JSON object"
            ) from None
        # BOS and EOS are what the post-processor adds around a text (here the first that yields any tokens). If it adds
        # no EOS: the token that tokenizer_config.json names, else the first of EOS_NAMES
        probes = ("a", *sorted(self.inner.get_vocab(with_added_tokens=False))[:100])
        probe, plain = next(
            ((text, ids) for text in probes for ids in self.encode([text]) if ids), (None, [])
        )
        if probe is None:
            raise ConfigError(f"{path}: makes nothing of any text that was tried")
        ids = self.inner.encode(probe).ids
        before = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
        self.bos, self.eos = ids[:before], ids[before + len(plain) :]
        for name in (named.get("content") if isinstance(named, dict) else named, *EOS_NAMES):
            if (
                not self.eos
                and isinstance(name, str)
                and (eos := self.inner.token_to_id(name)) is not None
            ):
                self.eos = [eos]
        # from now on their names in a text are encoded as plain text
        self.inner.encode_special_tokens = True

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)

    def encode(self, texts: list[str]) -> list[list[int]]:
        try:
            return [self.inner.encode(text, add_special_tokens=False).ids for text in texts]
        except Exception as error:  # e.g. an unknown word, if the vocabulary has no UNK entry
            raise ConfigError(f"{self.path}: its tokenizer fails on a text: {error}") from None
