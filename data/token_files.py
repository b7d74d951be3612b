"""data.format = "tokens": files of token ids that another program wrote, trained on as they are.

    .bin    ids alone, as nanoGPT's train.bin, or behind the header of llm.c
            with a Megatron-LM .idx of the same name next to it: dtype and documents are read there
    .npy    NumPy's, or ids alone, as OLMo's

data.token_dtype says the dtype of ids alone. Documents are those of an .idx or, with data.eos_id,
end with that token.
"""

import glob
import os
import pathlib
import struct

import numpy as np

import config
from config import ConfigError
from data.hub import refuse_pointer
from data.order import last_hundredth, name_hash
from data.tokens import TokenFile, TokenStream

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


def open_token_files(data: config.Data, vocab_size: int) -> tuple[dict, TokenStream, TokenStream]:
    """(what identifies the files, the training stream, the validation stream) of one source.
    vocab_size: of the model. Raises ConfigError."""
    files = list_files("source", data.source, data)
    identity: dict = {"files": sizes_of(files)}
    tokens = sum(file.length for file in files)
    end = min(tokens, data.max_tokens or tokens)
    if data.validation:
        validation_files = list_files("validation", data.validation, data)
        identity["validation_files"] = sizes_of(validation_files)
        training = TokenStream(files, vocab_size, end=end)
        return identity, training, TokenStream(validation_files, vocab_size)
    held_out = last_hundredth(end)
    training = TokenStream(files, vocab_size, end=end, validation=held_out)
    return identity, training, TokenStream(files, vocab_size, *held_out)


def sizes_of(files: list[TokenFile]) -> dict[str, int]:
    """The tokens of each file, by its path."""
    return {str(file.path): file.length for file in files}


def list_files(option: str, pattern: str, data: config.Data) -> list[TokenFile]:
    """The files that an option of [data] names, in the order in which they are read. Raises
    ConfigError."""
    names = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
    names = [name for name in names if name.endswith(SUFFIXES) and os.path.isfile(name)]
    if not names:
        raise ConfigError(
            f"[data] {option} = {pattern}: names no file of {' or '.join(SUFFIXES)}; those in a "
            f"folder are {option} = 'FOLDER/*.bin'"
        )
    root = os.path.commonpath([os.path.dirname(name) for name in names])
    names.sort(key=lambda name: name_hash(os.path.relpath(name, root)))
    files = [open_file(pathlib.Path(name), data) for name in names]
    if sum(file.length for file in files) < 2:  # an input and its target
        raise ConfigError(f"[data] {option} = {pattern}: holds no tokens")
    unknown = [file.path for file in files if file.ends is None and file.eos_id is None]
    if data.document_mask and unknown:
        raise ConfigError(
            f"[data] document_mask: needs data.eos_id, with which documents end in {unknown[0]}"
        )
    return files


def open_file(path: pathlib.Path, data: config.Data) -> TokenFile:
    """Raises ConfigError."""
    refuse_pointer(path)
    index = path.with_suffix(".idx")
    try:
        with path.open("rb") as file:
            head = file.read(LLMC_HEADER_BYTES)
        if head.startswith(NPY_MAGIC):
            return open_numpy(path, data)
        if path.suffix == ".bin" and index.exists():
            return open_megatron(path, index)
        return open_plain(path, head, data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def open_numpy(path: pathlib.Path, data: config.Data) -> TokenFile:
    """A file that numpy.save() wrote. Raises ConfigError and ValueError."""
    array = np.load(path, mmap_mode="r")
    if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
        raise ConfigError(f"{path}: holds {array.dtype}, not token ids, or not in their order")
    return TokenFile(path, array.dtype, array.size, array.offset, eos_id=data.eos_id)


def open_megatron(path: pathlib.Path, index: pathlib.Path) -> TokenFile:
    """A file that Megatron-LM's preprocess_data.py wrote. Raises ConfigError and ValueError."""
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size).ljust(INDEX_HEADER.size)
    magic, version, code, sequences, _ = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1 or code not in INDEX_DTYPES:
        dtypes = " or ".join(INDEX_DTYPES.values())
        raise ConfigError(f"{index}: is no index of Megatron-LM's with ids of {dtypes}")
    dtype = np.dtype(INDEX_DTYPES[code])
    lengths = np.memmap(index, "<i4", "r", INDEX_HEADER.size, (sequences,))
    begins = np.memmap(index, "<i8", "r", INDEX_HEADER.size + lengths.nbytes, (sequences,))
    size = path.stat().st_size
    if begins[-1] + lengths[-1] * dtype.itemsize != size:
        raise ConfigError(f"{path}: has {size} bytes, and {index} says other sizes")
    # a document ends where the next one begins
    return TokenFile(path, dtype, size // dtype.itemsize, ends=begins[1:], end_scale=dtype.itemsize)


def open_plain(path: pathlib.Path, head: bytes, data: config.Data) -> TokenFile:
    """Ids alone, or behind llm.c's header. Raises ConfigError."""
    magic = int.from_bytes(head[:4], "little")
    is_llmc = magic in LLMC_DTYPES and len(head) == LLMC_HEADER_BYTES
    name = LLMC_DTYPES[magic] if is_llmc else data.token_dtype
    if name is None:
        raise ConfigError(f"[data] token_dtype: is needed to read {path}, which does not say it")
    dtype = np.dtype(name)
    offset = LLMC_HEADER_BYTES if is_llmc else 0
    length, rest = divmod(path.stat().st_size - offset, dtype.itemsize)
    if rest:
        raise ConfigError(f"{path}: its size is not a multiple of the size of {name} ids")
    return TokenFile(path, dtype, length, offset, eos_id=data.eos_id)
