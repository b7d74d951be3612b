"""Makes token files of other programs a source: a folder that names them; they stay where they are.

    ./run_train.sh -m import_tokens 'openwebtext/*.bin' prepared/owt --dtype uint16 --eos 50256
    ./run_train.sh CONFIG --data.source=prepared/owt

    .bin    nanoGPT's: only ids; llm.c's: a header with their dtype, then ids;
            Megatron-LM's: only ids, next to an .idx file with their dtype and the documents
    .npy    NumPy's; OLMo's: only ids
    .ds     datatrove's: only ids, next to a .ds.index file with the documents

An index defines the documents. Without one, each document ends with --eos. A file begins with a new
document. Unless --validation names files, the last hundredth of the first file is held out (of at
most 2^22 tokens).
"""

import argparse
import collections
import glob
import json
import os
import pathlib
import struct
import tempfile
from typing import NamedTuple

import numpy as np

import system
from config import ConfigError, run_tool
from data.folder import MANIFEST, sample_hash, short_hash
from tools.prepare.parts import last_hundredth
from tools.prepare.source import name_hash
from tools.prepare.tokenizer import tokenizer_files, tokenizer_hash

SUFFIXES = (".bin", ".npy", ".ds")
# files that accompany a token file; a pattern may match them, too
COMPANIONS = (".idx", ".ds.index", ".ds.metadata", ".ends.bin")
DTYPES = ("uint16", "int32", "uint32", "int64")
LOOKED_AT = 1 << 16  # check so many ids at a file's beginning
EOS_WITHIN = 1 << 20  # EOS must be among so many ids at the first file's beginning
NPY_MAGIC = b"\x93NUMPY"
LFS_MAGIC = b"version https://git-lfs"
# llm.c: 256 int32 numbers; the first is one of these keys, the third is the number of ids
LLMC_DTYPES = {20240520: "uint16", 20240801: "uint32"}
LLMC_HEADER = struct.Struct("<iii1012x")
# Megatron-LM: magic, version, code of the dtype, number of sequences, number of document borders
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {4: "int32", 8: "uint16"}


class Ids(NamedTuple):
    """Where a file stores its token ids, which are contiguous."""

    dtype: str  # a name that NumPy and torch share; little-endian
    length: int  # in tokens
    offset: int = 0  # bytes before the first id
    ends: np.ndarray | None = None  # int64, ascending: one past each document's last token


def list_files(words: list[str]) -> list[pathlib.Path]:
    """The token files that these names and patterns match, in reading order. Raises
    ConfigError."""
    names = []
    for word in words:
        matches = [] if os.path.exists(word) else glob.glob(word, recursive=True)
        names += matches or [word]
    names = [name for name in names if not name.endswith(COMPANIONS)]
    others = [name for name in names if not (name.endswith(SUFFIXES) and os.path.isfile(name))]
    if others or not names:
        raise ConfigError(f"{(others or words)[0]}: is no token file, of {', '.join(SUFFIXES)}")
    paths = [pathlib.Path(name).absolute() for name in names]
    root = os.path.commonpath([path.parent for path in paths])
    return sorted(paths, key=lambda path: name_hash(os.path.relpath(path, root)))


def refuse_twice(paths: list[pathlib.Path]) -> None:
    """Raises ConfigError if two paths, for training or validation, are the same file."""
    counts = collections.Counter(map(os.path.realpath, paths))
    for path, count in counts.items():
        if count > 1:
            raise ConfigError(f"{path}: is named {count} times, for training or validation")


# Formats. Each function raises ConfigError, OSError, and ValueError for a truncated file.


