"""Folders as transformers saves them."""

import pathlib
import shutil
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import make_config
from tests.model.test_llama import reference


def write_folder(
    folder: pathlib.Path, tokenizer: pathlib.Path, shards: str = "1GB", **changes: Any
) -> pathlib.Path:
    """A model with random weights, as transformers saves it. changes: of TINY's model."""
    torch.manual_seed(0)
    model = reference(make_config(model=changes).model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 if weight.ndim == 1 else 5)  # attention is not nearly uniform
    settings: Any = (model.config, model.generation_config)
    for ids in settings:
        ids.bos_token_id, ids.eos_token_id = 1, 2
    model.save_pretrained(folder, max_shard_size=shards)
    shutil.copy(tokenizer / "tokenizer.model", folder)
    return folder


def in_transformers(folder: pathlib.Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")
