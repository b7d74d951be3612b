"""Converts a sentencepiece model to transformers' tokenizer.json and tokenizer_config.json.

With these files transformers needs neither sentencepiece nor protobuf. Verified on source text with
transformers 5.23: token ids are equal, with two exceptions. transformers reads sentencepiece's
space character (U+2581) in text as a space, and a spelled-out control token ("</s>") as that token.
It decodes UNK to its name, not to sentencepiece's " ⁇ ". A model that tokenizer.json cannot express
is not converted: inexpressible() names why.
"""

import sys
from pathlib import Path
from typing import Any

from config import ConfigError, Given
from data.hub import is_id, local, options_of_run
from data.tokenizer import TOKENIZERS

SPACE = "\u2581"


def read_sentencepiece(path: Path) -> Any:
    """The sentencepiece_model_pb2.ModelProto of a tokenizer.model. Raises ConfigError if the file
    is not one, or a package is missing."""
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
    """The vocabulary entries of a type."""
    return [entry.piece for entry in model.pieces if entry.type == entry_type]


def inexpressible(model: Any) -> list[str]:
    """The properties of a ModelProto for which tokenizer.json would give other ids or other text.
    (The trainer's other settings, such as split_digits, shaped the vocabulary, and change nothing
    afterwards.)"""
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    kind = model.SentencePiece
    model_type = trainer.ModelType.Name(trainer.model_type)
    prefix = normalizer.add_dummy_prefix
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
        # tokenizers puts the prefix in front
        "add_dummy_prefix with treat_whitespace_as_suffix": (
            prefix and trainer.treat_whitespace_as_suffix
        ),
        # tokenizers puts the prefix after each
        "add_dummy_prefix with user-defined symbols": prefix and user_defined,
        "user-defined symbols with spaces": any(
            " " in piece or SPACE in piece for piece in user_defined
        ),
        "entries of type UNUSED": _texts(model, kind.UNUSED),
        # of equal scores the leftmost merge comes first; each merge of tokenizer.json has a rank of
        # its own
        "entries with equal scores": len(scores) < len(merged),
        "entries with characters that are no entries": not characters <= vocabulary,
    }
    return [name for name, present in is_present.items() if present]


def fast_tokenizer_files(model: Any) -> dict[str, dict]:
    """{file name: value} of a ModelProto; empty if it is inexpressible()."""
    if inexpressible(model):
        return {}
    kind = model.SentencePiece
    unknown = next(iter(_texts(model, kind.UNKNOWN)), None)
    # as sentencepiece's bos_id(): by name, which an edited model may have changed without
    # trainer_spec.bos_id
    control = _texts(model, kind.CONTROL)
    bos = model.trainer_spec.bos_piece
    if bos not in control:
        bos = None
    eos = model.trainer_spec.eos_piece
    if eos not in control:
        eos = None
    settings = {
        # not LlamaTokenizer, which would replace normalizer, decoder and template with its own
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": bos,
        "eos_token": eos,
        "add_eos_token": False,
        "add_bos_token": bos is not None,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": _tokenizer_json(model, unknown, bos),
        "tokenizer_config.json": settings,
    }


def _tokenizer_json(model: Any, unknown: str | None, bos: str | None) -> dict:
    """unknown, bos: the vocabulary entries for unknown text and for a text's beginning, if any."""
    vocab = {entry.piece: i for i, entry in enumerate(model.pieces)}
    normalizer, decoder = _normalizer_and_decoder(model.normalizer_spec.add_dummy_prefix)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "post_processor": _bos_template(bos, vocab[bos]) if bos else None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": bool(_texts(model, model.SentencePiece.BYTE)),
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(model, vocab),
        },
    }


def _merges(model: Any, vocab: dict[str, int]) -> list[list[str]]:
    """The pairs of entries that make another entry, best first.

    sentencepiece merges the pair whose result has the best score, and has no list of merges.
    """
    ranked = []
    for entry in model.pieces:
        if entry.type != model.SentencePiece.NORMAL:
            continue
        piece = entry.piece
        for i in range(1, len(piece)):
            left = piece[:i]
            right = piece[i:]
            if left in vocab and right in vocab:
                ranked.append((-entry.score, vocab[left], vocab[right], left, right))
    return [[left, right] for *_, left, right in sorted(ranked)]


def _added_tokens(model: Any) -> list[dict]:
    """The entries that are found in text before any merge."""
    kind = model.SentencePiece
    tokens = []
    for i, entry in enumerate(model.pieces):
        if entry.type in (kind.UNKNOWN, kind.CONTROL, kind.USER_DEFINED):
            token = {
                "id": i,
                "content": entry.piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": entry.type != kind.USER_DEFINED,
            }
            tokens.append(token)
    return tokens


def _normalizer_and_decoder(prefix: bool) -> tuple[dict, dict]:
    """Spaces are U+2581 in entries. prefix: a space is put before the text."""
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[dict] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return (
        {"type": "Sequence", "normalizers": normalizers},
        {"type": "Sequence", "decoders": decoders},
    )


def _bos_template(bos: str, bos_id: int) -> dict:
    """BOS before every text, as in training."""
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second_text = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second_text],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def take_over(given: Given) -> None:
    """Makes the tokenizer of model.init_from the data's, if none is given and it has one. Not of a
    run that was begun without, by a version that trained a tokenizer instead: it continues so."""
    if "data.tokenizer" in given.values:
        return
    base = given.values["model.init_from"]
    before = options_of_run(given)
    if before.get("model.init_from") == base and "data.tokenizer" not in before:
        return
    # what a repository holds, its reader finds out: a plan needs none
    if is_id(base) or any((Path(base) / name).is_file() for name in TOKENIZERS):
        given.values["data.tokenizer"] = base
        given.origins["data.tokenizer"] = given.origins["model.init_from"]


def note_on_tokenizer(init_from: str, folder: Path, files: list[Path]) -> list[str]:
    """What a launch logs if the tokenizer in the folder of prepared data is another than that of
    the weights of init_from, or they have none. files: that tokenizer."""
    base_paths = [local(init_from) / name for name in TOKENIZERS]
    base_tokenizers = [path.read_bytes() for path in base_paths if path.is_file()]
    if any(path.read_bytes() in base_tokenizers for path in files):
        return []
    if base_tokenizers:
        problem = f"{init_from} has another tokenizer than {folder} was prepared with"
    else:
        problem = f"{init_from} has no tokenizer, so the one in {folder} is not its own"
    return [f"{problem}: to its weights these tokens mean other words; data.tokenizer names one"]
