"""Saving behind the training, what a failed save leaves, and which checkpoints stay."""

import contextlib
import dataclasses
import errno
import io
import logging
import os
import pickle
import re
import shutil
import threading
import time
from concurrent import futures
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import config
import files
from checkpoint import catalog, save
from checkpoint.checkpointer import Checkpointer, State
from checkpoint.load import Reader, restore, tensors_of
from checkpoint.save import SaveFailed, Saver, Writer, _all_finite
from config import ConfigError
from model.llama import Llama
from optim import build_optimizer
from parallel.ranks import all_gather_objects
from tests import cases
from tests.conftest import make_config


def configured(folder, **keys):
    return make_config(
        run={"name": "r", "output_dir": str(folder)}, train={"steps": 100}, checkpoint=keys
    )


@contextlib.contextmanager
def ready(folder, **keys):
    """(configuration, model, optimizer, checkpointer) on this rank."""
    cfg = configured(folder, **keys)
    with cases.process_group() as world:
        model = cases.build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
        yield cfg, model, optimizer, Checkpointer(cfg, world, [], [])
        del model, optimizer


def uneven(folder) -> config.Config:
    """On 4 ranks the last has none of 5 rows, and 79 of 322, where others have 81."""
    return dataclasses.replace(
        configured(folder), model=make_config(model={"ffn_dim": 5, "vocab_size": 322}).model
    )


# By step: how it is saved, and what rank 0 then does: plans anew, or sends the plan of the save before. All that a rank
# may do differently is done by the last one.
SAVES = [
    ("all", 1),
    ("all", 0),
    ("all", 0),
    ("fails", 0),
    ("all", 1),
    ("all", 0),
    ("weights", 1),
    ("weights", 0),
    ("all", 1),
    ("one lacks", 0),
    ("one lacks", 1),
    ("all", 1),
    ("one tensor", 1),
]


def save_often(folder) -> list[tuple]:
    """(error, plans made, bytes sent for the plan, digests of what was to be saved) of each of SAVES."""
    from checkpoint import save

    found = []
    write = Writer.write_data
    gather = dist.gather_object
    cfg = uneven(folder)
    with cases.process_group() as world:
        last, sent = world.rank == world.size - 1, []
        model = cases.build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
        saver = Saver(cfg, 0, [])

        def failing(*arguments):
            if how == "fails" and last:
                raise OSError(28, "no space, it is said")
            return write(*arguments)

        def gathered(obj, *arguments, **keywords):
            sent.append(len(pickle.dumps(obj)))
            return gather(obj, *arguments, **keywords)

        with (
            mock.patch.object(
                save,
                "create_default_global_save_plan",
                wraps=save.create_default_global_save_plan,
            ) as planned,
            mock.patch.object(Writer, "write_data", failing),
            mock.patch.object(dist, "gather_object", gathered),
        ):
            for step, (how, _) in enumerate(SAVES, 1):
                tensors = tensors_of(model, None if how == "weights" else optimizer)
                with torch.no_grad():
                    for value in tensors.values():
                        value.add_(step)
                if how == "one tensor":
                    tensors = {"model.all": torch.arange(3.0)}
                whole = cases.digests(tensors)
                if how == "one lacks" and last:
                    del tensors["model.embedding.weight"]
                before = planned.call_count
                problem = None
                sent.clear()
                try:
                    saver.write(step, tensors, {"step": step, "config": config.to_dict(cfg)})
                except SaveFailed as error:
                    problem = str(error)
                found.append((problem, planned.call_count - before, sent[0], whole))
        del model, optimizer, saver, tensors
    return found


def written(shape: tuple[int, ...]) -> int:
    """Bytes of a float32 tensor in a file, as torch.save() itself writes it."""
    file = io.BytesIO()
    torch.save(torch.zeros(shape), file)
    return len(file.getvalue())


