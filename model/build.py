"""Builds the model of a configuration: adapters added, frozen parameters marked."""

import fnmatch

import torch

import config
from config import ConfigError
from model.llama import Llama, named_parameters


def build_model(m: config.Model, lora: config.Lora | None = None) -> Llama:
    """The model on torch's default device, uninitialized.

    Raises ConfigError if a pattern in `freeze` matches no parameter, or if every parameter is
    frozen.
    """
    model = Llama(m)
    if lora:
        from extras.lora.adapters import add_adapters

        add_adapters(model, lora)
    freeze(model, m.freeze)
    return model


def freeze(model: Llama, patterns: tuple[str, ...]) -> None:
    """Freezes the parameters with a name that matches a pattern: a tied matrix has two."""
    parameters = dict(named_parameters(model, remove_duplicate=False))
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise ConfigError(
                f"[model] freeze: {pattern!r} matches none of {', '.join([*parameters][:3])}, ..."
            )
        for name in names:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("[model] freeze: nothing is left to train")


def meta_model(m: config.Model, lora: config.Lora | None = None) -> Llama:
    """build_model() on the meta device: without storage, so no rank ever holds the full model."""
    with torch.device("meta"):
        return build_model(m, lora)
