"""Tokenizers of the `tokenizers` library: tokenizer.json, and BOS and EOS, which it does not
name."""

import contextlib
import json
import math
import pathlib
import re
import sys
from typing import Any

from config import ConfigError

# Llama 3; Llama 2; GPT-2 and SmolLM; Gemma
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
SETTINGS = "tokenizer_config.json"
TOKEN_MAP = "special_tokens_map.json"
# transformers' classes that make the tokenizer of the vocabulary alone
LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
PROBES = 100  # vocabulary entries that are tried as text


def choose_file(model: pathlib.Path, tokenizer_json: pathlib.Path) -> pathlib.Path:
    """Which of a folder's two files is its tokenizer: tokenizer.model if it is a sentencepiece
    model, unless a fine-tune has added tokens to tokenizer.json. Raises OSError."""
    # the tag of a sentencepiece model's first field; Llama 3's tokenizer.model is a list of base64
    is_sentencepiece = model.read_bytes()[:1] == b"\n"
    if is_sentencepiece and not has_added_tokens(tokenizer_json):
        return model
    return tokenizer_json


def json_files(path: pathlib.Path, content: bytes) -> dict[str, bytes]:
    """The bytes, by file name, of a tokenizer.json and, if they are there, tokenizer_config.json
    and special_tokens_map.json next to it. content: of the file at `path`. Raises OSError."""
    contents = {"tokenizer.json": content}
    for name in (SETTINGS, TOKEN_MAP):
        file = path.with_name(name)
        if file.exists():
            contents[name] = file.read_bytes()
    return contents


def settings_of(contents: dict[str, bytes]) -> bytes:
    """The tokenizer_config.json of json_files(), with the special tokens of special_tokens_map.json
    in older folders, where transformers reads that."""
    settings = contents.get(SETTINGS, b"{}")
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        named = json.loads(settings)
        tokens = {}
        for key, token in json.loads(contents.get(TOKEN_MAP, b"{}")).items():
            name = token_name(token)
            if key.endswith("_token") and name and name != token_name(named.get(key)):
                tokens[key] = name
        if tokens and "added_tokens_decoder" not in named:
            return json.dumps(named | tokens).encode()
    return settings


def token_name(token: Any) -> str | None:
    """Of a special token in a tokenizer's settings: a name, or an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def has_added_tokens(path: pathlib.Path) -> bool:
    """Whether a tokenizer.json has tokens beyond its model's vocabulary that the language model has
    embeddings for, by the config.json next to it, if any: a padding token may have none. Raises
    OSError."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        tokenizer = json.loads(path.read_bytes())
        rows = math.inf
        settings = path.with_name("config.json")
        if settings.exists():
            rows = json.loads(settings.read_bytes())["vocab_size"]
        last = max(token["id"] for token in tokenizer["added_tokens"])
        return len(tokenizer["model"]["vocab"]) <= last < rows
    return False


class JsonModel:
    """A tokenizer.json's model, with the methods of sentencepiece's that Tokenizer calls."""

    def __init__(self, path: str | pathlib.Path, files: dict[str, bytes]):
        """path: names the tokenizer in messages. files: of json_files(). Raises ConfigError."""
        self.path = path
        self.inner = self._load(files["tokenizer.json"])
        settings = self._settings(settings_of(files))
        self._prepend_as_llama(files["tokenizer.json"], settings)
        ids = self.inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        if not 0 < self.vocab_size < 2**31:
            raise ConfigError(
                f"{path}: has {self.vocab_size} ids; they must be at least one, and fit in 31 bits"
            )
        # the ids before and after a document
        self.bos, self.eos = self._post_processed()
        if not self.eos:
            self.eos = self._named_eos(settings.get("eos_token"))
        # from now on the names of special tokens in a text are encoded as plain text
        self.inner.encode_special_tokens = True

    def _load(self, content: bytes) -> Any:
        """The tokenizers.Tokenizer, without settings that would cut, pad or vary the ids of a
        text."""
        try:
            import tokenizers
        except ImportError:
            install = f"{sys.executable} -m pip install tokenizers"
            raise ConfigError(f"{self.path}: needs the package `tokenizers`: {install}") from None
        try:
            inner = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(
                f"{self.path}: is no tokenizer.json that `tokenizers` can read: {error}"
            ) from None
        inner.no_truncation()
        inner.no_padding()
        if getattr(inner.model, "dropout", None):
            inner.model.dropout = None
        return inner

    def _settings(self, content: bytes) -> dict[str, Any]:
        """The object of a tokenizer_config.json. Raises ConfigError."""
        settings = None
        with contextlib.suppress(ValueError, RecursionError):
            settings = json.loads(content)
        if not isinstance(settings, dict):
            raise ConfigError(f"{self.path}: tokenizer_config.json beside it is no JSON object")
        return settings

    def _prepend_as_llama(self, content: bytes, settings: dict[str, Any]) -> None:
        """Lets a tokenizer of Llama 2's kind put a space in front of a text, and after each special
        token in it only if `legacy` says so: transformers does, from version 5 on, whatever its
        tokenizer.json does. content: of tokenizer.json."""
        if settings.get("tokenizer_class") not in LLAMA_CLASSES:
            return
        parts = json.loads(content)
        kinds = re.findall(
            r'"type": "(\w+)"', json.dumps([parts.get("normalizer"), parts.get("pre_tokenizer")])
        )
        if not set(kinds) <= {"Sequence", "Prepend", "Replace", "Metaspace"}:
            return  # Llama 3's kind
        import tokenizers

        scheme = "always" if settings.get("legacy", False) else "first"
        if settings.get("add_prefix_space") is False:
            scheme = "never"
        self.inner.normalizer = None
        self.inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            replacement="\u2581", prepend_scheme=scheme, split=False
        )

    def _post_processed(self) -> tuple[list[int], list[int]]:
        """(the ids that the post-processor adds before a text, those that it adds after it). Raises
        ConfigError."""
        entries = sorted(self.inner.get_vocab(with_added_tokens=False))
        for probe in ("a", *entries[:PROBES]):
            (plain,) = self.encode([probe])
            if plain:
                ids = self.inner.encode(probe).ids
                starts = [i for i in range(len(ids)) if ids[i : i + len(plain)] == plain]
                before = starts[0] if starts else 0
                return ids[:before], ids[before + len(plain) :]
        raise ConfigError(f"{self.path}: makes nothing of any text that was tried")

    def _named_eos(self, setting: Any) -> list[int]:
        """The id of the token that tokenizer_config.json names, else of the first of EOS_NAMES;
        none if the vocabulary has no such token. setting: "eos_token" there."""
        for name in (token_name(setting), *EOS_NAMES):
            if name is not None:
                eos = self.inner.token_to_id(name)
                if eos is not None:
                    return [eos]
        return []

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Raises ConfigError."""
        try:
            return [self.inner.encode(text, add_special_tokens=False).ids for text in texts]
        except Exception as error:  # an unknown word, perhaps, if the vocabulary has no UNK entry
            raise ConfigError(f"{self.path}: its tokenizer fails on a text: {error}") from None
