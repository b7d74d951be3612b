"""Configurations on the fake CUDA: the plan beside what torch's allocator did, and how far they may differ.

python -m tests.fake_cuda.configurations llama8b-compiled [--section.key=value ...]     prints both, in GiB
"""

import json
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

import config
from extras.huggingface import config as hf_config
from extras.huggingface import weights as hf_weights
from tests.conftest import write_prepared
from tests.fake_cuda import build

WAITS = ("stream_waits", "event_waits", "device_waits", "copy_waits")
# sizes from which a matmul is faster in 8 bits, with either recipe
LARGE_ENOUGH_FOR_FLOAT8 = """--model.dim=1280 --model.n_heads=10 --model.n_kv_heads=5 --model.head_dim=128
    --model.ffn_dim=4608"""
# Ranks, of which one process is the first. Those of the configuration's own comment.
GPUS = {path.stem: 1 for path in sorted((build.REPO / "configs").glob("*.toml"))}
GPUS |= {"llama3.1-70b": 64, "llama70b": 256, "llama70b-qlora": 8, "tinyllama-1.1b": 8}
GPUS |= {"llama3.1-8b": 8, "llama3.1-8b-128k": 8, "llama8b": 8, "llama8b-float8": 8}
CASES = [f"{name}-{mode}" for name in GPUS for mode in ("compiled", "eager")]
CASES.remove("llama8b-float8-eager")  # float8 requires compilation
# How far a measured figure may be from the plan's: the least and the most ratio, 0.97 and 1.03 where absent.
HOLES = (0.93, 1.03)  # planned with more holes than the allocator leaves
GRANULE = (0.97, 1.3)  # segments grow by 20 MiB, which is much beside 0.3 GiB
LIMITS = {
    f"{case} reserved_gib": GRANULE for case in CASES if case.startswith(("tiny-c", "tiny-e"))
}
for name in ("llama3.1-70b", "llama8b-qlora", "qwen3-8b-chat-qlora"):
    LIMITS[f"{name}-compiled reserved_gib"] = HOLES
for name in ("llama70b-eager", "llama8b-float8-compiled"):
    LIMITS[f"{name} reserved_gib"] = (0.97, 1.05)  # with fewer
for figure in ("peak_gib", "reserved_gib"):  # the plan is 5 % high: measured 0.953 and 0.954
    LIMITS[f"llama8b-qlora-eager {figure}"] = (0.95, 1.03)
# one kernel of the last block's backward holds nine tensors as wide as ffn_dim
LIMITS["llama3.1-8b-chat-lora-compiled peak_gib"] = (0.97, 1.04)


def marked(names: Iterable[str], small: set[str], quick: str = "") -> list:
    """Parameters of a test: those that are not small are left out unless asked for; --quick runs one."""
    marks = {name: pytest.mark.full for name in names if name not in small}
    marks[quick] = pytest.mark.quick
    return [pytest.param(name, marks=marks.get(name, ()), id=name) for name in names]


def write_config(case: str, folder: pathlib.Path, options: str = "") -> pathlib.Path:
    """Writes the configuration at full size but for these options, with at most two micro-batches a step."""
    name, mode = case.rsplit("-", 1)
    tables = config.read_toml(str(build.REPO / f"configs/{name}.toml"))
    # conversations are packed, and attention stays inside each
    masked = "messages_field" in tables["data"] or tables["data"].get("document_mask", False)
    of_memory = {k: v for k, v in tables["optim"].items() if k in ("name", "state_dtype")}
    has_base = tables["model"].pop("init_from", None) is not None
    tables["data"], tables["optim"] = {"document_mask": masked}, of_memory
    tables["parallel"] |= {"compile": mode == "compiled"}
    del tables["checkpoint"], tables["eval"]
    return write(case, tables, folder, options, has_base, GPUS[name])


def write_small(folder: pathlib.Path, options: str = "") -> pathlib.Path:
    """Writes a configuration of a small model that has all kernels of a large one."""
    model = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512}
    train = {"seq_len": 256, "global_batch_size": 8, "micro_batch_size": 1}
    tables = {"model": {**model, "vocab_size": 1024}, "train": train, "parallel": {}}
    return write("small", tables, folder, options, "--lora" in options)


