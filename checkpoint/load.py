"""Loads a checkpoint into a model's and optimizer's shards without executing code from it.

torch.distributed.checkpoint reads .metadata with a bare pickle.load, and non-tensor values with
torch.load(weights_only=False). Both can execute code that a file names. Here .metadata may name only
the types that it consists of, every value must be a tensor, and every path must be a file in this
folder.
"""

import fnmatch
import io
import os
import pathlib
import pickle
from contextlib import AbstractContextManager
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.filesystem import FileSystem

from checkpoint.catalog import NO_OPTIMIZER
from checkpoint.manifest import METADATA, CorruptCheckpoint, open_file, read_file, read_manifest
from config import ConfigError, Problems
from model.llama import after_weight_update, named_parameters
from parallel.ranks import on_each_rank

SHOWN = 8  # how many problems an error lists
MEMORY_FORMAT = metadata._MEM_FORMAT_ENCODING
DCP = "torch.distributed.checkpoint"
# The types that .metadata consists of, in addition to dtypes.
ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{DCP}.filesystem", "_StorageInfo"),
    (f"{DCP}.metadata", "Metadata"),
    (f"{DCP}.metadata", "TensorStorageMetadata"),
    (f"{DCP}.metadata", "ChunkStorageMetadata"),
    (f"{DCP}.metadata", "TensorProperties"),
    (f"{DCP}.metadata", "MetadataIndex"),
    (f"{DCP}.metadata", "StorageMeta"),
    (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
}


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles only what .metadata consists of. Raises CorruptCheckpoint for other names, before
    resolving them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in ALLOWED and not is_dtype:
            raise CorruptCheckpoint(
                f"refusing to unpickle {module}.{name}: no part of a checkpoint"
            )
        return super().find_class(module, name)


def memory_format(kind: Any, name: str) -> metadata._MEM_FORMAT_ENCODING:
    """Replaces getattr(_MEM_FORMAT_ENCODING, name), as which Python 3.11.0 to 3.11.3 pickle a member
    of an enum."""
    if kind is not MEMORY_FORMAT or name not in MEMORY_FORMAT.__members__:
        raise CorruptCheckpoint("refusing to unpickle builtins.getattr: no part of a checkpoint")
    return MEMORY_FORMAT[name]


class ConfinedFiles(FileSystem):
    """Opens regular files in one folder, for reading."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    # pyrefly: ignore[bad-override]  # DCP declares the generator's own kind of context manager
    def create_stream(self, path: Any, mode: str) -> AbstractContextManager[IO[bytes]]:
        # open_file() refuses a path that leads out of the folder.
        return open_file(self.folder, os.path.relpath(path, self.folder))


class Reader(FileSystemReader):
    """DCP's FileSystemReader, confined to a folder. Reads and checks .metadata on construction.
    Raises ConfigError."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        self.fs = ConfinedFiles(folder)
        path = folder / METADATA
        try:
            content = io.BytesIO(read_file(folder, METADATA))
            self.metadata = MetadataUnpickler(content).load()
            verified = read_manifest(folder)
            for info in self.metadata.storage_data.values():
                if info.relative_path not in verified:
                    raise CorruptCheckpoint(
                        f"{path}: {info.relative_path!r} is not in the manifest"
                    )
            for name, item in self.metadata.state_dict_metadata.items():
                if not isinstance(item, metadata.TensorStorageMetadata):
                    raise CorruptCheckpoint(
                        f"{path}: {name} is not a tensor: reading it would run its pickle"
                    )
        except Problems:
            raise
        except Exception as error:  # a malformed pickle, or a wrong type in it, can raise anything
            raise CorruptCheckpoint(
                f"{path}: expected DCP's metadata: {type(error).__name__}: {error}"
            ) from None

    def read_metadata(self, *arguments: Any, **keywords: Any) -> metadata.Metadata:
        return self.metadata


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: "model.<parameter>" and "optim.<parameter>.<state>", for
    the parameters that match the model's pattern `saved`."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model):
        if not fnmatch.fnmatchcase(name, getattr(model, "saved", "*")):
            continue
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def restore(
    folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Loads a checkpoint into this model's shards. Any number of ranks may have saved it. Raises
    ConfigError if it cannot be read, or if names, shapes or dtypes differ."""
    reader = on_each_rank(lambda: Reader(folder))
    read_tensors(reader, check_tensors(reader, model, optimizer))
    after_weight_update(model)


def check_tensors(
    reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Returns tensors_of(model, optimizer), after comparing names, shapes and dtypes with the
    checkpoint's. The model may be on the meta device. Without an optimizer it compares only weights.
    Raises ConfigError."""
    folder = reader.path
    wanted = tensors_of(model, optimizer)
    stored = reader.metadata.state_dict_metadata
    has_weights_alone = all(name.startswith("model.") for name in stored)
    if stored and has_weights_alone and any(name.startswith("optim.") for name in wanted):
        raise ConfigError(f"{folder}: {NO_OPTIMIZER}")
    problems = []
    for name, tensor in wanted.items():
        item = stored.get(name)
        weight = f"model.{name.removeprefix('optim.').rpartition('.')[0]}"
        if item is None and name.startswith("optim.") and weight not in stored:
            continue  # the missing weight is reported
        if item is None:
            problems.append(f"{folder}: has no {name}")
        elif (tensor.shape, tensor.dtype) != (item.size, item.properties.dtype):
            problems.append(
                f"{folder}: {name} is {item.properties.dtype} {[*item.size]}, this model's is "
                f"{tensor.dtype} {[*tensor.shape]}"
            )
    for name in sorted(stored.keys() - wanted.keys()):
        if optimizer is not None or name.startswith("model."):
            problems.append(f"{folder}: has {name}, which this model does not")
    if problems:
        advice = f"{folder}: is of another model: restore its code, or choose another run.name"
        raise ConfigError(*problems[:SHOWN], advice)
    return wanted


def read_tensors(reader: Reader, tensors: dict[str, Tensor]) -> None:
    """Loads into these tensors in place, on all ranks or, without a process group, in this process."""
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:  # a BaseException
        cause, _ = error.failures[min(error.failures)]
        kind = type(cause) if isinstance(cause, Problems) else ConfigError
        raise kind(f"{reader.path}: cannot be read: {first_cause(error)}") from None


def first_cause(error: dcp.CheckpointException) -> str:
    """The error of the first rank that failed, in one line. DCP's text has every rank's traceback."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
