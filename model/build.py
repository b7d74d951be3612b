"""Builds the model of a configuration: adapters added, frozen parameters marked."""

import fnmatch

import torch

import config
from config import ConfigError
from model.llama import Llama


def build_model(m: config.Model, lora: config.Lora | None = None) -> Llama:
    """The model on torch's default device, uninitialized. Raises ConfigError if a pattern in `freeze` matches no
    parameter, or if every parameter is frozen."""
    model = Llama(m)
    if lora:
        from extras.lora.adapters import add_adapters

        add_adapters(model, lora)
    names = dict(model.named_parameters())
    for pattern in m.freeze:
        if not (found := fnmatch.filter(names, pattern)):
            raise ConfigError(
                f"[model] freeze: {pattern!r} matches none of {', '.join([*names][:3])}, ..."
            )
        for name in found:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError("[model] freeze: nothing is left to train")
    return model


def meta_model(m: config.Model, lora: config.Lora | None = None) -> Llama:
    """build_model() on the meta device: without storage, so that no rank ever holds the full model."""
    with torch.device("meta"):
        return build_model(m, lora)
