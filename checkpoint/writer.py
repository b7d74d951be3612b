"""The files of a checkpoint: tensors as DCP lays them out, and what seals them. Knows nothing of runs."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from checkpoint.catalog import STATE
from checkpoint.load import tensors_of
from checkpoint.manifest import MANIFEST, hash_files, render_manifest


class Writer(FileSystemWriter):
    """DCP's writer into a new folder, without the folder's path in the metadata: it will have another name."""

    def __init__(self, folder: pathlib.Path):
        # One thread: with more, this writer reports success after a failed write (pytorch issue 191391).
        super().__init__(folder, thread_count=1, overwrite=False)
        self.files: set[str] = set()  # of all ranks; known to rank 0 when it has finished

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with without_crc32():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.files = {written.storage_data.relative_path for of_rank in results for written in of_rank}
        super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class StreamingWriter(Writer):
    """One process's, with one tensor in memory at a time: DCP's own keeps them all until its file is closed."""

    def __init__(self, folder: pathlib.Path, read: Callable[[str], Tensor]):
        super().__init__(folder)
        self.read = read

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results = "__0_0.distcp", []
        with (self.path / name).open("wb") as file, without_crc32():
            for item in plan.items:
                begin = file.tell()
                torch.save(self.read(item.index.fqn), file)
                size = file.tell() - begin
                results.append(WriteResult(index=item.index, size_in_bytes=size,
                                           storage_data=_StorageInfo(name, begin, size)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """torch's zip files carry a CRC-32 of each tensor, which nothing checks when they are read: SHA-256 does."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def write_weights(folder: pathlib.Path, model: nn.Module, read: Callable[[str], Tensor], state: dict,
                  extra_files: list[pathlib.Path]) -> None:
    """Writes a checkpoint of weights alone into an empty folder, by this process alone, outside of any run: what
    `read` gives for each parameter of a meta model. Raises OSError, and what `read` raises."""
    writer = StreamingWriter(folder, lambda name: read(name.removeprefix("model.")))
    try:
        dcp.save(tensors_of(model, None), storage_writer=writer, no_dist=True)
    except dcp.CheckpointException as error:  # a BaseException
        raise min(error.failures.items())[1][0] from None
    write_manifest(folder, extra_files, state, hash_files(folder, sorted(writer.files)))


def write_manifest(folder: pathlib.Path, extra_files: list[pathlib.Path], state: dict, hashed: dict[str, dict]) -> None:
    """What makes tensors that are written and hashed a checkpoint: state, tokenizer, manifest; all of it synced."""
    for path in extra_files:
        shutil.copyfile(path, folder / path.name)
    (folder / STATE).write_text(json.dumps(state, indent=2))
    files = [path.name for path in extra_files] + [STATE, ".metadata"]
    (folder / MANIFEST).write_bytes(render_manifest(hashed | hash_files(folder, files)))
    for name in [*files[:-1], MANIFEST]:  # DCP has synced its own
        sync(folder / name)
    sync(folder)


def sync(path: pathlib.Path) -> None:
    """Makes a file's content, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
