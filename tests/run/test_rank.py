"""A rank's process: its device, its process group, and what an error of it means."""

import argparse
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import config
from checkpoint.manifest import UnreadableCheckpoint
from checkpoint.save import SaveFailed
from config import ConfigError
from model.build import meta_model
from parallel.parallelize import parallelize
from run import rank
from run.begin import begin_rank
from run.rank import describe, pick_device, shared_options
from tests.conftest import make_config, refuses
from tests.distributed import distributed
from tests.gloo import run_on_ranks

# Devices


@distributed(ranks=2)
def test_emulated_bfloat16_is_said_with_the_option_to_use(world, monkeypatch, capfd):
    monkeypatch.setattr(rank, "has_native_bfloat16", lambda device: False)
    for dtype in ("auto", "float32", "bfloat16"):
        rank.resolve_param_dtype(make_config(parallel={"param_dtype": dtype}), world)
        said = "--parallel.param_dtype=float32" in capfd.readouterr().err
        assert said == (dtype == "bfloat16" and world.rank == 0)


@pytest.mark.quick
@pytest.mark.parametrize(
    "device, drivers, visible, count, expected",
    [
        ("auto", [], None, 0, "cpu"),  # a laptop
        ("auto", ["/dev/nvidiactl"], None, 2, "cuda:1"),
        ("auto", ["/dev/nvidiactl"], "", 0, "cpu"),  # hidden deliberately
        ("auto", ["/dev/nvidiactl"], "-1", 0, "cpu"),
        ("auto", ["/dev/nvidiactl"], "NoDevFiles", 0, "cpu"),  # as SLURM hides them
        ("auto", ["/dev/dxg"], None, 0, "cpu"),  # WSL without a GPU for CUDA
        ("auto", ["/dev/kfd"], None, 0, "cpu"),  # a graphics unit inside a CPU
        ("cpu", ["/dev/nvidiactl"], None, 2, "cpu"),
        # instead of training on the CPU
        ("auto", ["/dev/nvidiactl"], None, 0, "no GPU for local rank 1: torch .* can use 0"),
        ("cuda", [], None, 0, 'device = "cuda": no GPU for local rank 1'),
        ("cuda", ["/dev/nvidiactl"], None, 1, "can use 1; NPROC"),
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
    if expected.startswith(("cpu", "cuda:")):
        assert str(pick_device(device, 1)) == expected
        return
    with refuses(expected):
        pick_device(device, 1)


@pytest.mark.parametrize("sections", [{"parallel": {"cp": 2}}, {"data": {"document_mask": True}}])
@pytest.mark.parametrize("width, supported", [(8, False), (14, False), (16, True)])
def test_heads_too_narrow_for_flex_attention_are_refused_on_a_gpu(sections, width, supported):
    cfg = make_config(model={"dim": 128, "head_dim": width}, **sections)
    if supported:
        config.check_for_gpus(cfg)
        return
    with refuses(f"head_dim: heads are {width} wide", "16 or more"):
        config.check_for_gpus(cfg)


# The process group


@pytest.mark.quick
@pytest.mark.parametrize(
    "sections, may_differ",
    [
        ({"data": {"path": "/disk/of/this/node"}}, True),
        ({"data": {"source": "x.txt"}}, False),
        ({"log": {"every_steps": 7}}, False),
    ],
)
def test_nodes_may_keep_copies_elsewhere_and_nothing_else(sections, may_differ):
    cpu = torch.device("cpu")
    ours = shared_options(make_config(**sections), cpu)
    assert (ours == shared_options(make_config(), cpu)) == may_differ
    assert ours != shared_options(make_config(**sections), torch.device("cuda"))


def timeouts() -> set[float]:
    """Seconds, of all process groups that a run makes."""
    cfg = make_config(run={"start_timeout_seconds": 7200.0}, parallel={"dp_replicate": 2, "cp": 2})
    with rank.distributed(cfg) as world:
        parallelize(meta_model(cfg.model), cfg, world)
        groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
        assert len(groups) >= 4
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return {backend.options._timeout.total_seconds() for backend in backends}


def test_all_process_groups_have_the_runs_timeout():
    """Also those of the mesh, which would have torch's 30 minutes."""
    assert run_on_ranks(4, timeouts) == [{7260.0}] * 4


def determinism(deterministic: bool) -> tuple[bool, int, bool]:
    with rank.distributed(make_config(run={"deterministic": deterministic, "seed": 5})):
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.initial_seed(),
            # NaN into each new buffer
            # pyrefly: ignore[missing-attribute]  # torch adds it at run time
            torch.utils.deterministic.fill_uninitialized_memory,
        )


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_algorithms_are_used_on_request(deterministic):
    (found,) = run_on_ranks(1, determinism, deterministic)
    assert found == (deterministic, 5, not deterministic)


# Errors


@pytest.mark.quick
@pytest.mark.parametrize(
    "error, step, code, words, retryable",
    [
        (ConfigError("lr is wrong"), 5, 2, "lr is wrong", False),
        (FloatingPointError("step 3"), 5, 1, "step 3", False),
        (SaveFailed("no room"), 5, 1, "no room", True),
        (UnreadableCheckpoint("a: stale"), 0, 1, "a: stale", True),
        (OSError(28, "No space left", "a/b"), 5, 1, "a/b: No space left", True),
        (ValueError("odd"), 5, 1, "ValueError: odd", True),
        (torch.OutOfMemoryError("CUDA out of memory"), 4, 1, "out of memory: CUDA", False),
        # later another process may have used the device
        (torch.OutOfMemoryError("CUDA out of memory"), 5, 1, "out of memory: CUDA", True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4, 1, "out of memory:", False),
    ],
)
def test_errors_are_described_by_what_a_person_can_do(
    monkeypatch, error, step, code, words, retryable
):
    monkeypatch.setattr(sys, "argv", ["train.py", "a b.toml", "--optim.lr=1e-3"])
    monkeypatch.setenv("WORLD_SIZE", "8")
    run: Any = SimpleNamespace(start=4, step=step)
    found, text, may_retry = describe(error, run)
    assert (found, may_retry) == (code, retryable)
    assert words in text
    if "out of memory" in words:
        command = "./run_train.sh 'a b.toml' --optim.lr=1e-3 --dry-run --world-size=8"
        assert text.endswith(f"what would fit: {command}")


# The configuration


@pytest.mark.parametrize("by_hand", [False, True])
def test_rank_reads_what_the_launcher_resolved(monkeypatch, write_config, tmp_path, by_hand):
    """By hand, under torchrun, it reads the file itself; after a restart it resumes from the newest checkpoint."""
    path = write_config("r", train={"steps": 5}, checkpoint={"resume": 3})
    folder = tmp_path / ".attempt-1"
    folder.mkdir()
    (folder / "config.toml").write_text(path.read_text().replace("steps = 5", "steps = 6"))
    monkeypatch.setattr("run.begin.die_with_parent", lambda parent: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["train.py", str(path), "--optim.lr=0.25"])
    monkeypatch.delenv("TRAINER_ATTEMPT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1" if by_hand else "0")
    if not by_hand:
        monkeypatch.setenv("TRAINER_ATTEMPT", str(folder))
    args, cfg = begin_rank("usage")
    assert isinstance(args, argparse.Namespace) and cfg.checkpoint
    if by_hand:
        assert (cfg.train.steps, cfg.optim.lr, cfg.checkpoint.resume) == (5, 0.25, "auto")
    else:
        assert (cfg.train.steps, cfg.optim.lr, cfg.checkpoint.resume) == (6, 3e-3, 3)
