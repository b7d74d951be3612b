"""Bases, PEFT's adapters, and a run over one. All need extras/huggingface."""

import pathlib
import shutil
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import config
from checkpoint import catalog
from tests.conftest import TINY, has_extra, make_config, train_run
from tests.distributed import run_on_ranks

collect_ignore_glob = [] if has_extra("huggingface") else ["test_*.py"]
PROJECTIONS = [*config.PROJECTIONS]
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WIDTHS |= {"intermediate_size": 128, "vocab_size": 320, "num_hidden_layers": 2}
WIDTHS |= {"max_position_embeddings": 64, "initializer_range": 0.1}


def make_base(folder: pathlib.Path, kind: type = LlamaConfig, **settings: object) -> pathlib.Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**WIDTHS, **settings}))
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Hugging Face folders by model_type; qwen3's embeddings are tied. Copy to change."""
    make = lambda kind, **more: make_base(tmp_path_factory.mktemp("base"), kind, **more)  # noqa: E731
    return {"llama": make(LlamaConfig), "qwen3": make(Qwen3Config, tie_word_embeddings=True)}


@pytest.fixture(scope="session")
def base(bases) -> pathlib.Path:
    return bases["llama"]


def peft_of(base: pathlib.Path, **changes: Any) -> PeftModel:
    """With random adapters, B too."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(**settings | {"init_lora_weights": False} | changes))


@pytest.fixture(scope="session")
def adapter(base, tmp_path_factory) -> pathlib.Path:
    """PEFT's folder."""
    folder = tmp_path_factory.mktemp("adapter")
    peft_of(base).save_pretrained(folder)
    return folder


def lora_config(base: pathlib.Path, adapter: object = None, **sections: dict) -> config.Config:
    """Of a run with adapters over the base; its sizes are the folder's."""
    lora = {"base_dtype": "float32", **({"init_from": str(adapter)} if adapter else {"rank": 4})}
    model = {**dict.fromkeys(TINY["model"]), "vocab_size": 320, "init_from": str(base)}
    train = {"steps": 4, "seq_len": 16, "micro_batch_size": 1}
    sections["lora"] = {**lora, **sections.get("lora", {})}
    sections["model"] = {**model, **sections.get("model", {})}
    return make_config(train=train, **sections)


@pytest.fixture(scope="session")
def run(base, adapter, corpus, prepared, tmp_path_factory) -> tuple[config.Config, pathlib.Path]:
    """(configuration, last checkpoint) of a real run over a base in NF4."""
    folder = tmp_path_factory.mktemp("runs")
    cfg = lora_config(
        shutil.copytree(base, folder / "base"),
        adapter,
        lora={"base_dtype": "nf4"},
        data={"source": str(corpus), "path": str(prepared)},
        run={"name": "r", "output_dir": str(folder)},
        checkpoint={},
    )
    run_on_ranks(2, lambda world: train_run(cfg, world))
    return cfg, catalog.path_of(catalog.root_of(cfg), 4)
