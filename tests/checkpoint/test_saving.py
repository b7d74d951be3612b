"""What ranks write together: files and plans, failures, saving in the background, which checkpoints stay."""

import contextlib
import dataclasses
import errno
import io
import logging
import os
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint import catalog, save
from checkpoint.load import Reader, restore, tensors_of
from checkpoint.manifest import UnreadableCheckpoint
from checkpoint.save import SaveFailed, Saver, Writer, all_finite
from parallel.materialize import local_tensor
from parallel.ranks import all_gather_objects
from parallel.torch_patches import IS_TORCH_2_11
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


def stored_bytes(tensor: torch.Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor.clone(), file)
    return len(file.getvalue())


@pytest.mark.parametrize("ranks", [3, 4])
@distributed()
def test_each_file_holds_the_shards_of_its_rank(world, ranks, tmp_path):
    """Of 5 rows the fourth of 4 ranks has none; of 322 it has two fewer than the others."""
    run = Run(world, tmp_path, model={"ffn_dim": 5, "vocab_size": 322})
    run.add(1.0)
    run.save(1)
    folder = catalog.path_of(run.root, 1)
    sizes = {f"__{rank}_0.distcp": 0 for rank in range(ranks)}
    others = {".metadata", "manifest.json", "state.json"}
    assert {path.name for path in folder.iterdir()} == {*sizes, *others}
    metadata = Reader(folder).metadata
    for index, info in metadata.storage_data.items():
        shape = metadata.state_dict_metadata[index.fqn].size
        shard = torch.empty(())  # AdamW's step: stored once, by any rank
        if shape:
            shards = [*torch.empty(shape).chunk(ranks), torch.empty(0, *shape[1:])]
            shard = shards[int(info.relative_path.split("_")[2])]
        assert info.length == stored_bytes(shard), index
        sizes[info.relative_path] += info.length
    assert sizes == {name: (folder / name).stat().st_size for name in sizes}
    wanted = hashes(run.tensors())
    if world.rank == 0:
        dcp_to_torch_save(folder, tmp_path / "out.pt")  # torch's own tool
        assert hashes(torch.load(tmp_path / "out.pt")) == wanted


@distributed(ranks=2)
def test_plan_is_made_once_and_again_after_a_change(world, tmp_path):
    run = Run(world, tmp_path)
    saver = run.checkpointer.saver
    assert saver is not None
    all_tensors = run.tensors()
    weights = tensors_of(run.model, None)
    last = world.rank == 1
    lacking = {name: t for name, t in all_tensors.items() if not last or "embedding" not in name}
    saves = [  # (tensors, does writing fail on the last rank, plans made, words of the error)
        (all_tensors, False, 1, None),
        (all_tensors, False, 0, None),
        (all_tensors, True, 0, r"step-00000003: rank 1: OSError: .* no space left"),
        (all_tensors, False, 0, None),
        (weights, False, 1, None),
        (weights, False, 0, None),
        (lacking, False, 1, "validate global plan"),
        (all_tensors, False, 1, None),
    ]
    for step, (tensors, fails, plans, words) in enumerate(saves, 1):
        make = mock.Mock(wraps=default_planner.create_default_global_save_plan)
        error = pytest.raises(SaveFailed, match=words) if words else contextlib.nullcontext()
        planner = mock.patch.object(default_planner, "create_default_global_save_plan", make)
        with full_disk(fails and last), planner, error:
            saver.write(step, tensors, {"step": step, "config": {}})
        assert make.call_count == (world.rank == 0 and bool(plans or IS_TORCH_2_11)), step
        assert (step in catalog.steps(run.root)) == (words is None)


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
    run.save(3)
    assert names_in(run) == ["step-00000001", "step-00000003"]
    state = catalog.read_state(catalog.path_of(run.root, 3))
    expected = (3, 21, 2, torch.__version__)
    assert tuple(state[key] for key in ("step", "tokens", "ranks", "torch")) == expected
    for step, stopping in (4, True), (run.cfg.train.steps, False):
        not_saved = pytest.raises(SaveFailed, match="the last checkpoint was not saved: .*rank 0")
        with full_disk(), not_saved:
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
    assert catalog.steps(run.root) == []


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
    run.save(1, before_publishing=lambda: names.extend(path.name for path in run.root.iterdir()))
    assert world.rank or names == [".step-00000001.tmp"]
    warnings = mock.Mock()
    with mock.patch.object(logging.getLogger("train"), "warning", warnings):
        run.save(2, before_publishing=no_space)  # of the rows' disk, which may be another one
    assert catalog.steps(run.root) == [1, 2]
    assert world.rank or "rows.jsonl: no space left" in str(warnings.call_args)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__1_0.distcp"])