def read_ids(path: pathlib.Path, dtype: str | None) -> Ids:
    """Detects a file's format, and locates its ids. `dtype` applies to formats that store none."""
    with path.open("rb") as file:
        head = file.read(LLMC_HEADER.size)
    if head.startswith(LFS_MAGIC):
        raise ConfigError(f"{path}: is a git-lfs pointer, not the file itself: git lfs pull")
    if head.startswith(NPY_MAGIC):
        return numpy_ids(path)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return megatron_ids(path, path.with_suffix(".idx"))
    if path.suffix == ".ds" and path.with_suffix(".ds.index").exists():
        return datatrove_ids(path, path.with_suffix(".ds.index"))
    if len(head) == LLMC_HEADER.size and LLMC_HEADER.unpack(head)[0] in LLMC_DTYPES:
        return llmc_ids(path, *LLMC_HEADER.unpack(head))
    if dtype is None:
        raise ConfigError(f"{path}: has no header or index that says the dtype of its ids: --dtype")
    return plain_ids(path, dtype)


def plain_ids(path: pathlib.Path, dtype: str, offset: int = 0) -> Ids:
    length, rest = divmod(path.stat().st_size - offset, np.dtype(dtype).itemsize)
    if rest:
        raise ConfigError(f"{path}: its size is not a multiple of that of {dtype} ids")
    return Ids(dtype, length, offset)


def llmc_ids(path: pathlib.Path, magic: int, _version: int, length: int) -> Ids:
    ids = plain_ids(path, LLMC_DTYPES[magic], LLMC_HEADER.size)
    if ids.length != length:
        raise ConfigError(f"{path}: holds {ids.length:,} ids, and its header says {length:,}")
    return ids


def numpy_ids(path: pathlib.Path) -> Ids:
    array = np.load(path, mmap_mode="r")
    if array.dtype.kind not in "iu" or array.dtype != np.dtype(array.dtype.name):
        raise ConfigError(f"{path}: holds {array.dtype.str}, not little-endian integers")
    if not array.flags.c_contiguous:
        raise ConfigError(f"{path}: holds columns of ids; write np.ascontiguousarray(ids)")
    return Ids(array.dtype.name, array.size, array.offset)


def megatron_ids(path: pathlib.Path, index: pathlib.Path) -> Ids:
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size).ljust(INDEX_HEADER.size)
        magic, version, code, sequences, borders = INDEX_HEADER.unpack(header)
        if magic != INDEX_MAGIC or version != 1 or code not in INDEX_DTYPES:
            dtypes = " or ".join(INDEX_DTYPES.values())
            raise ConfigError(f"{index}: is no index of Megatron-LM's with ids of {dtypes}")
        lengths = np.fromfile(file, "<i4", sequences)
        pointers = np.fromfile(file, "<i8", sequences)  # the byte at which each sequence begins
        documents = np.fromfile(file, "<i8", borders)  # first sequence of each, then the end
    if len(documents) < borders or documents.max(initial=0) > sequences:
        raise ConfigError(f"{index}: was cut")
    ids = plain_ids(path, INDEX_DTYPES[code])
    begins = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if not np.array_equal(pointers, begins[:-1] * np.dtype(ids.dtype).itemsize):
        raise ConfigError(
            f"{index}: selects sequences of {path}, or reorders them: write that text"
        )
    if begins[-1] != ids.length:
        raise ConfigError(f"{path}: holds {ids.length:,} ids, and {index} names {begins[-1]:,}")
    return ids._replace(ends=begins[documents[1:]])


def datatrove_ids(path: pathlib.Path, index: pathlib.Path) -> Ids:
    loss_mask = path.with_suffix(".ds.loss")
    if loss_mask.exists():
        raise ConfigError(f"{loss_mask}: a loss mask is not read; remove it to learn all tokens")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    length = int(ends.max(initial=0))
    size = path.stat().st_size
    dtype = {2 * length: "uint16", 4 * length: "uint32"}.get(size)
    if dtype is None or (np.diff(ends) < 0).any():
        raise ConfigError(
            f"{path}: has {size:,} bytes, and its index names {length:,} ids: was cut?"
        )
    return Ids(dtype, length, ends=ends)


