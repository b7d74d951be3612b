"""Converts a sentencepiece model to the files that transformers loads: tokenizer.json and tokenizer_config.json.

With these files transformers needs neither sentencepiece nor protobuf. Verified on source text with transformers 5.23:
token ids are equal, with two exceptions. transformers reads sentencepiece's space character (U+2581) in text as a
space, and a spelled-out control token ("</s>") as that token. It decodes UNK to its name, not to sentencepiece's " ⁇ ".
A model that tokenizer.json cannot express is not converted: inexpressible() names why.
"""

import sys
from pathlib import Path
from typing import Any

from config import ConfigError
from data.hub import local
from data.tokenizer import TOKENIZERS

SPACE = "\u2581"


def read_sentencepiece(path: Path) -> Any:
    """The sentencepiece_model_pb2.ModelProto of a tokenizer.model. Raises ConfigError if the file is not one, or a
    package is missing."""
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


def inexpressible(model: Any) -> list[str]:
    """The properties of a ModelProto for which tokenizer.json would give other ids or other text. (The trainer's other
    settings, such as split_digits, shaped the vocabulary, and change nothing afterwards.)"""
    trainer, normalizer, entries, kind = (
        model.trainer_spec,
        model.normalizer_spec,
        model.pieces,
        model.SentencePiece,
    )
    own = [entry.piece for entry in entries if entry.type == kind.USER_DEFINED]
    merged = [entry for entry in entries if entry.type == kind.NORMAL and len(entry.piece) > 1]
    known = {entry.piece for entry in entries}
    return [
        name
        for name, present in {
            f"model_type {trainer.ModelType.Name(trainer.model_type)}": trainer.model_type
            != trainer.BPE,
            "normalized text (precompiled_charsmap)": normalizer.precompiled_charsmap,
            "decoded text that is changed (denormalizer_spec)": model.denormalizer_spec.precompiled_charsmap,
            "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
            "escape_whitespaces = false": not normalizer.escape_whitespaces,
            "add_dummy_prefix with treat_whitespace_as_suffix": normalizer.add_dummy_prefix
            and trainer.treat_whitespace_as_suffix,  # tokenizers puts it in front
            "add_dummy_prefix with user-defined symbols": normalizer.add_dummy_prefix
            and own,  # puts it after each
            "user-defined symbols with spaces": any({" ", SPACE} & {*piece} for piece in own),
            "entries of type UNUSED": any(entry.type == kind.UNUSED for entry in entries),
            # of equal scores the leftmost merge comes first; each merge of tokenizer.json has a rank of its own
            "entries with equal scores": len({entry.score for entry in merged}) < len(merged),
            "entries with characters that are no entries": not {
                *"".join(entry.piece for entry in merged)
            }
            <= known,
        }.items()
        if present
    ]


def fast_tokenizer_files(model: Any) -> dict[str, dict]:
    """{file name: content} of a ModelProto; empty if it is inexpressible()."""
    if inexpressible(model):
        return {}
    trainer, normalizer, entries, kind = (
        model.trainer_spec,
        model.normalizer_spec,
        model.pieces,
        model.SentencePiece,
    )
    vocab = {entry.piece: i for i, entry in enumerate(entries)}
    # sentencepiece merges into the vocabulary entry with the best score; tokenizers takes a list of merges, best first
    cuts = (
        (entry.score, entry.piece[:i], entry.piece[i:])
        for entry in entries
        if entry.type == kind.NORMAL
        for i in range(1, len(entry.piece))
    )
    pairs = sorted(
        (-score, vocab[left], vocab[right], left, right)
        for score, left, right in cuts
        if left in vocab and right in vocab
    )
    unknown = next((entry.piece for entry in entries if entry.type == kind.UNKNOWN), None)
    control = {entry.piece for entry in entries if entry.type == kind.CONTROL}
    # as sentencepiece's bos_id(): by name, which an edited model may have changed without trainer_spec.bos_id
    bos, eos = (
        piece if piece in control else None for piece in (trainer.bos_piece, trainer.eos_piece)
    )
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[dict] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normalizer.add_dummy_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    first = {"SpecialToken": {"id": bos, "type_id": 0}}  # BOS before every text, as in training
    text, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {bos: {"id": bos, "ids": [vocab.get(bos)], "tokens": [bos]}},
    }
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": i,
                    "content": entry.piece,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": entry.type != kind.USER_DEFINED,
                }
                for i, entry in enumerate(entries)
                if entry.type in (kind.UNKNOWN, kind.CONTROL, kind.USER_DEFINED)
            ],
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": template if bos else None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": unknown,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": any(entry.type == kind.BYTE for entry in entries),
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [[left, right] for *_, left, right in pairs],
            },
        },
        # not LlamaTokenizer, which would replace these parts with its own
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": unknown,
            "bos_token": bos,
            "eos_token": eos,
            "add_eos_token": False,
            "add_bos_token": bos is not None,
            "clean_up_tokenization_spaces": False,
        },
    }


def note_on_tokenizer(init_from: str, folder: Path, files: list[Path]) -> list[str]:
    """What a launch logs if the weights of init_from come with another tokenizer than that of prepared data."""
    theirs = [
        path.read_bytes() for name in TOKENIZERS if (path := local(init_from) / name).is_file()
    ]
    if not theirs or any(path.read_bytes() in theirs for path in files):
        return []
    return [
        f"{init_from} has another tokenizer than {folder} was prepared with: to its weights these tokens mean "
        "other words; data.tokenizer names one"
    ]
