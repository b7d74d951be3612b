"""What ranks write together: files and plans, failures, saving in the background, which checkpoints stay."""

import contextlib
import dataclasses
import errno
import logging
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint import catalog, save
from checkpoint.load import restore
from checkpoint.manifest import UnreadableCheckpoint
from checkpoint.save import SaveFailed, Writer, all_finite
from parallel.materialize import local_tensor
from parallel.ranks import all_gather_objects
from tests.checkpoint.conftest import Run, unreadable
from tests.conftest import hashes
from tests.distributed import distributed


def names_in(run: Run) -> list[str]:
    """On all ranks: none continues and changes them before the others have looked."""
    names = sorted(path.name for path in run.root.iterdir())
    dist.barrier()
    return names


def no_space(*unused: object) -> None:
    raise OSError(28, "no space left", "rows.jsonl")


def full_disk(of_this_rank: bool = True) -> contextlib.AbstractContextManager:
    if not of_this_rank:
        return contextlib.nullcontext()
    return mock.patch.object(Writer, "write_data", no_space)


# Files and plans


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@distributed()
def test_any_number_of_ranks_reads_any(world, ranks, saved, tmp_path):
    run = Run(world, tmp_path)
    for folder, wanted in saved.values():
        restore(folder, run.model, run.optimizer)
        assert hashes(run.tensors()) == wanted
        assert len(set(wanted.values())) > 20


@pytest.mark.parametrize("ranks", [3, 4])
@distributed()
def test_tensors_are_stored_once_and_torchs_own_tool_reads_them(world, ranks, tmp_path):
    """Of 5 rows the fourth of 4 ranks has none; of 3222 it has two fewer than the others."""
    run = Run(world, tmp_path, model={"ffn_dim": 5, "vocab_size": 3222})
    run.save(1)
    folder = catalog.path_of(run.root, 1)
    wanted = hashes(run.tensors())
    values = sum(tensor.nbytes for tensor in run.tensors().values())
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert values < stored < values + 2000 * ranks * len(wanted)
    if world.rank == 0:
        dcp_to_torch_save(folder, tmp_path / "out.pt")
        assert hashes(torch.load(tmp_path / "out.pt")) == wanted


# Failures


@pytest.mark.quick
@pytest.mark.parametrize("asynchronous", [False, True])
@distributed(ranks=2)
def test_failed_save_fails_on_all_ranks_and_training_continues(world, tmp_path, asynchronous):
    run = Run(world, tmp_path, async_save=asynchronous)
    run.save(1)
    with full_disk(of_this_rank=world.rank == 1):
        run.save(2)
        assert names_in(run) == ["step-00000001"]
    run.add(1.0)
    wanted = hashes(run.tensors())
    run.save(3)
    assert names_in(run) == ["step-00000001", "step-00000003"]
    assert run.restored(3) == wanted
    for step, stopping in (4, True), (run.cfg.train.steps, False):
        not_saved = pytest.raises(SaveFailed, match="the last checkpoint was not saved: .*rank 0")
        with full_disk(), not_saved:
            run.save(step, stopping)
    if world.rank == 0:
        problems = [problem for _, problem in run.reports]
        assert (problems[0], problems[2]) == (None, None)
        assert "step-00000002: rank 1: OSError: [Errno 28] no space left" in str(problems[1])


@distributed(ranks=2)
def test_weights_that_are_not_finite_are_not_saved(world, tmp_path):
    run = Run(world, tmp_path)
    if world.rank == 1:
        with torch.no_grad():
            next(run.model.parameters()).to_local()[-1, -1] = float("nan")
    with pytest.raises(FloatingPointError, match="step 7: .*not finite"):
        run.save(7, stopping=True)
    assert catalog.steps(run.root) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_value_that_is_not_finite_is_seen(dtype):
    for value, finite in (-3e38, True), (float("nan"), False), (-float("inf"), False):
        tensors = {"empty": torch.zeros(0), "full": torch.zeros(3, 4, dtype=dtype)}
        tensors["full"][1, 2] = value
        assert all_finite(tensors) == finite


@pytest.mark.quick
@distributed(ranks=2)
def test_checkpoint_is_saved_though_rows_are_not(world, tmp_path):
    """Their disk may be another one."""
    run = Run(world, tmp_path)
    warnings = mock.Mock()
    with mock.patch.object(logging.getLogger("train"), "warning", warnings):
        run.save(2, before_publishing=no_space)
    assert catalog.steps(run.root) == [2]
    assert world.rank or "rows.jsonl: no space left" in str(warnings.call_args)