def write(
    name: str, tables: dict, folder: pathlib.Path, options: str, has_base: bool, gpus: int = 0
) -> pathlib.Path:
    source = {"source": str(folder / "text.jsonl"), "path": str(folder / f"data of {name}")}
    tables["data"] = source | tables.get("data", {})
    tables["train"] |= {"steps": 4}  # the first and the last wait, to be logged
    tables["optim"] = {"lr": 1e-4, "warmup_steps": 1} | tables.get("optim", {})
    tables["run"] = {"device": "cuda", "output_dir": str(folder), "name": name}
    tables["parallel"] |= {"param_dtype": "bfloat16"}
    tables["log"] = {"every_steps": 100, "tensorboard": False}
    path = folder / f"{name}.toml"
    for option in re.findall(r"--model\.(\S+)", options):  # of the base, too
        key, _, value = option.partition("=")
        tables["model"][key] = json.loads(value)
    if has_base:
        plain = {section: table for section, table in tables.items() if section != "lora"}
        m = config.from_dict(plain, name).model
        tables["model"]["init_from"] = base_folder(m, folder / f"base of {name}")
    path.write_text(config.to_toml(config.from_dict(tables, name)))
    cfg = config.load(str(path), options.split())
    if gpus and "global_batch_size" not in options:
        dp_replicate, dp_shard, *_ = config.mesh_shape(cfg, gpus)
        ranks = dp_replicate * dp_shard
        micro = cfg.train.micro_batch_size or cfg.train.global_batch_size // ranks
        batch = min(cfg.train.global_batch_size, 2 * micro * ranks)
        train = replace(cfg.train, global_batch_size=batch, micro_batch_size=micro)
        cfg = replace(cfg, train=train)
    ids = np.random.default_rng(0).integers(3, 259, (20_000, 120))  # enough for a step of llama70b
    write_prepared(cfg, [*ids[20:]], [*ids[:20]])
    path.write_text(config.to_toml(cfg))
    return path


def base_folder(m: config.Model, folder: pathlib.Path) -> str:
    """Makes a Hugging Face folder of such a model whose weights are holes of the file system. rank.py reads none."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config.render(m, 8192, "bfloat16", {})))
    weight_map = {}  # a file for each
    for name, shape in hf_weights.shapes(m).items():
        name, size = hf_weights.hf_name(name), 2 * math.prod(shape)
        weight_map[name] = f"{name}.safetensors"
        header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        with (folder / weight_map[name]).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def measure(case: str, folder: pathlib.Path, options: str = "") -> dict[str, float]:
    """At full size: the plan, what the allocator did, in GiB, and the calls of a step that logs nothing."""
    name, _ = case.rsplit("-", 1)
    path = write_config(case, folder, options)
    words = ["-m", "tools.planner", path, "--json", "--world-size", GPUS[name]]
    plan = json.loads(build.python(*words))
    report, _ = build.run_alone(path, GPUS[name], memory_gib=141 if name == "llama8b-h200" else 80)
    _, *quiet, _ = report["steps"]  # without those that are logged
    last = quiet[-1]
    row = {"communicators": report["communicators"], "pinned": report["registrations"]}
    row |= {"collectives": last["collectives"], "waits": sum(last[name] for name in WAITS)}
    row["growth"] = last["allocated"] - quiet[0]["allocated"]  # of bytes, between steps
    row["launches"] = last["kernels"] + last["triton_kernels"] + last["matmuls"]
    for figure, counter in (("peak_gib", "peak_allocated"), ("reserved_gib", "peak_reserved")):
        row[figure] = max(step[counter] for step in quiet) / 2**30
        row[f"{figure} / plan"] = row[figure] / plan[figure]
    return row


def main(case: str, *options: str) -> None:
    build.build()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(case, pathlib.Path(folder), " ".join(options))
    print(case, *options, *(f"| {name} {value:.6g}" for name, value in row.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