@pytest.mark.parametrize("ranks", [3, 4])
def test_one_plan_is_made_until_the_tensors_change(on_ranks, tmp_path, ranks):
    """And every file holds its rank's rows alone, on ranks with fewer rows and with none, in later saves too."""
    found, cfg = on_ranks(ranks, save_often, tmp_path), uneven(tmp_path)
    for step, (how, plans) in enumerate(SAVES, 1):
        problems, planned, sent, (whole, *others) = zip(*(of_rank[step - 1] for of_rank in found))
        assert planned == (plans, *[0] * (ranks - 1)) and all(other == whole for other in others)
        changed = [
            plans == 1 or (how == "one lacks" and rank == ranks - 1) for rank in range(ranks)
        ]
        assert [size > 200 for size in sent] == changed
        folder = catalog.path_of(cfg, step)
        told = {
            "fails": f"rank {ranks - 1}: OSError: .* no space, it is said",
            "one lacks": r"embedding.weight do not make up .*\(322, 48\)"
            if plans
            else "changed on some ranks only",
        }.get(how)
        assert (
            all(re.search(told, problem) for problem in problems)
            if told
            else problems == (None,) * ranks
        )
        assert folder.is_dir() == (not told)
        if told:
            continue
        assert not catalog.problems_of(folder)
        metadata = Reader(folder).metadata
        names = {f"__{rank}_0.distcp" for rank in range(1 if how == "one tensor" else ranks)}
        assert {path.name for path in folder.iterdir()} == names | {
            ".metadata",
            "manifest.json",
            "state.json",
        }
        sizes = dict.fromkeys(names, 0)
        for name, item in metadata.state_dict_metadata.items():
            is_sharded = not name.endswith(".step") and how != "one tensor"
            parts = torch.empty(item.size).chunk(ranks) if is_sharded else [torch.empty(item.size)]
            expected = {
                (sum(map(len, parts[:n])), *[0] * (part.dim() - 1)) if part.dim() else (): tuple(
                    part.shape
                )
                for n, part in enumerate(parts)
            }
            chunks = {
                tuple(chunk.offsets): tuple(chunk.sizes)
                for chunk in item.chunks
                if 0 not in chunk.sizes
            }
            assert chunks == expected, name
            for index, info in metadata.storage_data.items():
                if index.fqn == name:
                    shape = expected.get(tuple(index.offset), (0, *item.size[1:]))
                    assert info.length == written(shape), (index, info)
                    sizes[info.relative_path] += info.length
        assert sizes == {name: (folder / name).stat().st_size for name in names}
        dcp_to_torch_save(folder, tmp_path / "out.pt")
        assert cases.digests(torch.load(tmp_path / "out.pt")) == whole
        if how != "one tensor":
            model = Llama(cfg.model)  # on another mesh: one process
            optimizer = build_optimizer(model, cfg.optim) if how == "all" else None
            restore(folder, model, optimizer)
            assert cases.digests(tensors_of(model, optimizer)) == whole


def start_with_an_unreadable_file(folder, names) -> list[str]:
    """The error of choosing and reading a checkpoint, where the last rank alone cannot open the file of each name."""
    found, real = [], os.open
    with ready(folder) as (cfg, model, optimizer, checkpointer):
        cases.save(cfg, model, optimizer, 1)
        for name in names:

            def stale(path, *arguments, name=name, **keywords):
                if str(path).endswith(name):
                    raise OSError(errno.ESTALE, "Stale file handle")
                return real(path, *arguments, **keywords)

            last = checkpointer.world.rank == checkpointer.world.size - 1
            try:
                with mock.patch.object(os, "open", stale) if last else contextlib.nullcontext():
                    Checkpointer(cfg, checkpointer.world, [], []).restore(model, optimizer, None)
                found.append("read")
            except ConfigError as error:
                found.append(str(error))
    return found


def test_a_file_that_one_rank_cannot_read_stops_all_ranks(on_ranks, tmp_path):
    """The last of three hashes __1_0.distcp; each rank opens the manifest to choose, and .metadata to read."""
    names = ("manifest.json", ".metadata", "__1_0.distcp", "nothing")
    for told in on_ranks(3, start_with_an_unreadable_file, tmp_path, names, timeout=30):
        assert [
            name in text and "Stale file handle" in text for name, text in zip(names, told)
        ] == [True] * 3 + [False]
        assert told[-1] == "read"


