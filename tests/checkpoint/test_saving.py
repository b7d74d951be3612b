"""What ranks write together: files and plans, failures, saving in the background, which checkpoints stay."""

import contextlib
import dataclasses
import functools
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint import catalog, save
from checkpoint.catalog import root_of
from checkpoint.checkpointer import Checkpointer
from checkpoint.load import Reader, restore, tensors_of
from checkpoint.manifest import UnreadableCheckpoint
from checkpoint.save import SaveFailed, Saver, Writer, all_finite
from optim import Progress, build_optimizer
from parallel.ranks import all_gather_objects
from parallel.torch_patches import IS_TORCH_2_11
from tests.checkpoint.conftest import no_data, run_config
from tests.conftest import build, hashes
from tests.distributed import distributed


class Run:
    """A model, its optimizer and a checkpointer on this rank."""

    def __init__(self, world, folder, model: dict | None = None, **checkpoint):
        self.cfg = run_config(
            folder, model=model or {}, train={"steps": 100}, checkpoint=checkpoint
        )
        self.model = build(self.cfg, world)
        self.optimizer = build_optimizer(self.model, self.cfg.optim)
        self.reports: list[tuple[int, str | None]] = []
        self.checkpointer = Checkpointer(self.cfg, world, no_data(self.cfg))
        self.checkpointer.report = self.report

    def report(self, step: int, problem: str | None) -> None:
        self.reports.append((step, problem))
        if problem:
            print(problem, file=sys.stderr)  # pytest shows it if the test fails

    def save(self, step: int, stopping: bool = False, wait: bool = True, **options) -> None:
        progress = Progress(step, tokens=7 * step)
        self.checkpointer.save(progress, self.model, self.optimizer, stopping, **options)
        if wait:
            self.checkpointer.wait()
            dist.barrier()  # rank 0 removes what has failed

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.model, self.optimizer)

    @torch.no_grad()
    def add(self, value: float) -> None:
        for tensor in self.tensors().values():
            tensor.add_(value)

    def restored(self, step: int) -> dict[str, str]:
        restore(catalog.path_of(root_of(self.cfg), step), self.model, self.optimizer)
        return hashes(self.tensors())

    def names(self) -> list[str]:
        """On all ranks: none goes on and changes them before the others have looked."""
        names = sorted(path.name for path in root_of(self.cfg).iterdir())
        dist.barrier()
        return names


def no_space(*unused: object) -> None:
    raise OSError(28, "no space left", "rows.jsonl")


@contextlib.contextmanager
def writing_waits_for(event: threading.Event) -> Iterator[None]:
    write_data = Writer.write_data

    def waiting(*arguments):
        assert event.wait(60)
        return write_data(*arguments)

    with mock.patch.object(Writer, "write_data", waiting):
        yield


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@distributed()
def test_any_number_of_ranks_reads_any(world, ranks, saved, tmp_path):
    run = Run(world, tmp_path)
    for folder, wanted in saved.values():
        restore(folder, run.model, run.optimizer)
        assert hashes(run.tensors()) == wanted
        assert len(set(wanted.values())) > 20


# Files and plans


@pytest.mark.parametrize("ranks", [3, 4])
@distributed()
def test_each_file_holds_the_shards_of_its_rank(world, ranks, tmp_path):
    """Of 5 rows the fourth of 4 ranks has none; of 322 it has two fewer than the others."""
    run = Run(world, tmp_path, model={"ffn_dim": 5, "vocab_size": 322})
    run.add(1.0)
    run.save(1)
    folder = catalog.path_of(root_of(run.cfg), 1)
    assert catalog.problems_of(folder) == []
    files = {f"__{rank}_0.distcp" for rank in range(ranks)}
    assert {path.name for path in folder.iterdir()} == files | {
        ".metadata",
        "manifest.json",
        "state.json",
    }
    sizes = dict.fromkeys(files, 0)
    metadata = Reader(folder).metadata
    for index, info in metadata.storage_data.items():
        shape = metadata.state_dict_metadata[index.fqn].size
        shard = torch.empty(())  # AdamW's step: stored once, by any rank
        if shape:
            number = int(info.relative_path.split("_")[2])
            rows = torch.empty(shape).chunk(ranks)
            shard = rows[number] if number < len(rows) else torch.empty(0, *shape[1:])
        assert info.length == stored_bytes(shard), index
        sizes[info.relative_path] += info.length
    assert sizes == {name: (folder / name).stat().st_size for name in files}
    wanted = hashes(run.tensors())
    if world.rank == 0:
        dcp_to_torch_save(folder, tmp_path / "out.pt")  # torch's own tool
        assert hashes(torch.load(tmp_path / "out.pt")) == wanted


