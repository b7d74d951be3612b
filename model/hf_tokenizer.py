"""A sentencepiece model as the files that transformers loads: tokenizer.json and tokenizer_config.json.

transformers could convert tokenizer.model itself, with sentencepiece and protobuf installed; tokenizer.json needs
neither. The begin mark comes before a text, as it came before a document in training. Checked against sentencepiece on
source text, with transformers 5.23: ids are equal, except for text that holds sentencepiece's own space mark (U+2581),
which transformers takes for a space, and for text that spells a control piece ("</s>"), which transformers takes for
that token.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import ConfigError

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # SentencePiece.type; 1 is normal
SPACE = "\u2581"


@dataclass(frozen=True)
class SentencePiece:
    """What a tokenizer.model says, of what is needed here."""

    pieces: list[tuple[str, float, int]]  # text, score, type, by id
    kind: int
    bos: int | None
    eos: int | None
    dummy_prefix: bool  # a space is put before every text
    plain: bool  # text is not normalised otherwise


def read_sentencepiece(path: Path) -> SentencePiece:
    """Reads the protobuf message by hand (sentencepiece_model.proto of https://github.com/google/sentencepiece): three
    of its fields are all we need. Raises ConfigError where it is none."""
    try:
        pieces, trainer, normalizer = [], {}, {}
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                pieces.append((piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, 1)))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        if not pieces:
            raise ValueError("it has no pieces")
        bos, eos = (i if 0 <= i < len(pieces) else None for i in (trainer.get(41, 1), trainer.get(42, 2)))
        return SentencePiece(pieces, trainer.get(3, UNIGRAM), bos, eos, bool(normalizer.get(3, 1)),
                             plain=not normalizer.get(2) and not normalizer.get(4, 1) and bool(normalizer.get(5, 1)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, AttributeError, TypeError, struct.error) as error:
        raise ConfigError(f"{path}: is no sentencepiece model: {error}") from None


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message's fields: integers, or bytes where they are anything else."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value - 2**64 if value >= 2**63 else value  # negative numbers take ten bytes

    at = 0
    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        size = {1: 8, 5: 4}[wire] if wire != 2 else varint()
        if size < 0 or at + size > len(message):
            raise ValueError("it is cut short")
        yield number, message[at : at + size]
        at += size


def fast_tokenizer_files(model: SentencePiece) -> dict[str, dict] | None:
    """{file name: content}, None where the model cannot be said in tokenizer.json: unigram, or normalised text."""
    if model.kind != BPE or not model.plain:
        return None
    vocab = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    # what sentencepiece joins to the piece with the best score, tokenizers joins by a list of pairs, best first
    pairs = []
    for text, score, kind in model.pieces:
        if kind == 1:
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocab and right in vocab:
                    pairs.append((-score, vocab[left], vocab[right], left, right))
    unknown = next((text for text, _, kind in model.pieces if kind == UNKNOWN), None)
    named = {"unk_token": unknown, **{name: None if i is None else model.pieces[i][0] for name, i in (
        ("bos_token", model.bos), ("eos_token", model.eos))}}
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}]
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if model.dummy_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    begin = None  # the begin mark stands before every text, as in training
    if mark := named["bos_token"]:
        text, pair = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        first = {"SpecialToken": {"id": mark, "type_id": 0}}
        begin = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, pair],
                 "special_tokens": {mark: {"id": mark, "ids": [model.bos], "tokens": [mark]}}}
    return {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": kind != USER_DEFINED}
                             for i, (text, _, kind) in enumerate(model.pieces)
                             if kind in (UNKNOWN, CONTROL, USER_DEFINED)],
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None, "post_processor": begin,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True,
                      "byte_fallback": any(kind == BYTE for _, _, kind in model.pieces), "ignore_merges": False,
                      "vocab": vocab, "merges": [[left, right] for *_, left, right in sorted(pairs)]},
        },
        # not LlamaTokenizer, which would put parts of its own in place of these
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named, "add_eos_token": False,
                                  "add_bos_token": begin is not None, "clean_up_tokenization_spaces": False},
    }