def overwrite_while_saving(folder) -> tuple[bool, bool]:
    """(was the write still under way after save(), does the checkpoint hold what the weights were at save())."""
    released, original = threading.Event(), Writer.write_data
    Writer.write_data = lambda *arguments: (released.wait(60), original(*arguments))[1]
    with ready(folder, async_save=True) as (cfg, model, optimizer, checkpointer):
        reported, equal = [], []
        checkpointer.report = lambda step, problem: reported.append((step, problem))
        for step in (1, 2):  # the second uses the staged memory again
            for value in tensors_of(model, optimizer).values():
                value.add_(step)
            before = cases.digests(tensors_of(model, optimizer))
            released.clear()
            checkpointer.save(State(step), model, optimizer, stopping=False, data=[])
            checkpointer.finish_pending_save()
            under_way = len(reported) < step and not catalog.path_of(cfg, step).exists()
            with torch.no_grad():
                for value in tensors_of(model, optimizer).values():
                    value.fill_(-7.0)
            released.set()
            checkpointer.finish_pending_save(wait=True)
            restore(catalog.path_of(cfg, step), model, optimizer)
            equal.append(cases.digests(tensors_of(model, optimizer)) == before)
        assert reported == ([(1, None), (2, None)] if checkpointer.world.rank == 0 else [])
        Writer.write_data = original
    return under_way, all(equal)


def test_weights_changed_after_the_call_do_not_reach_the_file(on_ranks, tmp_path):
    assert on_ranks(2, overwrite_while_saving, tmp_path) == [(True, True)] * 2


def order_of_a_save_behind_the_training(folder) -> list[str]:
    """What two saves do to the device, and when they copy and write. The second reuses the memory of the first."""
    events, copy = [], torch.Tensor.copy_
    with ready(folder, async_save=True) as (_, model, optimizer, checkpointer):

        def copied(held, *arguments, **keywords):
            events.append("copy")
            return copy(held, *arguments, **keywords)

        def written(saver, *arguments) -> None:
            events.append("write")

        def chosen(device) -> None:
            assert (
                device == checkpointer.world.device
                and threading.current_thread() is not threading.main_thread()
            )
            events.append("set_device")

        with (
            mock.patch.object(torch.Tensor, "copy_", copied),
            mock.patch.object(Saver, "write", written),
            mock.patch.object(torch.cpu, "synchronize", lambda: events.append("synchronize")),
            mock.patch.object(torch.cpu, "set_device", chosen),
        ):
            for step in (1, 2):
                checkpointer.save(State(step), model, optimizer, stopping=False, data=[])
                checkpointer.finish_pending_save(wait=True)
    return events


def test_a_save_behind_the_training_waits_for_the_copies(on_ranks, tmp_path):
    """Of which the device may still be making some. The saver's thread has a current device of its own, which would
    be the first."""
    (events,) = on_ranks(1, order_of_a_save_behind_the_training, tmp_path)
    copies = events.index("synchronize")
    assert copies > 20 and events == 2 * [*["copy"] * copies, "synchronize", "set_device", "write"]


def save_while_saving(folder) -> list[bool]:
    """Does each of two checkpoints hold what the weights were at its save(), of which the second comes too early."""
    released, original = threading.Event(), Writer.write_data
    with ready(folder, async_save=True) as (cfg, model, optimizer, checkpointer):
        with mock.patch.object(
            Writer, "write_data", lambda *arguments: (released.wait(60), original(*arguments))[1]
        ):
            saved = []
            for step in (1, 2):
                for value in tensors_of(model, optimizer).values():
                    value.add_(step)
                saved.append(cases.digests(tensors_of(model, optimizer)))
                if step == 2:
                    threading.Timer(0.5, released.set).start()
                checkpointer.save(State(step), model, optimizer, stopping=False, data=[])
            checkpointer.finish_pending_save(wait=True)
        found = []
        for step in (1, 2):
            restore(catalog.path_of(cfg, step), model, optimizer)
            found.append(cases.digests(tensors_of(model, optimizer)) == saved[step - 1])
        return found


