"""Saving behind the training, what a failed save leaves, and which checkpoints stay."""

import contextlib
import shutil
import threading

import pytest
import torch

from checkpoint import catalog
from checkpoint.load import restore, tensors_of
from checkpoint.save import SaveFailed, Saver
from checkpoint.writer import Writer
from tests import cases
from tests.conftest import make_config

STATE = {"config": {}}


def configured(folder, **keys):
    return make_config(run={"name": "r", "output_dir": str(folder)}, checkpoint=keys)


@contextlib.contextmanager
def ready(folder, **keys):
    """(configuration, model, optimizer, saver) on this rank."""
    from optim import build_optimizer

    cfg = configured(folder, **keys)
    with cases.process_group() as world:
        model = cases.build(cfg, world)
        optimizer = build_optimizer(model, cfg.optim)
        yield cfg, model, optimizer, Saver(cfg, (), [])
        del model, optimizer


def overwrite_while_saving(folder) -> tuple[bool, bool]:
    """(was the write still going on after save(), does the checkpoint hold what the weights were at save())."""
    released, original = threading.Event(), Writer.write_data
    Writer.write_data = lambda *arguments: (released.wait(60), original(*arguments))[1]
    with ready(folder, async_save=True) as (cfg, model, optimizer, saver):
        equal = []
        for step in (1, 2):  # the second uses the staged memory again
            for value in tensors_of(model, optimizer).values():
                value.add_(step)
            before = cases.digests(tensors_of(model, optimizer))
            released.clear()
            saver.save(step, model, optimizer, {"step": step, **STATE})
            going_on = saver.poll() is None and not catalog.path_of(cfg, step).exists()
            with torch.no_grad():
                for value in tensors_of(model, optimizer).values():
                    value.fill_(-7.0)
            released.set()
            assert saver.finish() == step and saver.poll() is None
            restore(catalog.path_of(cfg, step), model, optimizer)
            equal.append(cases.digests(tensors_of(model, optimizer)) == before)
        Writer.write_data = original
    return going_on, all(equal)


def test_weights_changed_after_the_call_do_not_reach_the_file(on_ranks, tmp_path):
    assert on_ranks(2, overwrite_while_saving, tmp_path) == [(True, True)] * 2


def fail_and_go_on(folder, asynchronous) -> list:
    """What finish() gave for three saves, the second of which fails on rank 1 alone."""
    found, original = [], Writer.write_data
    with ready(folder, async_save=asynchronous) as (cfg, model, optimizer, saver):
        for step in (1, 2, 3):
            def failing(*arguments, step=step):
                if step == 2 and saver.rank == 1:
                    raise OSError(28, "no space, it is said")
                return original(*arguments)

            Writer.write_data = failing
            saver.save(step, model, optimizer, {"step": step, **STATE})
            try:
                found.append(saver.finish())
            except SaveFailed as error:
                found.append(str(error))
            found.append(sorted(p.name for p in catalog.root(cfg).iterdir()))
        Writer.write_data = original
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_fails_on_all_ranks_and_leaves_the_others(on_ranks, tmp_path, asynchronous):
    ranks = on_ranks(2, fail_and_go_on, tmp_path, asynchronous)
    for found in ranks:
        assert found[0] == 1 and found[4] == 3
        assert "step-00000002: rank 1: OSError: [Errno 28] no space, it is said" in found[2]
    assert ranks[0][1::2] == [["step-00000001"], ["step-00000001"], ["step-00000001", "step-00000003"]]


def keep(folder, keys, spoiled) -> tuple[list[int], list[str]]:
    """(steps that stay, warnings) after 10, 20, 30 of an earlier launch and 40 of this one."""
    with ready(folder) as (_, model, optimizer, saver):
        for step in (10, 20, 30):
            saver.save(step, model, optimizer, {"step": step, **STATE})
            saver.finish()
        saver = Saver(cfg := configured(folder, **keys), (), [])
        if saver.rank == 0:
            for step in spoiled:
                path = catalog.path_of(cfg, step) / "__0_0.distcp"
                path.write_bytes(path.read_bytes()[:-1] + b"!")
            outside = folder / "outside"
            shutil.copytree(catalog.path_of(cfg, 10), outside)
            (catalog.root(cfg) / "step-00000005").symlink_to(outside)
        saver.save(40, model, optimizer, {"step": 40, **STATE})
        saver.finish()
        assert saver.rank or len(list(outside.iterdir())) == 3 + saver.ranks
    return catalog.steps(cfg), saver.warnings


@pytest.mark.parametrize("keys, spoiled, stay", [
    ({}, (), [10, 20, 30, 40]), ({"keep_last": 1}, (), [40]), ({"keep_last": 2}, (20,), [30, 40]),
    ({"keep_last": 2}, (30,), [20, 30, 40]), ({"keep_last": 3}, (20, 30), [10, 20, 30, 40]),
    ({"keep_last": 1, "keep_every_steps": 20}, (), [20, 40])])
def test_good_checkpoints_alone_are_counted(on_ranks, tmp_path, keys, spoiled, stay):
    steps, warnings = on_ranks(1, keep, tmp_path, keys, spoiled)[0]
    assert steps == stay
    bad = [step for step in spoiled if step in stay]
    assert len(warnings) == len(bad) and all("kept, but not counted" in text for text in warnings)


def test_two_ranks_agree_on_what_stays(on_ranks, tmp_path):
    assert [steps for steps, _ in on_ranks(2, keep, tmp_path, {"keep_last": 2}, (30,))] == [[20, 30, 40]] * 2
