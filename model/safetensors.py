"""The safetensors format: header, checks, and reading of slices (https://github.com/huggingface/safetensors).

8 bytes with the length of the header, the header as JSON ({name: {dtype, shape, data_offsets}}), the data; all
little-endian, as every machine that torch trains on. Nothing in it can run code.
"""

import ctypes
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import ConfigError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 64 * 2**20  # bytes read, sent and written at a time
LONGEST_HEADER = 100_000_000  # the safetensors package's own limit


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its dtype's code, its shape, and its first byte in the file."""

    path: Path
    code: str
    shape: list[int]
    offset: int


def render_header(tensors: Iterable[tuple[str, torch.dtype, Iterable[int]]], metadata: dict[str, str] | None = None
                  ) -> bytes:
    """What a file of these tensors (name, dtype, shape) begins with; their data follow in this order, with no gap.

    Give wide dtypes first, so that every tensor lies at a multiple of its element's size.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, Stored], list[str]]:
    """(the tensors by name, all that is wrong with them). Raises ConfigError where it is no safetensors file."""
    if not path.is_file():
        raise ConfigError(f"{path}: {'is no regular file' if path.exists() else 'is not there'}")
    with path.open("rb") as file:
        size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ConfigError(f"{path}: is no safetensors file, or cut short: {size} bytes cannot hold a header of "
                              f"{length}; pickled files (.bin, .pt) are not read")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is no safetensors file: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    malformed = [name for name, entry in header.items() if not _well_formed(entry)]
    if malformed:
        raise ConfigError(*(f"{path}: {name}: needs a dtype, a shape and two data_offsets" for name in malformed))
    problems, after = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, end), shape, code = entry["data_offsets"], entry["shape"], entry["dtype"]
        if begin != after:
            problems.append(f"{path}: {name}: begins at byte {begin} of the data, the one before ends at {after}")
        if end > size - 8 - length:
            problems.append(f"{path}: {name}: ends at byte {end} of the data, which has {size - 8 - length}: cut short")
        if code in DTYPES and end - begin != math.prod(shape) * DTYPES[code].itemsize:
            problems.append(f"{path}: {name}: has {end - begin} bytes, which is not {code} of shape {shape}")
        after = end
    if after < size - 8 - length:
        problems.append(f"{path}: goes on for {size - 8 - length - after} bytes after its last tensor")
    return {name: Stored(path, entry["dtype"], entry["shape"], 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()}, problems


def _well_formed(entry: Any) -> bool:
    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    return (isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and counts(entry.get("shape"))
            and counts(entry.get("data_offsets")) and len(entry["data_offsets"]) == 2)


def differences(place: Path, found: dict[str, Stored], wanted: dict[str, list[int]]) -> list[str]:
    """What is missing, unexpected, of an unknown dtype or of a wrong shape; `wanted`: shapes by name."""
    problems = [f"{place}: has no {name}" for name in wanted.keys() - found.keys()]
    problems += [f"{place}: has {name}, which this model does not" for name in found.keys() - wanted.keys()]
    for name, stored in found.items():
        if stored.code not in DTYPES:
            problems.append(f"{stored.path}: {name} has dtype {stored.code}; only {', '.join(DTYPES)} are read")
        if name in wanted and stored.shape != wanted[name]:
            problems.append(f"{stored.path}: {name} has shape {stored.shape}, this model's is {wanted[name]}")
    return problems


def read_elements(stored: Stored, first: int, out: Tensor) -> None:
    """Fills `out`, one-dimensional, of any dtype and device, with the elements from `first` on; a block at a time.

    Raises ConfigError where the file ends before or cannot be read.
    """
    dtype = DTYPES[stored.code]
    block = torch.empty(min(len(out), BLOCK // dtype.itemsize), dtype=dtype)
    handle = None
    try:
        handle = os.open(stored.path, os.O_RDONLY)
        for start in range(0, len(out), len(block) or 1):
            part = block[: len(out) - start]
            read_exactly(handle, stored.path, stored.offset + (first + start) * dtype.itemsize, memory(part))
            out[start : start + len(part)].copy_(part)
    except OSError as error:
        raise ConfigError(f"{stored.path}: {error.strerror or error}") from None
    finally:
        if handle is not None:
            os.close(handle)


def read_exactly(handle: int, path: Path, offset: int, buffer: memoryview) -> None:
    """Fills the buffer from this byte of a file on, without moving the file's position."""
    done = 0
    while done < len(buffer):
        got = os.preadv(handle, [buffer[done:]], offset + done)
        if not got:
            raise ConfigError(f"{path}: has become shorter while it was read")
        done += got


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, which must outlive them: no copy, and no numpy, which lacks bfloat16."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
