"""The files of a checkpoint: tensors as DCP lays them out, and what makes a folder of them a checkpoint."""

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

import files
from checkpoint.catalog import STATE
from checkpoint.load import tensors_of
from checkpoint.manifest import MANIFEST, hash_files, render_manifest


class Writer(FileSystemWriter):
    """DCP's storage writer into a new folder, one file a rank.

    Unlike DCP's own it holds one tensor at a time in host memory (that keeps all of them, pinned, until its file is
    closed: pytorch issue 195982), reports a failed write (pytorch issue 191391), and leaves the folder's path out of
    the metadata: the folder will have another name.
    """

    def __init__(self, folder: pathlib.Path, read: Callable[[str], Tensor] | None = None):
        """read: gives a tensor by its name, where the tensors to save are on meta."""
        super().__init__(folder, thread_count=1, overwrite=False)
        self.read = read
        self.files: set[str] = set()  # of all ranks; known to rank 0 when it has finished

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with (self.path / name).open("wb") as file, without_crc32():
                for item in plan.items:
                    begin = file.tell()
                    tensor = self.read(item.index.fqn) if self.read else planner.resolve_data(item).detach().cpu()
                    # a view would bring the whole storage that it looks into
                    torch.save(tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor, file)
                    size = file.tell() - begin
                    results.append(WriteResult(index=item.index, size_in_bytes=size,
                                               storage_data=_StorageInfo(name, begin, size)))
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.files = {written.storage_data.relative_path for of_rank in results for written in of_rank}
        super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


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
    """Writes a checkpoint of weights alone into an empty folder, from one process outside of any run: what `read` gives
    for each parameter of a meta model. Raises OSError, and what `read` raises."""
    writer = Writer(folder, lambda name: read(name.removeprefix("model.")))
    try:
        dcp.save(tensors_of(model, None), storage_writer=writer, no_dist=True)
    except dcp.CheckpointException as error:  # a BaseException
        raise min(error.failures.items())[1][0] from None
    write_manifest(folder, extra_files, state, hash_files(folder, sorted(writer.files)))


def write_manifest(folder: pathlib.Path, extra_files: list[pathlib.Path], state: dict, hashed: dict[str, dict]) -> None:
    """Makes tensors that are written and hashed a checkpoint: state, tokenizer, manifest; each file synced."""
    for path in extra_files:
        shutil.copyfile(path, folder / path.name)
    (folder / STATE).write_text(json.dumps(state, indent=2))
    names = [path.name for path in extra_files] + [STATE, ".metadata"]
    (folder / MANIFEST).write_bytes(render_manifest(hashed | hash_files(folder, names)))
    for name in [*names[:-1], MANIFEST]:  # DCP has synced its own
        files.sync(folder / name)
