"""Lets a run train on token files that another program wrote, as they are: nothing is copied.

    ./run_train.sh -m import_tokens prepared/owt 'openwebtext/*.bin' --dtype uint16 --eos-id 50256
    ./run_train.sh CONFIG --data.source=prepared/owt

    .bin    ids alone, as nanoGPT's train.bin, or behind the header of llm.c
            with a Megatron-LM .idx of the same name next to it: dtype and documents are read there
    .npy    NumPy's, or ids alone, as OLMo's

Documents are those of an .idx or end with --eos-id. The last hundredth of the first file, of at most
2^22 tokens, is held out, unless --validation names files.
"""

import argparse
import glob
import json
import os
import pathlib
import struct

import numpy as np

from config import ConfigError, run_tool
from data.folder import MANIFEST
from data.order import name_hash
from system import files
from tools.prepare.parts import last_hundredth
from tools.prepare.tokenizer import tokenizer_files, tokenizer_hash

SUFFIXES = (".bin", ".npy")
NPY_MAGIC = b"\x93NUMPY"
# Megatron-LM: magic, version, code of the dtype, number of sequences, of documents; then the length
# (int32) of each sequence, and the byte at which it begins (int64)
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {4: "int32", 8: "uint16"}
# llm.c: 256 numbers (int32), of which the first is this
LLMC_DTYPES = {20240520: "uint16", 20240801: "uint32"}
LLMC_HEADER_BYTES = 1024


def list_files(pattern: str) -> list[pathlib.Path]:
    """In the order in which they are read. Raises ConfigError."""
    names = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    names = [name for name in names if name.endswith(SUFFIXES) and os.path.isfile(name)]
    if not names:
        raise ConfigError(f"{pattern}: names no file of {' or '.join(SUFFIXES)}")
    root = os.path.commonpath([os.path.dirname(name) for name in names])
    names.sort(key=lambda name: name_hash(os.path.relpath(name, root)))
    return [pathlib.Path(name).absolute() for name in names]


def describe(path: pathlib.Path, dtype: str | None) -> tuple[str, int, int, np.ndarray | None]:
    """(dtype, tokens, bytes before the first, ends of documents if an .idx says them). Raises
    ConfigError, OSError and ValueError."""
    with path.open("rb") as file:
        head = file.read(LLMC_HEADER_BYTES)
    if head.startswith(NPY_MAGIC):
        array = np.load(path, mmap_mode="r")
        if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
            raise ConfigError(f"{path}: holds {array.dtype}, not token ids, or not in their order")
        return array.dtype.str, array.size, array.offset, None
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.exists():
        return describe_megatron(path, index)
    magic = int.from_bytes(head[:4], "little")
    offset = LLMC_HEADER_BYTES if magic in LLMC_DTYPES and len(head) == LLMC_HEADER_BYTES else 0
    name = LLMC_DTYPES[magic] if offset else dtype
    if name is None:
        raise ConfigError(f"{path}: does not say the dtype of its ids: --dtype")
    tokens, rest = divmod(path.stat().st_size - offset, np.dtype(name).itemsize)
    if rest:
        raise ConfigError(f"{path}: its size is not a multiple of the size of {name} ids")
    return name, tokens, offset, None


def describe_megatron(path: pathlib.Path, index: pathlib.Path) -> tuple[str, int, int, np.ndarray]:
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size).ljust(INDEX_HEADER.size)
    magic, version, code, sequences, _ = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1 or code not in INDEX_DTYPES:
        dtypes = " or ".join(INDEX_DTYPES.values())
        raise ConfigError(f"{index}: is no index of Megatron-LM's with ids of {dtypes}")
    lengths = np.memmap(index, "<i4", "r", INDEX_HEADER.size, (sequences,))
    ends = np.cumsum(lengths, dtype="<i8")
    size = path.stat().st_size
    width = np.dtype(INDEX_DTYPES[code]).itemsize
    if ends[-1] * width != size:
        raise ConfigError(f"{path}: has {size} bytes, and {index} says other sizes")
    return INDEX_DTYPES[code], size // width, 0, ends


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="import_tokens", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="a new one, for the record")
    parser.add_argument("files", help="a file or a pattern")
    parser.add_argument("--validation", help="a file or a pattern; default: some is held out")
    parser.add_argument("--dtype", choices=["uint16", "int32", "uint32"], help="of ids alone")
    parser.add_argument("--eos-id", type=int, help="with which documents end")
    parser.add_argument("--tokenizer", help="file or folder, for checkpoints and exports")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True)
    listed: dict[str, list] = {"train": [], "heldout": []}
    tokens = {"train": 0, "heldout": 0}
    sizes = {}

    def add(split: str, first: int, stop: int) -> None:
        """Tokens first ... stop-1 of the file that was described last."""
        name = None
        if ends is not None:
            name = f"{split}-{len(listed[split])}.ends.bin"
            inside = ends[(ends > first) & (ends < stop)]
            np.append(inside - first, stop - first).astype("<i8").tofile(args.folder / name)
        begin = offset + first * np.dtype(dtype).itemsize
        listed[split].append([str(path), dtype, stop - first, begin, name, args.eos_id, None])
        tokens[split] += stop - first

    for split, pattern in (("train", args.files), ("heldout", args.validation)):
        for path in list_files(pattern) if pattern else []:
            dtype, length, offset, ends = describe(path, args.dtype)
            sizes[str(path)] = length
            border = length
            if split == "train" and not (listed["train"] or args.validation):
                border = max(0, length - last_hundredth(length))
                add("heldout", border, length)
            if border:
                add(split, 0, border)
    contents = tokenizer_files(args.tokenizer) if args.tokenizer else {}
    for name, content in contents.items():
        (args.folder / name).write_bytes(content)
    manifest = {
        "identity": None,
        "revision": sizes,
        "tokenizer": tokenizer_hash(contents) if contents else None,
        "vocab_size": 0,  # ids are compared with the model's as they are read
        "complete": True,
        "tokens": tokens,
        "sha256": None,
        "token_files": listed,
    }
    files.write_atomic(args.folder / MANIFEST, json.dumps(manifest, indent=1))
    return 0


if __name__ == "__main__":
    run_tool(main)
