"""minimal.py is the specification: of the same TOML, train.py makes its fresh weights, losses, gradient norms and
checkpoints on 1, 2 and 4 ranks."""

import ast
import contextlib
import io
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
import tomli
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import config
import minimal
from model.llama import named_parameters
from options import flatten
from tests import cases
from tests.conftest import REPO, prepare_one, rows, tables

# 4 ranks divide none of them. The embedding has two blocks of generators, of which ranks draw parts.
MODEL = {"dim": 250, "n_layers": 2, "n_heads": 5, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 323}
# The norm is above the limit, and AdamW divides a gradient's size out again, but for one small against its eps.
BASE = {"model": MODEL, "train": {"steps": 4, "seq_len": 32, "global_batch_size": 8, "max_grad_norm": 0.3},
        "optim": {"lr": 3e-3, "eps": 1e-3, "weight_decay": 1.0, "warmup_steps": 2}, "checkpoint": {}}
CASES = {
    "plain": {"train": {"micro_batch_size": None}},
    "epochs": {"train": {"seq_len": 4000, "global_batch_size": 4, "micro_batch_size": 1}},  # of six windows
    "recomputed": {"parallel": {"recompute": "full", "prefetch_forward": 2, "prefetch_backward": 2},
                   "optim": {"schedule": "linear"}, "train": {"micro_batch_size": 1}},
    "kept": {"parallel": {"reshard_after_forward": False, "prefetch_forward": 0, "prefetch_backward": 0},
             "optim": {"schedule": "constant"}, "train": {"max_grad_norm": "off"}, "run": {"seed": 7}},
    "tied": {"model": {"tie_embeddings": True, "head_dim": 10, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-2,
                       "rope_theta": 100.0},
             "optim": {"schedule": "wsd", "decay_steps": 2, "schedule_steps": 5, "min_lr_ratio": 0.5,
                       "betas": [0.8, 0.9]}},
    "tied, recomputed": {"model": {"tie_embeddings": True}, "train": {"micro_batch_size": 1},
                         "parallel": {"recompute": "full", "prefetch_forward": 2, "prefetch_backward": 2}},
    "bfloat16": {"parallel": {"param_dtype": "bfloat16"}},
    "bfloat16, wide stream": {"parallel": {"param_dtype": "bfloat16", "output_dtype": "float32",
                                           "reduce_dtype": "bfloat16"}, "train": {"micro_batch_size": 1}},
    "float32, narrow stream": {"parallel": {"output_dtype": "bfloat16"}},
}
RANKS = {1: ["plain", "tied", "bfloat16", "long"], 2: [*CASES, "long"], 4: ["plain", "recomputed", "tied, recomputed"]}
LONG = {"model": {"dim": 48, "n_heads": 4, "n_kv_heads": 2}, "train": {"steps": 30},
        "checkpoint": {"save_every_steps": 10}, "log": {"every_steps": 1}, "eval": {"batches": 1}}


def text_of(output: pathlib.Path, name: str, *changes: dict) -> str:
    """The TOML of a run: BASE with changes, section by section."""
    merged = {**BASE, "run": {"name": name.replace(" ", "-").replace(",", ""), "output_dir": str(output)}}
    for change in changes:
        for section, values in change.items():
            merged[section] = {**merged.get(section, {}), **values}
    return config.to_toml(config.from_dict(tables(**merged), "test.toml"))


def run_both(paths: list[str]) -> list[tuple[list[dict], list[dict], list[str]]]:
    """For each TOML: train.py's rows, minimal.py's, and the names of parameters whose fresh shards differ."""
    found = []
    with cases.process_group() as world:
        for path in paths:
            cfg, printed = config.load(path), io.StringIO()
            cases.run_training(cfg, spread := cases.world_for(cfg, world))
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                options = minimal.read_options(path)
                minimal.train(options, world.device)
                with torch.device("meta"):
                    model = minimal.Llama(options.model)
                minimal.shard(model, options.model.tie_embeddings, options.parallel, world.device)
                minimal.initialize(model, options.model, options.run.seed, world.device)
            theirs = dict(named_parameters(cases.build(cfg, spread)))
            ours = dict(model.named_parameters())
            assert ours.keys() == theirs.keys()
            differ = [name for name, p in ours.items() if not p.to_local().equal(theirs[name].to_local())]
            folder = config.run_folder(cfg)
            found.append((rows(folder) if world.rank == 0 else [],
                          [*map(json.loads, printed.getvalue().splitlines())], differ))
    return found


@pytest.fixture(scope="module")
def data(corpus, prepared, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("minimal") / "words"
    source = {"source": str(corpus), "path": str(folder)}
    prepare_one(config.from_dict(tables(model=MODEL, data=source), "test.toml"))
    return {"data": source}


@pytest.fixture(scope="module")
def trained(on_ranks, data, tmp_path_factory) -> tuple[dict, pathlib.Path]:
    """({(ranks, case): what each rank found}, the folder of runs below their number of ranks)."""
    output, found = tmp_path_factory.mktemp("runs"), {}
    for ranks, names in RANKS.items():
        paths = []
        for name in names:
            paths.append(output / f"{ranks} {name}.toml")
            paths[-1].write_text(text_of(output / str(ranks), name, data, LONG if name == "long" else CASES[name]))
        for rank in on_ranks(ranks, run_both, [*map(str, paths)]):
            for name, result in zip(names, rank):
                found.setdefault((ranks, name), []).append(result)
    return found, output


def read_by_torch(checkpoint: pathlib.Path, path: pathlib.Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, path)
    return flatten(torch.load(path))


def check_rows(ours: list[dict], theirs: list[dict], near: float = 1e-5) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=near)
    norms = 2e-4 if near == 1e-5 else 2**-6
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=norms)


@pytest.mark.parametrize("ranks, name", [(ranks, name) for ranks, names in RANKS.items() for name in names])
def test_train_computes_what_minimal_does(trained, tmp_path, ranks, name):
    found, output = trained
    (theirs, ours, _), *others = found[ranks, name]
    assert len(ours) >= 4 and not any(printed for _, printed, _ in others)
    assert not any(differ for _, _, differ in found[ranks, name])
    narrow = "bfloat16" in name or "narrow" in name
    check_rows(ours, theirs, 2**-8 if narrow else 1e-5)
    run, step = output / str(ranks) / name.replace(" ", "-").replace(",", ""), f"step-{ours[-1]['step']:08d}"
    wanted = read_by_torch(run / "checkpoints" / step, tmp_path / "theirs")
    tensors = read_by_torch(pathlib.Path(f"{run}-minimal") / "checkpoints" / step, tmp_path / "ours")
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (tensors[key].shape, tensors[key].dtype) == (tensor.shape, tensor.dtype)
        near = {"exp_avg": 2**-4, "exp_avg_sq": 2**-4}.get(key.rpartition(".")[2], 2**-8) if narrow else 1e-4
        assert (tensors[key] - tensor).norm() <= near * tensor.norm(), key