@distributed(ranks=3)
def test_file_that_one_rank_cannot_read_stops_all(world, tmp_path):
    """And the next attempt reads again."""
    run = Run(world, tmp_path)
    run.save(1)
    wanted = hashes(run.tensors())
    refused = pytest.raises(UnreadableCheckpoint, match="__1_0.distcp.*Stale file handle")
    with unreadable("__1_0.distcp" if world.rank == 2 else "no file", errno.ESTALE), refused:
        run.restored(1)
    assert run.restored(1) == wanted


# In the background


@distributed(ranks=2)
def test_asynchronous_save_holds_the_weights_at_its_call(world, tmp_path):
    """The second, which comes too early, waits for the first: it reuses the memory that the first has copied to."""
    run = Run(world, tmp_path, async_save=True)
    wanted = []
    may_write = threading.Event()
    write = Writer.write_data
    waiting = lambda *arguments: may_write.wait(60) and write(*arguments)  # noqa: E731
    with mock.patch.object(Writer, "write_data", waiting):
        for step in (1, 2):
            run.add(step)
            wanted.append(hashes(run.tensors()))
            if step == 2:
                assert catalog.steps(run.root) == []
                threading.Timer(0.5, may_write.set).start()
            run.save(step, wait=False)
        run.add(-7.0)
        run.checkpointer.wait()
    assert [run.restored(1), run.restored(2)] == wanted
    assert run.reports == ([(1, None), (2, None)] if world.rank == 0 else [])


@pytest.mark.quick
@distributed(ranks=2)
def test_asynchronous_save_from_a_gpu_writes_once_its_copies_are_complete(world, tmp_path):
    """From memory that is allocated and pinned once, in a thread with a current device of its own."""
    run = Run(world, tmp_path, async_save=True)
    checkpointer = run.checkpointer
    buffers = checkpointer.buffers
    events = []

    def synchronize() -> None:
        equal = [torch.equal(buffers[n], local_tensor(t)) for n, t in run.tensors().items()]
        events.append(f"copied {len(equal)}" if all(equal) else "not copied")

    driver = mock.Mock(**{"cudaHostRegister.return_value": 0})
    functions: dict[str, Any] = {"cudart": lambda: driver, "synchronize": synchronize}
    functions["set_device"] = lambda device: events.append("device")
    checkpointer.world = dataclasses.replace(world, device=torch.device("cuda", 0))
    with mock.patch.multiple(torch.cuda, create=True, **functions):
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            checkpointer.restore(run.model, run.optimizer)
        for step in (1, 2):
            run.add(step)
            run.save(step, before_publishing=lambda: events.append("written"))
    written = ["written"] if world.rank == 0 else []
    assert events == 2 * [f"copied {len(buffers)}", "device", *written]
    assert driver.cudaHostRegister.call_count == 1
    wanted = hashes(run.tensors())
    assert run.restored(2) == wanted != run.restored(1)


@distributed(ranks=2)
def test_asynchronous_save_uses_a_process_group_of_its_own(world, tmp_path):
    """Rank 1 saves before training's collective, rank 0 after it."""
    run = Run(world, tmp_path, async_save=True)
    began = threading.Event()
    gathered = threading.Event()
    save_shards = save.dcp.save

    def delayed(*arguments, **options):
        began.set()
        assert world.rank == 1 or gathered.wait(60)
        save_shards(*arguments, **options)

    with mock.patch.object(save.dcp, "save", delayed):
        run.save(1, wait=False)
        assert began.wait(60)
        time.sleep(0.5 * world.rank)
        assert all_gather_objects(world.rank) == [0, 1]
        gathered.set()
        run.checkpointer.wait()
    assert catalog.steps(run.root) == [1]


# Which stay


@pytest.mark.quick
@pytest.mark.parametrize(
    "options, left",
    [
        ({}, [10, 20, 30, 40]),
        ({"keep_last": 1}, [40]),
        ({"keep_last": 1, "keep_every_steps": 20, "save_every_steps": 10}, [20, 40]),
    ],
    ids=str,
)
@distributed(ranks=2)
def test_purge_keeps_the_last_and_milestones(world, tmp_path, options, left):
    run = Run(world, tmp_path, **options)
    for step in (10, 20, 30, 40):
        run.save(step)
    assert names_in(run) == [f"step-{step:08d}" for step in left]