def test_a_save_does_not_touch_what_the_one_before_still_writes(on_ranks, tmp_path):
    assert on_ranks(1, save_while_saving, tmp_path) == [[True, True]]


def resume_with_another_optimizer(folder) -> str:
    """The error, of one that no option names: a fork's."""
    with ready(folder) as (cfg, model, optimizer, checkpointer):
        checkpointer.save(State(1), model, optimizer, stopping=True, data=[])
        for state in optimizer.state.values():
            del state["exp_avg_sq"]
        try:
            Checkpointer(cfg, checkpointer.world, [], []).restore(model, optimizer, None)
        except ConfigError as error:
            return str(error)
    return "none"


def test_another_optimizer_is_refused_in_one_line(on_ranks, tmp_path):
    for message in on_ranks(2, resume_with_another_optimizer, tmp_path):
        assert (
            "\n" not in message
            and "exp_avg_sq (torch.float32), step (torch.float32) of another opt" in message
        )


def save_what_may_not_be_published(folder) -> tuple[list[str], list[int]]:
    """(problems reported, the checkpoints then there) where what must be on disk first, the rows, cannot be."""

    def refuse() -> None:
        raise OSError(28, "no space for the rows")

    problems = []
    with ready(folder) as (cfg, model, optimizer, checkpointer):
        checkpointer.report = lambda step, problem: problems.append(problem)
        checkpointer.save(
            State(1), model, optimizer, stopping=False, data=[], before_publishing=refuse
        )
        checkpointer.finish_pending_save(wait=True)
        return problems, catalog.steps(cfg)


def test_nothing_is_published_before_its_rows_are_on_disk(on_ranks, tmp_path):
    (problems, steps), (others, _) = on_ranks(2, save_what_may_not_be_published, tmp_path)
    assert (
        len(problems) == 1 and "no space for the rows" in problems[0] and not others and steps == []
    )


def save_with_a_nan_on_rank_one(folder) -> tuple[str, list[str]]:
    """(the error, what stands in the folder afterwards)."""
    with ready(folder) as (cfg, model, optimizer, checkpointer):
        if checkpointer.world.rank == 1:
            with torch.no_grad():
                next(model.parameters()).to_local()[-1, -1] = float("nan")
        try:
            checkpointer.save(State(7), model, optimizer, stopping=True, data=[])
        except FloatingPointError as error:
            return str(error), catalog.steps(cfg)
    return "none", []


def test_a_nan_in_one_ranks_weights_is_not_saved(on_ranks, tmp_path):
    for message, steps in on_ranks(2, save_with_a_nan_on_rank_one, tmp_path):
        told = "step 7: the update made weights that are not finite, and they were not saved"
        assert message.startswith(told) and steps == []


def fail_and_continue(folder) -> list:
    """For both ways of saving, how each of three saves ended, the second of which fails on rank 1 alone."""
    found, original = [], Writer.write_data
    with ready(folder) as (_, model, optimizer, first):
        told = f"no space for rank {first.world.rank}"
        for asynchronous in (False, True):
            cfg = configured(folder / str(asynchronous), async_save=asynchronous)
            checkpointer = Checkpointer(cfg, first.world, [], [])
            checkpointer.report = lambda step, problem: found.append((step, problem))
            for step in (1, 2, 3):

                def failing(*arguments, step=step):
                    if step == 2 and first.world.rank == 1:
                        raise OSError(28, "no space, it is said")
                    return original(*arguments)

                Writer.write_data = failing
                checkpointer.save(State(step), model, optimizer, stopping=False, data=[])
                checkpointer.finish_pending_save(wait=True)
                found.append(sorted(p.name for p in catalog.root(cfg).iterdir()))
            Writer.write_data = lambda *arguments: (_ for _ in ()).throw(OSError(28, told))
            with pytest.raises(
                SaveFailed, match="the last checkpoint was not saved.*rank 0: .*no space for rank 0"
            ):
                checkpointer.save(State(4), model, optimizer, stopping=True, data=[])
            Writer.write_data = original
    return found


