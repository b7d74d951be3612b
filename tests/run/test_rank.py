"""A rank's process: device, process group, errors. Exit codes of its main(): tests/launch."""

import os
import pathlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import config
from checkpoint.manifest import UnreadableCheckpoint
from checkpoint.save import SaveFailed
from config import ConfigError
from model.build import meta_model
from parallel.mesh import World
from parallel.parallelize import parallelize
from run import rank
from run.begin import begin_rank
from run.rank import describe, pick_device, shared_options
from tests.conftest import make_config, refuses
from tests.distributed import distributed


@pytest.mark.quick
@pytest.mark.parametrize(
    "device, drivers, visible, count, expected",
    [
        ("auto", [], None, 0, "cpu"),  # a laptop
        ("auto", ["/dev/nvidiactl"], None, 2, "cuda:1"),
        ("auto", ["/dev/nvidiactl"], "", 0, "cpu"),  # hidden deliberately
        ("auto", ["/dev/nvidiactl"], "NoDevFiles", 0, "cpu"),  # as SLURM hides them
        ("auto", ["/dev/kfd"], None, 0, "cpu"),  # a graphics unit inside a CPU
        ("cpu", ["/dev/nvidiactl"], None, 2, "cpu"),
        # instead of training on the CPU
        ("auto", ["/dev/nvidiactl"], None, 0, "no GPU for local rank 1: torch .* can use 0"),
        ("cuda", ["/dev/nvidiactl"], None, 1, 'device = "cuda": no GPU for local rank 1'),
    ],
)
def test_device_is_a_gpu_of_its_own_or_none_was_meant(
    monkeypatch, device, drivers, visible, count, expected
):
    monkeypatch.setattr(os.path, "exists", lambda path: path in drivers)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    if expected in ("cpu", "cuda:1"):
        assert str(pick_device(device, 1)) == expected
        return
    with refuses(expected):
        pick_device(device, 1)


@pytest.mark.quick
@pytest.mark.parametrize("unit", ["avx512_bf16", "amx_bf16", "avx512"])
def test_bfloat16_is_native_to_a_cpu_with_units_for_it(monkeypatch, unit):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {unit: True})
    assert rank.has_native_bfloat16(torch.device("cpu")) == unit.endswith("bf16")


@pytest.mark.parametrize("sections", [{"parallel": {"cp": 2}}, {"data": {"document_mask": True}}])
def test_heads_too_narrow_for_flex_attention_are_refused_on_a_gpu(sections):
    config.check_for_gpus(make_config(model={"dim": 128, "head_dim": 16}, **sections))
    with refuses("head_dim: heads are 14 wide", "16 or more"):
        config.check_for_gpus(make_config(model={"dim": 128, "head_dim": 14}, **sections))


# The process group


@pytest.mark.quick
@pytest.mark.parametrize(
    "sections, may_differ",
    [({"data": {"path": "/disk/of/this/node"}}, True), ({"data": {"source": "x.txt"}}, False)],
)
def test_nodes_may_keep_copies_elsewhere_and_nothing_else(sections, may_differ):
    cpu = torch.device("cpu")
    ours = shared_options(make_config(**sections), cpu)
    assert (ours == shared_options(make_config(), cpu)) == may_differ
    assert ours != shared_options(make_config(**sections), torch.device("cuda"))


def connect(cfg: config.Config, folder: pathlib.Path) -> World:
    """The process group of a run in place of the test's, which ends as the test's does."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", int(os.environ["WORLD_SIZE"]))
    init = dist.init_process_group
    with_store = lambda *a, **kw: init(*a, **(kw | {"store": store}))  # noqa: E731
    with mock.patch.object(dist, "init_process_group", with_store):
        return rank.distributed(cfg).__enter__()


@distributed(ranks=4)
def test_all_process_groups_have_the_runs_timeout(world, tmp_path):
    """Also those of the mesh, which would have torch's 30 minutes."""
    cfg = make_config(run={"start_timeout_seconds": 7200.0}, parallel={"dp_replicate": 2, "cp": 2})
    parallelize(meta_model(cfg.model), cfg, connect(cfg, tmp_path))
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    assert len(groups) >= 4
    for group in groups:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout.total_seconds() == 7260


@pytest.mark.parametrize("deterministic", [True, False])
@distributed(ranks=1)
def test_deterministic_algorithms_are_used_on_request(world, tmp_path, deterministic):
    connect(make_config(run={"deterministic": deterministic, "seed": 5}), tmp_path)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.initial_seed() == 5
    # NaN into each new buffer
    # pyrefly: ignore[missing-attribute]  # torch adds it at run time
    assert torch.utils.deterministic.fill_uninitialized_memory != deterministic


# Errors


@pytest.mark.quick
@pytest.mark.parametrize(
    "error, step, code, words, retryable",
    [
        (ConfigError("lr is wrong"), 5, 2, "lr is wrong", False),
        (FloatingPointError("step 3"), 5, 1, "step 3", False),
        (SaveFailed("no room"), 5, 1, "no room", True),
        (UnreadableCheckpoint("a: stale"), 0, 1, "a: stale", True),
        (ValueError("odd"), 5, 1, "ValueError: odd", True),
        (torch.OutOfMemoryError("CUDA out of memory"), 4, 1, "out of memory: CUDA", False),
        # later another process may have used the device
        (torch.OutOfMemoryError("CUDA out of memory"), 5, 1, "out of memory: CUDA", True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4, 1, "out of memory:", False),
    ],
)
def test_exit_code_of_an_error_and_whether_a_restart_may_help(error, step, code, words, retryable):
    run: Any = SimpleNamespace(start=4, step=step)
    found, text, may_retry = describe(error, run)
    assert (found, may_retry) == (code, retryable)
    assert words in text


# The configuration


@pytest.mark.parametrize("by_hand", [False, True])
def test_rank_reads_what_the_launcher_resolved(monkeypatch, write_config, tmp_path, by_hand):
    """By hand, under torchrun, it reads the file itself; after a restart it resumes from the newest checkpoint."""
    path = write_config("r", train={"steps": 5}, checkpoint={"resume": 3})
    (tmp_path / "config.toml").write_text(path.read_text().replace("steps = 5", "steps = 6"))
    monkeypatch.setattr("run.begin.die_with_parent", lambda parent: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["train.py", str(path), "--optim.lr=0.25"])
    monkeypatch.delenv("TRAINER_ATTEMPT", raising=False)
    if not by_hand:
        monkeypatch.setenv("TRAINER_ATTEMPT", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1" if by_hand else "0")
    _, cfg = begin_rank("usage")
    assert cfg.checkpoint
    found = (cfg.train.steps, cfg.optim.lr, cfg.checkpoint.resume)
    assert found == ((5, 0.25, "auto") if by_hand else (6, 3e-3, 3))