def stored_bytes(tensor: torch.Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor.clone(), file)
    return len(file.getvalue())


@distributed(ranks=2)
def test_plan_is_made_once_and_again_after_a_change(world, tmp_path):
    run = Run(world, tmp_path)
    saver = run.checkpointer.saver
    assert saver is not None
    everything = run.tensors()
    weights = tensors_of(run.model, None)
    lacking = {name: tensor for name, tensor in everything.items() if "embedding" not in name}
    last = world.rank == 1
    saves = [  # (tensors, does writing fail on the last rank, plans made, words of the error)
        (everything, False, 1, None),
        (everything, False, 0, None),
        (everything, True, 0, r"step-00000003: rank 1: OSError: .* no space left"),
        (everything, False, 0, None),
        (weights, False, 1, None),
        (weights, False, 0, None),
        (lacking if last else everything, False, 1, "validate global plan"),
        (everything, False, 1, None),
    ]
    for step, (tensors, fails, plans, words) in enumerate(saves, 1):
        failing = mock.patch.object(Writer, "write_data", no_space)
        planner = mock.Mock(wraps=default_planner.create_default_global_save_plan)
        error = pytest.raises(SaveFailed, match=words) if words else contextlib.nullcontext()
        with (
            failing if fails and last else contextlib.nullcontext(),
            mock.patch.object(default_planner, "create_default_global_save_plan", planner),
            error,
        ):
            saver.write(step, tensors, {"step": step, "config": {}})
        makes_plan = plans or IS_TORCH_2_11
        assert planner.call_count == (world.rank == 0 and makes_plan), step
        assert (step in catalog.steps(root_of(run.cfg))) == (words is None)


# Failures


