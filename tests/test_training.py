"""Whole runs, and what a step waits for."""

import dataclasses
import json
import pathlib
import platform
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import config
import train
from checkpoint.catalog import read_state
from data.folder import manifest_of
from model.llama import add_terms
from optim import UpdateGuard
from run.rank import distributed as process_group
from tests.conftest import launch, make_config, refuses, rows, saved_tensors, train_run
from tests.distributed import distributed
from tests.reference import fresh_model

pytestmark = [pytest.mark.early, pytest.mark.slow]


@pytest.fixture
def config_of(corpus, prepared, tmp_path) -> Callable[..., config.Config]:
    """TINY, on the prepared corpus, with changes. Its run is tmp_path/r."""
    data = {"source": str(corpus), "path": str(prepared)}
    return partial(make_config, data=data, run={"name": "r", "output_dir": str(tmp_path)})


def test_term_that_would_lose_precision_is_refused():
    narrow, many, scalar = torch.zeros((), dtype=torch.bfloat16), torch.zeros(2), torch.zeros(())
    for name, value in ("balance", narrow), ("balance", many), ("loss", scalar):
        with refuses(f"blocks.3 returns {name} of torch", "float32 scalar"):
            add_terms({}, (torch.zeros(1), {name: value}), "blocks.3")


@distributed(ranks=2)
def test_run_without_a_target_changes_neither_weights_nor_optimizer(world, config_of, tmp_path):
    """All documents have one token, which no other predicts."""
    cfg = config_of(train={"steps": 2}, checkpoint={})
    data = tmp_path / "data"
    if world.rank == 0:
        shutil.copytree(cfg.data.path, data)
        tokens = manifest_of(data)["token_files"]["train"][0][2]
        torch.arange(1, tokens + 1).numpy().tofile(data / "train-0.ends.bin")
    dist.barrier()
    data = dataclasses.replace(cfg.data, path=str(data), document_mask=True)
    for row in train_run(dataclasses.replace(cfg, data=data), world):
        assert (row["loss"], row["loss_mean"], row["grad_norm"]) == (None, None, 0.0)
    tensors = saved_tensors(tmp_path / "r", 2)
    for name, parameter in fresh_model(cfg).named_parameters():
        assert torch.equal(tensors.pop(f"model.{name}"), parameter)
    assert tensors and not any(tensor.any() for tensor in tensors.values())
    assert read_state(tmp_path / "r/checkpoints/step-00000002")["targetless_steps"] == 2


@distributed(ranks=2)
def test_auto_precision_is_decided_by_all_ranks(world, config_of, tmp_path, monkeypatch):
    """float32 where one rank's device has no bfloat16 units. A resume that decides otherwise logs it."""
    computed = set()
    linear = F.linear

    def noting(x: Tensor, weight: Tensor) -> Tensor:
        computed.add(str(weight.dtype))
        return linear(x, weight)

    for step, units, dtype in (1, [True, False], "float32"), (2, [True, True], "bfloat16"):
        computed.clear()
        cfg = config_of(parallel={"param_dtype": "auto"}, train={"steps": step}, checkpoint={})
        monkeypatch.setattr("torch.nn.functional.linear", noting)
        monkeypatch.setattr("run.rank.has_native_bfloat16", lambda _, u=units: u[world.rank])
        train_run(cfg, world)
        assert computed == {f"torch.{dtype}"}
        saved = read_state(tmp_path / f"r/checkpoints/step-0000000{step}")["config"]
        written = config.load(str(tmp_path / "r/config.toml"))
        assert written.parallel.param_dtype == saved["parallel"]["param_dtype"] == dtype
    log = (tmp_path / "r/logs/rank-0.log").read_text()
    assert "parallel.param_dtype float32 -> bfloat16" in log


# What a step waits for


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, but for those of the guard's copy."""

    def __init__(self, guard: UpdateGuard):
        super().__init__()
        self.own = guard.on_host.data_ptr()
        self.count = 0

    def __torch_dispatch__(self, function, types, args: Any = (), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].data_ptr() != self.own
        return function(*args, **(kwargs or {}))


@distributed(ranks=2)
def test_step_reads_nothing_from_the_device(world, config_of):
    """The host runs ahead: loss, norm and the finite flag stay on the device until a row is due."""
    training_step = train.training_step
    counts = []

    def counted(model, optimizer, guard, *rest):
        with HostReads(guard) as reads:
            sums, scalars = training_step(model, optimizer, guard, *rest)
            counts.append(reads.count)
            sums["loss"].item()
        assert reads.count == 1
        return sums, scalars

    with mock.patch("train.training_step", counted):
        train_run(config_of(train={"skip_nonfinite": 1}), world)
    assert counts == [0] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_step_on_a_gpu_waits_for_nothing(config_of, tmp_path):
    """torch raises an error where the host would wait, for a value or a copy from memory that is not pinned."""
    training_step = train.training_step
    done = []

    def strict(*arguments):
        if done:  # the first sets FSDP2 up
            torch.cuda.set_sync_debug_mode("error")
        done.append(training_step(*arguments))
        torch.cuda.set_sync_debug_mode("default")
        return done[-1]

    run = {"device": "cuda", "name": "r", "output_dir": str(tmp_path)}
    cfg = config_of(log={"every_steps": 10}, run=run)
    with process_group(cfg) as world, mock.patch("train.training_step", strict):
        train_run(cfg, world)
    assert len(done) == cfg.train.steps


# Through run_train.sh


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus, prepared) -> pathlib.Path:
    """The folder of a run of 4 steps."""
    folder = tmp_path_factory.mktemp("straight")
    cfg = make_config(
        data={"source": str(corpus), "path": str(prepared)},
        checkpoint={"save_every_steps": 3},
        eval={},
        run={"name": "straight", "output_dir": str(folder)},
    )
    path = folder / "straight.toml"
    path.write_text(config.to_toml(cfg))
    done = launch(path)
    assert done.returncode == 0 and "step 4/4" in done.stdout, done.stderr
    return folder / "straight"


@pytest.mark.quick
def test_run_leaves_what_the_contract_names(straight):
    status = json.loads((straight / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 4) and status["launch"]
    checkpoints = sorted(path.name for path in (straight / "checkpoints").iterdir())
    assert checkpoints == ["step-00000003", "step-00000004"]
    for folder in (straight, straight / "checkpoints/step-00000004"):
        assert (folder / "tokenizer.model").stat().st_size
    assert (straight / "logs/rank-0.log").stat().st_size
    figures = """kind step steps loss loss_mean grad_norm lr tokens mfu epochs step_seconds data_seconds
        tokens_per_second_per_device peak_memory_gib batch_digest"""
    assert {*figures.split()} == rows(straight)[-1].keys()
    assert config.load(str(straight / "config.toml")).train.steps == 4
    environment = json.loads((straight / "environment.json").read_text())
    assert {"commit", "uncommitted", "torch", "command"} <= environment.keys()
    assert environment["hosts"] == [platform.node()] and environment["ranks"] == 1


def test_eval_only_prints_the_row_and_writes_nothing(straight):
    """On two ranks that of one."""
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
    done = launch(straight / "config.toml", "--run.name=straight", "--eval-only", nproc=2)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    (row,) = rows(straight, "eval")
    assert printed.keys() == row.keys() and printed["step"] == row["step"]
    assert printed["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in straight.rglob("*")} == before