@distributed(ranks=3)
def test_file_that_one_rank_cannot_read_stops_all(world, tmp_path, name):
    """And the next attempt reads again."""
    run = Run(world, tmp_path)
    run.save(1)
    wanted = hashes(run.tensors())
    refused = pytest.raises(UnreadableCheckpoint, match=f"{name}.*Stale file handle")
    with unreadable(name if world.rank == 2 else "no file", errno.ESTALE), refused:
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
@pytest.mark.parametrize("refuses", [False, True], ids=["pinned", "refused"])
@distributed(ranks=2)
def test_asynchronous_save_from_a_gpu_writes_once_its_copies_are_complete(world, tmp_path, refuses):
    """From memory that is allocated and pinned once, in a thread with a current device of its own; also if rank 1
    cannot pin it: CUDA raises the error again at the next kernel."""
    run = Run(world, tmp_path, async_save=True)
    checkpointer = run.checkpointer
    buffers = checkpointer.buffers
    events = []
    driver = mock.Mock(**{"cudaGetErrorString.return_value": "out of memory"})
    driver.cudaHostRegister.return_value = 2 if refuses and world.rank == 1 else 0
    kernel = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))

    def synchronize() -> None:
        equal = [torch.equal(buffers[n], local_tensor(t)) for n, t in run.tensors().items()]
        events.append(f"copied {len(equal)}" if all(equal) else "not copied")

    functions = {"cudart": lambda: driver, "_sleep": kernel, "synchronize": synchronize}
    functions["set_device"] = lambda device: events.append("device")
    checkpointer.world = dataclasses.replace(world, device=torch.device("cuda", 0))
    with mock.patch.multiple(torch.cuda, create=True, **functions):
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            checkpointer.restore(run.model, run.optimizer)
        addresses = [buffer.data_ptr() for buffer in buffers.values()]
        if world.rank == 0:
            warning = "rank 1 cannot pin its copy of the shards (out of memory)"
            assert (warning in " ".join(checkpointer.prepare_folder())) == refuses
        for step in (1, 2):
            run.add(step)
            run.save(step, before_publishing=lambda: events.append("written"))
    written = ["written"] if world.rank == 0 else []
    assert events == 2 * [f"copied {len(buffers)}", "device", *written]
    assert addresses == [buffer.data_ptr() for buffer in buffers.values()]
    assert kernel.call_count == (refuses and world.rank == 1)
    wanted = hashes(run.tensors())
    assert run.restored(2) == wanted != run.restored(1)


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
    assert catalog.steps(run.root) == [1]


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
    assert names_in(run) == [f"step-{step:08d}" for step in left]


@pytest.mark.quick
@distributed(ranks=1)
def test_checkpoint_that_cannot_be_removed_fails_no_save(world, tmp_path):
    run = Run(world, tmp_path, keep_last=1)
    denied = PermissionError(13, "Permission denied")
    with mock.patch.object(os, "rename", side_effect=denied):
        (problem,) = catalog.remove(run.root, 1)
    assert problem.endswith("cannot be removed: Permission denied")
    with mock.patch.object(os, "rmdir", side_effect=denied):
        run.save(1)
        run.save(2)
    assert run.reports == [(1, None), (2, None)]
    assert names_in(run) == [".step-00000001.tmp", "step-00000002"]


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
    assert catalog.steps(run.root) == [1, 2, 3]
