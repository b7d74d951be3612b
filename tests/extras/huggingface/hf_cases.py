"""What tests/extras/huggingface/test_hf.py runs on several ranks."""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterator

import torch
from safetensors.torch import save_file

import config
from config import ConfigError
from extras.huggingface import config as hf_config
from extras.huggingface import weights as hf_weights
from extras.huggingface.weights import weights_to_read
from model.llama import named_parameters
from optim import build_optimizer
from parallel.materialize import local_tensors, open_pretrained
from tests.cases import build, digests, process_group, run_training, save, world_for
from tests.conftest import make_config, rows, tables


def config_from(folder: str, **sections: dict) -> config.Config:
    """TINY, but for the model: that comes from the folder."""
    return config.from_dict({**tables(**sections), "model": {"init_from": folder}}, "test.toml")


def tokens(vocab_size: int) -> torch.Tensor:
    """(2, 40); among them the first of each half, as tp cuts the vocabulary."""
    found = torch.randint(0, vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    found[:, :2] = torch.tensor([0, vocab_size // 2])
    return found


def read_and_save(
    folders: dict[str, str], output: str, mesh: dict
) -> dict[str, tuple[dict[str, str], list]]:
    """(hashes of all parameters, logits) of each folder's model, which is saved below `output` too."""
    found = {}
    with process_group() as world:
        for name, folder in folders.items():
            cfg = config_from(
                folder, run={"name": name, "output_dir": output}, checkpoint={}, parallel=mesh
            )
            model = build(cfg, world_for(cfg, world), weights_to_read(cfg, 0))
            optimizer = build_optimizer(model, cfg.optim)
            save(cfg, model, optimizer, 1)
            with torch.no_grad():
                found[name] = (
                    digests(dict(named_parameters(model))),
                    model(tokens(cfg.model.vocab_size)).tolist(),
                )
            del model, optimizer
    return found


def train_and_resume(folder: str, output: str, data: dict) -> list[dict]:
    """Trains five steps from the folder, and a sixth from the checkpoint when the folder is gone."""
    with process_group() as world:
        cfg = config_from(
            folder,
            run={"name": "r", "output_dir": output},
            train={"steps": 5},
            optim={"schedule_steps": 6},
            data=data,
            checkpoint={},
        )
        run_training(cfg, world)
        if world.rank == 0:
            os.rename(folder, f"{folder}.gone")
        torch.distributed.barrier()
        again = config.load(f"{output}/r/config.toml", ["--train.steps=6"])
        assert again == dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=6))
        run_training(again, world)
        found = rows(config.run_folder(cfg)) if world.rank == 0 else []
    return found


def refused_on_one_rank(folder: str) -> list[str]:
    """The errors of reading weights of which rank 1 cannot open its part of one, and of reading them as they are."""
    found = []
    with process_group() as world:
        cfg = config_from(folder)
        for lost in ("lost", None):
            weights = weights_to_read(cfg, 0)
            if world.rank == 1 and lost:
                stored = weights.stored["head.weight"]
                weights.stored["head.weight"] = dataclasses.replace(
                    stored, path=stored.path.with_name(lost)
                )
            try:
                build(cfg, world, weights)
                found.append("none")
            except ConfigError as error:
                found.append(str(error))
    return found


def with_another_copy(copies: list[str]) -> str:
    """The error of two ranks that read weights, each from its own folder."""
    with process_group() as world:
        try:
            found = open_pretrained(config_from(copies[world.rank]), 0)
            return str(
                {stored.path.parent for stored in found.stored.values()}
                == {pathlib.Path(copies[world.rank])}
            )
        except ConfigError as error:
            return str(error)


def read_on_machines(names: list[str], environments: list[dict[str, str]]) -> tuple[str, str]:
    """(the folder that the first id's weights are read from, the error of reading the second's) of ranks two by two on
    machines, each with its environment variables."""
    node, local_rank = divmod(int(os.environ["RANK"]), 2)
    os.environ |= {**environments[node], "LOCAL_RANK": str(local_rank)}
    with process_group():
        model = tables()["model"]
        first, second = (
            make_config(model={**model, "qk_norm": True, "norm_eps": 1e-5, "init_from": name})
            for name in names
        )
        (folder,) = {stored.path.parent for stored in open_pretrained(first, 0).stored.values()}
        try:
            open_pretrained(second, 0)
            return str(folder), ""
        except ConfigError as error:
            return str(folder), str(error)


def resident_mib(field: str) -> float:
    """VmRSS: now; VmHWM: the most since it was last reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


@contextlib.contextmanager
def measured(figures: dict) -> Iterator[None]:
    """Adds what the block took: MiB resident before it, the peak above that, and seconds."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, began = resident_mib("VmRSS"), time.perf_counter()
    yield
    figures |= {
        "before_mib": before,
        "peak_over_it_mib": resident_mib("VmHWM") - before,
        "seconds": time.perf_counter() - began,
    }


def configuration(mib: int) -> config.Config:
    dim = 64 * max(1, round(32 * (mib / 2100) ** 0.5))
    model = {
        "dim": dim,
        "n_layers": 8,
        "n_heads": dim // 64,
        "n_kv_heads": dim // 64,
        "ffn_dim": 64 * (11 * dim // 256),
        "vocab_size": 16 * dim,
    }
    return config.from_dict(
        {
            "run": {"name": "r", "device": "cpu"},
            "model": model,
            "train": {"steps": 1},
            "parallel": {"param_dtype": "float32"},
        },
        "benchmark",
    )


def make_folder(folder: pathlib.Path, cfg: config.Config) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = hf_weights.shapes(cfg.model)
    folder.mkdir()
    tensors = {
        hf_weights.hf_name(name): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    settings = hf_config.render(cfg.model, cfg.train.seq_len, "float32", {})
    (folder / "config.json").write_text(json.dumps(settings))


def read_peak(folder: str, **sections: dict) -> tuple[float, float]:
    """(peak memory over what it was before, shard) in MiB, of reading into shards."""
    from model.build import meta_model
    from parallel.materialize import materialize
    from parallel.parallelize import parallelize

    found = {}
    with process_group() as world:
        cfg = config_from(folder, **sections)
        weights, model = weights_to_read(cfg, 0), meta_model(cfg.model, cfg.lora)
        parallelize(model, cfg, world)
        with measured(found):
            materialize(model, 0, world.device, weights.read_into)
        shard = sum(t.nbytes for _, t in local_tensors(model)) / 2**20
        del model
    return found["peak_over_it_mib"], shard