@pytest.mark.quick
@pytest.mark.parametrize("asynchronous", [False, True])
@distributed(ranks=2)
def test_failed_save_fails_on_all_ranks_and_training_continues(world, tmp_path, asynchronous):
    run = Run(world, tmp_path, async_save=asynchronous)
    run.save(1)
    fails = mock.patch.object(Writer, "write_data", no_space)
    with fails if world.rank == 1 else contextlib.nullcontext():
        run.save(2)
        assert run.names() == ["step-00000001"]
    run.save(3)
    assert run.names() == ["step-00000001", "step-00000003"]
    state = catalog.read_state(catalog.path_of(root_of(run.cfg), 3))
    expected = (3, 21, 2, torch.__version__)
    assert tuple(state[key] for key in ("step", "tokens", "ranks", "torch")) == expected
    for step, stopping in (4, True), (run.cfg.train.steps, False):
        with fails, pytest.raises(SaveFailed, match="the last checkpoint was not saved: .*rank 0"):
            run.save(step, stopping)
    if world.rank == 0:
        (one, two, three, four, _) = run.reports
        assert (one, three) == ((1, None), (3, None))
        assert "step-00000002: rank 1: OSError: [Errno 28] no space left" in str(two[1])
        assert "step-00000004: rank 0: OSError" in str(four[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@distributed(ranks=2)
def test_weights_that_are_not_finite_are_not_saved(world, tmp_path, value):
    run = Run(world, tmp_path)
    if world.rank == 1:
        with torch.no_grad():
            next(run.model.parameters()).to_local()[-1, -1] = value
    with pytest.raises(FloatingPointError, match="step 7: .*not finite"):
        run.save(7, stopping=True)
    assert catalog.steps(root_of(run.cfg)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_value_that_is_not_finite_is_seen(dtype):
    for value, finite in (-3e38, True), (float("nan"), False), (-float("inf"), False):
        tensors = {"empty": torch.zeros(0), "full": torch.zeros(3, 4, dtype=dtype)}
        tensors["full"][1, 2] = value
        assert all_finite(tensors) == finite


@pytest.mark.quick
@distributed(ranks=2)
def test_checkpoint_is_published_after_what_must_be_on_disk_first(world, tmp_path):
    run = Run(world, tmp_path)
    names = []

    def rows_are_synced() -> None:  # what it raises is only logged
        names.extend(path.name for path in root_of(run.cfg).iterdir())

    run.save(1, before_publishing=rows_are_synced)
    assert world.rank or names == [".step-00000001.tmp"]
    warnings = mock.Mock()
    with mock.patch.object(logging.getLogger("train"), "warning", warnings):
        run.save(2, before_publishing=no_space)  # of the rows' disk, which may be another one
    assert catalog.steps(root_of(run.cfg)) == [1, 2]
    assert world.rank or "rows.jsonl: no space left" in str(warnings.call_args)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__1_0.distcp"])
@distributed(ranks=3)
def test_file_that_one_rank_cannot_read_stops_all(world, tmp_path, name):
    """And the next attempt reads again."""
    run = Run(world, tmp_path)
    run.save(1)
    wanted = hashes(run.tensors())
    opened = os.open

    def stale(path, *arguments, **options):
        if world.rank == 2 and str(path).endswith(name):
            raise OSError(116, "Stale file handle")
        return opened(path, *arguments, **options)

    refused = pytest.raises(UnreadableCheckpoint, match=f"{name}.*Stale file handle")
    with mock.patch.object(os, "open", stale), refused:
        run.restored(1)
    assert run.restored(1) == wanted


# In the background


@distributed(ranks=2)
def test_asynchronous_save_holds_the_weights_at_its_call(world, tmp_path):
    """The second, which comes too early, waits for the first: it reuses the memory that the first has copied to."""
    run = Run(world, tmp_path, async_save=True)
    wanted = []
    written = threading.Event()
    with writing_waits_for(written):
        for step in (1, 2):
            run.add(step)
            wanted.append(hashes(run.tensors()))
            if step == 2:
                assert catalog.steps(root_of(run.cfg)) == []
                threading.Timer(0.5, written.set).start()
            run.save(step, wait=False)
        run.add(-7.0)
        run.checkpointer.wait()
    assert [run.restored(1), run.restored(2)] == wanted
    assert run.reports == ([(1, None), (2, None)] if world.rank == 0 else [])


class Driver:
    """As much of torch.cuda as a save needs, with its habits: a copy to pinned memory is made late, no page is pinned
    twice, and an error that a call returns is raised by the next kernel as well."""

    def __init__(self, refuses: bool):
        self.refuses = refuses
        self.pinned: list[range] = []  # pages
        self.late: list[Callable[[], object]] = []
        self.error = 0
        self.events: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(CUDA, name)

    def cudart(self) -> "Driver":
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = range(address // 4096, (address + size - 1) // 4096 + 1)
        if self.refuses or any(page in other for other in self.pinned for page in pages):
            self.error = 2
        else:
            self.pinned.append(pages)
        return self.error

    def cudaGetErrorString(self, error: int) -> str:
        return f"out of memory, {error}"

    def _sleep(self, cycles: int) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")

    def copy_(self, buffer: torch.Tensor, shard: torch.Tensor, non_blocking: bool = False):
        self._sleep(0)  # a kernel
        copy = functools.partial(COPY, buffer, shard)
        if non_blocking and any(buffer.data_ptr() // 4096 in pages for pages in self.pinned):
            self.late.append(copy)
        else:
            copy()
        return buffer

    def synchronize(self) -> None:
        self.events.append("synchronize")
        while self.late:
            self.late.pop()()

    def set_device(self, device: torch.device) -> None:
        self.events.append("set_device")


CUDA = torch.cuda
COPY = torch.Tensor.copy_


@pytest.mark.quick
@pytest.mark.parametrize("refuses", [False, True], ids=["pinned", "refused"])
@distributed(ranks=2)
def test_asynchronous_saves_from_a_gpu_equal_blocking_ones(world, tmp_path, refuses):
    """Also if rank 1 cannot pin memory. All is allocated at the start, and pinned once; the copies are complete before
    the write begins, in a thread with a current device of its own."""
    driver = Driver(refuses and world.rank == 1)
    run, blocking = Run(world, tmp_path / "run", async_save=True), Run(world, tmp_path / "blocking")
    run.checkpointer.world = dataclasses.replace(world, device=torch.device("cuda", 0))
    write = Saver.write
    noted = lambda *arguments: (driver.events.append("write"), write(*arguments))[1]  # noqa: E731
    with (
        mock.patch.object(torch, "cuda", driver),
        mock.patch.object(torch.Tensor, "copy_", lambda *a, **options: driver.copy_(*a, **options)),
        mock.patch.object(Saver, "write", noted),
    ):
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            run.checkpointer.restore(run.model, run.optimizer)
        assert len(driver.pinned) == (not driver.refuses) and driver.error == 0
        addresses = {name: buffer.data_ptr() for name, buffer in run.checkpointer.buffers.items()}
        if world.rank == 0:
            text = " ".join(run.checkpointer.prepare_folder())
            assert (
                "rank 1 cannot pin its copy of the shards (out of memory, 2)" in text
            ) == refuses
        for step in (1, 2):
            run.add(step)
            run.save(step)
    assert driver.events == 2 * ["synchronize", "set_device", "write"]
    assert addresses == {name: b.data_ptr() for name, b in run.checkpointer.buffers.items()}
    assert {*addresses} == {*run.tensors()}
    for step in (1, 2):
        blocking.add(step)
        blocking.save(step)
    for step in (1, 2):
        assert run.restored(step) == blocking.restored(step)


@pytest.mark.parametrize("owner, name", [(Saver, "write"), (save.dcp, "save")])
@distributed(ranks=2)
def test_asynchronous_save_uses_a_process_group_of_its_own(world, tmp_path, owner, name):
    """Rank 1 saves before training's collective, rank 0 after it."""
    run = Run(world, tmp_path, async_save=True)
    began = threading.Event()
    gathered = threading.Event()
    work = getattr(owner, name)

    def delayed(*arguments, **options):
        began.set()
        assert world.rank == 1 or gathered.wait(60)
        work(*arguments, **options)

    with mock.patch.object(owner, name, delayed):
        run.save(1, wait=False)
        assert began.wait(60)
        time.sleep(0.5 * world.rank)
        assert all_gather_objects(world.rank) == [0, 1]
        gathered.set()
        run.checkpointer.wait()
    assert catalog.steps(root_of(run.cfg)) == [1]


# Which stay


@pytest.mark.quick
@pytest.mark.parametrize(
    "options, left",
    [
        ({}, [10, 20, 30, 40]),
        ({"keep_last": 1}, [40]),
        ({"keep_last": 3}, [20, 30, 40]),
        ({"keep_last": 1, "keep_every_steps": 20, "save_every_steps": 10}, [20, 40]),
    ],
    ids=str,
)
@distributed(ranks=2)
def test_purge_keeps_the_last_and_milestones(world, tmp_path, options, left):
    run = Run(world, tmp_path, **options)
    for step in (10, 20, 30, 40):
        run.save(step)
    assert run.names() == [f"step-{step:08d}" for step in left]


@pytest.mark.quick
@distributed(ranks=1)
def test_checkpoint_that_cannot_be_removed_fails_no_save(world, tmp_path):
    run = Run(world, tmp_path, keep_last=1)
    denied = PermissionError(13, "Permission denied")
    with mock.patch.object(os, "rename", side_effect=denied):
        assert catalog.remove(root_of(run.cfg), 1)[0].endswith(
            "cannot be removed: Permission denied"
        )
    with mock.patch.object(os, "rmdir", side_effect=denied):
        run.save(1)
        run.save(2)
    assert run.reports == [(1, None), (2, None)]
    assert run.names() == [".step-00000001.tmp", "step-00000002"]


@distributed(ranks=1)
def test_stopping_run_does_not_purge(world, tmp_path):
    run = Run(world, tmp_path, async_save=True, keep_last=1)
    run.save(1)
    released = threading.Event()
    purge = Saver.purge
    with mock.patch.object(Saver, "purge", lambda saver: (released.wait(60), purge(saver))[1]):
        run.save(2, wait=False)
        threading.Timer(0.5, released.set).start()
        run.save(3, stopping=True)
    assert catalog.steps(root_of(run.cfg)) == [1, 2, 3]