def check_ids(path: pathlib.Path, ids: Ids, eos: int | None) -> None:
    """Raises ConfigError if a file's first ids cannot be token ids, or do not include `eos`."""
    count = LOOKED_AT if eos is None else EOS_WITHIN
    head = np.fromfile(path, ids.dtype, min(ids.length, count), offset=ids.offset)
    if not len(head):
        raise ConfigError(f"{path}: holds no ids")
    if head.min() < 0:
        raise ConfigError(f"{path}: id {head.argmin()} is {head.min()}, negative")
    if len(head) > 1 and not head[1::2].any():
        wider = "uint32" if head.itemsize == 2 else "int64"
        raise ConfigError(f"{path}: every second id is 0, read as {ids.dtype}: --dtype {wider}?")
    if eos is not None and eos not in head:
        raise ConfigError(f"{path}: none of its first {len(head):,} ids is {eos}, the --eos")


# The folder


def import_files(
    folder: pathlib.Path,
    train: list[pathlib.Path],
    validation: list[pathlib.Path],
    dtype: str | None,
    eos: int | None,
) -> dict:
    """Checks the files, and writes the ends of their documents into the folder. Returns the
    manifest's entries for the files. Raises ConfigError and OSError."""
    token_files: dict[str, list] = {"train": [], "heldout": []}
    stamps = []
    for path in [*train, *validation]:
        is_first = not stamps
        try:
            ids = read_ids(path, dtype)
        except ValueError as error:  # NumPy raises it for truncated files
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        check_ids(path, ids, eos if is_first else None)
        border = ids.length if len(stamps) < len(train) else 0  # validation text begins here
        if is_first and not validation:
            border = max(0, border - last_hundredth(border))
        for split, first, stop in (("train", 0, border), ("heldout", border, ids.length)):
            if first < stop:
                ends = folder / f"{split}-{len(token_files[split])}.ends.bin"
                token_files[split].append(entry(path, ids, first, stop, ends, eos))
        status = path.stat()
        stamps.append([str(path), status.st_size, status.st_mtime_ns, sample_hash(path)])
    # excludes the paths, so that the hash stays the same after files have moved
    hashed: list = [sample_hash(ends) for ends in sorted(folder.iterdir())]
    hashed += [sample for *_, sample in stamps]
    for split, entries in token_files.items():
        hashed += [[split, *rest] for _path, *rest in entries]
    return {"files": stamps, "token_files": token_files, "sha256": short_hash(hashed)}


def entry(
    path: pathlib.Path, ids: Ids, first: int, stop: int, ends: pathlib.Path, eos: int | None
) -> list:
    """The manifest's entry for tokens first ... stop-1 of a file. Writes the file `ends` if the
    file has an index."""
    begin = ids.offset + first * np.dtype(ids.dtype).itemsize
    if ids.ends is None:
        return [str(path), ids.dtype, stop - first, begin, None, eos, None]
    inside = ids.ends[(ids.ends > first) & (ids.ends < stop)]
    system.write_atomic(ends, (np.append(inside, stop) - first).tobytes())
    return [str(path), ids.dtype, stop - first, begin, ends.name, None, None]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m import_tokens", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="+", help="names or patterns")
    parser.add_argument("out", type=pathlib.Path, help="a new folder")
    parser.add_argument("--validation", help="a name or a pattern; default: some is held out")
    parser.add_argument("--dtype", choices=DTYPES, help="of files that do not say it")
    parser.add_argument("--eos", type=int, help="the id with which documents end")
    parser.add_argument("--tokenizer", help="file or folder, for checkpoints and exports")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    out = args.out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{args.out}: exists, and is not empty; choose another, or remove it")
    train = list_files(args.files)
    validation = list_files([args.validation]) if args.validation else []
    refuse_twice([*train, *validation])
    tokenizer = tokenizer_files(args.tokenizer) if args.tokenizer else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = pathlib.Path(temporary, out.name)
        folder.mkdir()
        imported = import_files(folder, train, validation, args.dtype, args.eos)
        for name, content in tokenizer.items():
            system.write_atomic(folder / name, content)
        manifest = {
            "identity": None,
            "revision": None,
            "tokenizer": tokenizer_hash(tokenizer) if tokenizer else None,
            "vocab_size": 0,  # unknown; a run compares ids with its model's as it reads them
            "complete": True,
            **imported,
        }
        system.write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1))
        system.publish(folder, out)
    return 0


if __name__ == "__main__":
    run_tool(main)