def test_a_failed_save_fails_on_all_ranks_and_leaves_the_others(on_ranks, tmp_path):
    found = on_ranks(2, fail_and_continue, tmp_path)[0]
    for part in (found[:6], found[6:]):
        assert part[0] == (1, None) and part[4] == (3, None) and part[2][0] == 2
        assert "step-00000002: rank 1: OSError: [Errno 28] no space, it is said" in part[2][1]
        assert part[1::2] == [
            ["step-00000001"],
            ["step-00000001"],
            ["step-00000001", "step-00000003"],
        ]
    for asynchronous in ("False", "True"):
        state = catalog.read_state(tmp_path / asynchronous / "r/checkpoints/step-00000003")
        assert (state["step"], state["ranks"], state["torch"]) == (3, 2, torch.__version__)


@pytest.mark.parametrize(
    "value, finite",
    [
        (1.0, True),
        (float("nan"), False),
        (float("inf"), False),
        (-float("inf"), False),
        (-3e38, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_finite_check_sees_one_element(value, finite, dtype):
    tensors = {
        "a": torch.zeros(5, dtype=dtype),
        "empty": torch.zeros(0),
        "b": torch.zeros(3, 4, dtype=dtype),
    }
    tensors["b"][1, 2] = value
    assert _all_finite(tensors) == finite and _all_finite({"empty": torch.zeros(0)})


def save_with_little_room(folder) -> list[str]:
    """How a save ends with one byte less than all ranks' shards take, and with room for just them."""
    found, real = [], shutil.disk_usage
    with ready(folder) as (cfg, model, optimizer, checkpointer):
        tensors = tensors_of(model, optimizer).values()
        size = sum(t.numel() * t.element_size() for t in tensors)
        needed = size + 4096 * len(tensors) * checkpointer.world.size
        for free in (needed - 1, needed):
            shutil.disk_usage = lambda path, free=free: real(path)._replace(free=free)
            try:
                checkpointer.save(State(1), model, optimizer, stopping=True, data=[])
                found.append("saved")
            except SaveFailed as error:
                found.append(str(error))
        shutil.disk_usage = real
        assert catalog.steps(cfg) == [1]
    return found


def test_room_is_needed_for_all_shards(on_ranks, tmp_path):
    cfg = make_config()
    model = Llama(cfg.model)
    tensors = tensors_of(model, build_optimizer(model, cfg.optim)).values()
    # with a header for each shard on two ranks
    needed = sum(t.nbytes for t in tensors) + 4096 * len(tensors) * 2
    for refused, saved in on_ranks(2, save_with_little_room, tmp_path):
        room = f"{needed / 2**20:,.1f} MiB, {(needed - 1) / 2**20:,.1f} MiB"
        assert f"OSError: needs {room} are free" in refused and saved == "saved"


def keep(folder, cases_of) -> list[tuple[list[int], list[str]]]:
    """For each case (steps that stay, warnings) after 10, 20, 30 of an earlier launch and 40 of this one."""
    found, warnings = [], []
    logging.getLogger("train").addFilter(lambda record: warnings.append(record.getMessage()))
    with ready(folder) as (cfg, model, optimizer, _):
        for step in (10, 20, 30):
            cases.save(cfg, model, optimizer, step)
        for number, (keys, spoiled) in enumerate(cases_of):
            cfg = configured(folder / str(number), **keys)
            saver = Saver(cfg, 0, [])
            if saver.rank == 0:
                shutil.copytree(folder / "r", config.run_folder(cfg))
                for step in spoiled:
                    path = catalog.path_of(cfg, step) / "__0_0.distcp"
                    path.write_bytes(path.read_bytes()[:-1] + b"!")
                outside = folder / f"outside-{number}"
                shutil.copytree(catalog.path_of(cfg, 10), outside)
                (catalog.root(cfg) / "step-00000005").symlink_to(outside)
            torch.distributed.barrier()
            saver.write(40, tensors_of(model, optimizer), {"step": 40, "config": {}})
            with mock.patch.object(
                catalog, "problems_of", side_effect=catalog.problems_of
            ) as looked:
                saver.purge()
            # just written
            assert catalog.path_of(cfg, 40) not in [call.args[0] for call in looked.call_args_list]
            told = list(warnings)
            with mock.patch.object(
                catalog, "problems_of", side_effect=catalog.problems_of
            ) as looked:
                saver.purge()  # what was found bad does not count the next time; what was found good is not read again
            assert {int(call.args[0].name[5:]) for call in looked.call_args_list} <= {*spoiled}
            assert saver.rank or len(list(outside.iterdir())) == 3 + saver.ranks
            found.append((catalog.steps(cfg), told))
            warnings.clear()
    return found


KEPT = [
    ({}, (), [10, 20, 30, 40]),
    ({"keep_last": 1}, (), [40]),
    ({"keep_last": 2}, (20,), [30, 40]),
    ({"keep_last": 2}, (30,), [20, 30, 40]),
    ({"keep_last": 3}, (20, 30), [10, 20, 30, 40]),
    ({"keep_last": 1, "keep_every_steps": 20}, (), [20, 40]),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_good_checkpoints_alone_are_counted(on_ranks, tmp_path, ranks):
    for found in on_ranks(ranks, keep, tmp_path, [(keys, spoiled) for keys, spoiled, _ in KEPT]):
        for (steps, warnings), (_, spoiled, stay) in zip(found, KEPT):
            assert steps == stay
            bad = [step for step in spoiled if step in stay]
            assert len(warnings) == len(bad) and all(
                "kept, but not counted" in text for text in warnings
            )


def test_a_failed_save_ends_a_run_only_if_it_was_the_last():
    failed = futures.Future()
    failed.set_exception(SaveFailed("no space"))
    checkpointer = SimpleNamespace(world=SimpleNamespace(rank=0), report=mock.Mock())
    checkpointer.pending = 7, failed
    Checkpointer.finish_pending_save(checkpointer)
    checkpointer.report.assert_called_once_with(7, "no space")
    checkpointer.pending = 8, failed
    with pytest.raises(SaveFailed, match="^the last checkpoint was not saved: no space$"):
        Checkpointer.finish_pending_save(checkpointer, required=True)


def tidy_where_another_run_has_saved(folder) -> tuple[str, list[str], list[str]]:
    """(the error, what then stands there) of a start that chose step 1, before another run saved step 2; and what
    stands there after one that chose step 1 since, beside a killed save."""
    with ready(folder) as (cfg, model, optimizer, first):
        cases.save(cfg, model, optimizer, 1)
        late = Checkpointer(cfg, first.world, [], [])
        cases.save(cfg, model, optimizer, 2)
        try:
            late.tidy()
            message = "none"
        except ConfigError as error:
            message = str(error)
        left = sorted(path.name for path in catalog.root(cfg).iterdir())
        catalog.temporary_of(cfg, 3).mkdir()
        Checkpointer(configured(folder, resume=1), first.world, [], []).tidy()
        return message, left, sorted(path.name for path in catalog.root(cfg).iterdir())


def test_what_another_run_has_saved_since_the_choice_is_not_set_aside(on_ranks, tmp_path):
    """What it has saved before is."""
    ((message, left, tidied),) = on_ranks(1, tidy_where_another_run_has_saved, tmp_path)
    assert "another run has worked here meanwhile" in message
    assert left == ["step-00000001", "step-00000002"]
    assert tidied == ["step-00000001", "step-00000002.superseded"]


def purge_what_cannot_be_removed(folder) -> tuple[list, list[int], list[int]]:
    """(how two saves ended, the checkpoints then there, those after another purge) where none could be removed."""
    reported = []
    with ready(folder, keep_last=1) as (cfg, model, optimizer, checkpointer):
        checkpointer.report = lambda step, problem: reported.append((step, problem))
        with mock.patch.object(
            catalog, "remove", side_effect=PermissionError(13, "Permission denied")
        ):
            for step in (1, 2):
                checkpointer.save(State(step), model, optimizer, stopping=False, data=[])
                checkpointer.finish_pending_save(wait=True)
            checkpointer.purge()
        found = catalog.steps(cfg)
        checkpointer.purge()
        return reported, found, catalog.steps(cfg)


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(on_ranks, tmp_path):
    assert on_ranks(1, purge_what_cannot_be_removed, tmp_path) == [
        ([(1, None), (2, None)], [1, 2], [2])
    ]


def stop_while_purging(folder) -> list[int]:
    """The checkpoints of a run that keeps one, and is asked to stop before it has removed the one before."""
    released, purge = threading.Event(), Saver.purge
    with ready(folder, async_save=True, keep_last=1) as (cfg, model, optimizer, checkpointer):
        cases.save(cfg, model, optimizer, 1)
        with mock.patch.object(Saver, "purge", lambda saver: (released.wait(60), purge(saver))[1]):
            checkpointer.save(State(2), model, optimizer, stopping=False, data=[])
            threading.Timer(0.5, released.set).start()
            checkpointer.save(State(3), model, optimizer, stopping=True, data=[])
        return catalog.steps(cfg)


def test_a_run_that_stops_waits_for_no_purge(on_ranks, tmp_path):
    assert on_ranks(1, stop_while_purging, tmp_path) == [[1, 2, 3]]


def gather_while_saving(folder, where) -> tuple[list[int], list[int]]:
    """(what training gathers from the ranks, the checkpoints) where rank 1's save, or DCP's part of it, begins before
    training gathers, rank 0's after."""
    began, gathered = threading.Event(), threading.Event()
    owner, name = {"save": (Saver, "write"), "DCP": (save.dcp, "save")}[where]
    write = getattr(owner, name)
    with ready(folder, async_save=True) as (cfg, model, optimizer, checkpointer):
        rank = checkpointer.world.rank

        def noted(*arguments, **keywords):
            began.set()
            assert rank == 1 or gathered.wait(60)
            write(*arguments, **keywords)

        with mock.patch.object(owner, name, noted):
            checkpointer.save(State(1), model, optimizer, stopping=False, data=[])
            began.wait(60)
            time.sleep(0.5 * rank)
            found = all_gather_objects(rank)
            gathered.set()
            checkpointer.finish_pending_save(wait=True)
        return found, catalog.steps(cfg)


@pytest.mark.parametrize("where", ["save", "DCP"])
def test_a_save_behind_the_training_talks_past_it(on_ranks, tmp_path, where):
    assert on_ranks(2, gather_while_saving, tmp_path, where, timeout=30) == [([0, 1], [1])] * 2


def test_a_folder_whose_new_name_is_not_on_disk_keeps_the_old_one(tmp_path, monkeypatch):
    """Else a checkpoint that has failed, and may be lost in a power cut, would count as one."""
    sync, made = files.sync, tmp_path / ".c.tmp"
    made.mkdir()

    def refused(path) -> None:
        if (tmp_path / "c").exists():
            raise OSError(errno.EIO, "no")
        sync(path)

    monkeypatch.setattr(files, "sync", refused)
    with pytest.raises(OSError, match="no"):
        files.publish(made, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == [".c.tmp"]


@pytest.mark.parametrize(
    "number, ours",
    [
        (errno.EACCES, False),
        (errno.EPERM, False),
        (errno.EROFS, False),
        (errno.EINVAL, False),
        (errno.EIO, True),
    ],
)
def test_a_folder_above_that_is_not_ours_needs_no_sync(tmp_path, monkeypatch, number, ours):
    """/home may not be open to us, / may be read-only; but what a disk refuses is no checkpoint."""
    sync, made = files.sync, tmp_path / ".c.tmp"
    made.mkdir()

    def refused(path) -> None:
        if path == tmp_path.parent:
            raise OSError(number, "no")
        sync(path)

    monkeypatch.setattr(files, "sync", refused)
    with pytest.raises(OSError, match="no") if ours else contextlib.nullcontext():
        files.publish(made, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == [".c.tmp" if ours else "c"]


def test_a_json_file_without_an_object_is_as_if_it_were_not_there(tmp_path):
    """As one that a full disk has cut, or another program's."""
    path = tmp_path / "status.json"
    assert files.read_json(path) == {}
    for text in (b'{"step": 3', b"[3]", b"3", b"\xff", b""):
        path.write_bytes(text)
        assert files.read_json(path) == {}
    path.write_text('{"step": 3}')
    assert files.read_json(path) == {"step": 3}
