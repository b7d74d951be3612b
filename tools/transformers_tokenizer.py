"""Writes the tokenizer_config.json with which transformers' LlamaTokenizer reads a sentencepiece
model.

With transformers 5.23, token ids of source text are equal, with two exceptions. transformers reads
sentencepiece's space character (U+2581) in text as a space, and a spelled-out control token
("</s>") as that token. If transformers would read a model differently, there is no file;
inexpressible() gives the reasons.
"""

import sys
from pathlib import Path
from typing import Any

from config import ConfigError

SPACE = "\u2581"


def read_sentencepiece(path: Path) -> Any:
    """Reads the sentencepiece_model_pb2.ModelProto in a tokenizer.model. Raises ConfigError if the
    file has another format, or a package is missing."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(
            f"{path}: needs sentencepiece and protobuf ({error}): {sys.executable} -m pip install "
            "sentencepiece protobuf"
        ) from None
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ConfigError(f"{path}: is no sentencepiece model: {error}") from None
    if not model.pieces:
        raise ConfigError(f"{path}: is no sentencepiece model: it has no vocabulary")
    return model


def _texts(model: Any, entry_type: int) -> list[str]:
    """The vocabulary entries of this type."""
    return [entry.piece for entry in model.pieces if entry.type == entry_type]


def inexpressible(model: Any) -> list[str]:
    """The properties of a ModelProto for which LlamaTokenizer would return different ids or text.

    The trainer's other settings, such as split_digits, affect only how the vocabulary was trained.
    """
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    kind = model.SentencePiece
    model_type = trainer.ModelType.Name(trainer.model_type)
    vocabulary = {entry.piece for entry in model.pieces}
    user_defined = _texts(model, kind.USER_DEFINED)
    merged = [e for e in model.pieces if e.type == kind.NORMAL and len(e.piece) > 1]
    scores = {entry.score for entry in merged}
    characters = set("".join(entry.piece for entry in merged))
    is_present = {
        f"model_type {model_type}": trainer.model_type != trainer.BPE,
        "normalized text (precompiled_charsmap)": normalizer.precompiled_charsmap,
        "decoded text that is changed (denormalizer_spec)": (
            model.denormalizer_spec.precompiled_charsmap
        ),
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
        "escape_whitespaces = false": not normalizer.escape_whitespaces,
        # transformers adds no space in front of a user-defined symbol
        "add_dummy_prefix": normalizer.add_dummy_prefix,
        "user-defined symbols with spaces": any(
            " " in piece or SPACE in piece for piece in user_defined
        ),
        "entries of type UNUSED": _texts(model, kind.UNUSED),
        # sentencepiece merges equal scores from the left; transformers ranks each merge
        "entries with equal scores": len(scores) < len(merged),
        "entries with characters that are no entries": not characters <= vocabulary,
    }
    return [name for name, present in is_present.items() if present]


def tokenizer_config(model: Any) -> dict[str, Any]:
    """The content of tokenizer_config.json for a ModelProto; empty if it is inexpressible()."""
    if inexpressible(model):
        return {}
    kind = model.SentencePiece
    # Look tokens up by name, as sentencepiece's bos_id() does: an edited model may have a new name
    # but an old trainer_spec.bos_id.
    control = _texts(model, kind.CONTROL)
    bos = model.trainer_spec.bos_piece
    eos = model.trainer_spec.eos_piece
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": bos in control,  # as in training
        "add_eos_token": False,
        "bos_token": bos if bos in control else None,
        "eos_token": eos if eos in control else None,
        "unk_token": next(iter(_texts(model, kind.UNKNOWN)), None),
        "clean_up_tokenization_spaces": False,
    }
