"""Builds the model of a configuration: adapters added, frozen parameters marked."""

import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    """Freezes the parameters with a name that matches a pattern. A tied matrix has two names."""
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
    """build_model() on the meta device: without storage, so no rank ever holds the full model.

    Raises ConfigError if a constructor writes values to a parameter: they would be lost.
    """
    with torch.device("meta"), UnwrittenStorages() as unwritten:
        model = build_model(m, lora)
    names = []
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter not in unwritten and not initializes_itself(module):
                names.append(f"{path}.{attribute}".removeprefix("."))
    if names:
        raise ConfigError(
            f"{', '.join(names[:3])}{', ...' if names[3:] else ''}: a constructor gives it a value, by "
            "nn.init, in place or by a tensor other than torch.empty(); the model is built on the meta "
            'device, which keeps none: declare it in the module, self.init = {"weight": normal(0.02)}, '
            "with a function of model/init.py or your own"
        )
    return model


def initializes_itself(module: nn.Module) -> bool:
    """Whether this is one of torch's modules, which write values in their constructor. materialize()
    refuses them unless they declare `init`."""
    reset = getattr(type(module), "reset_parameters", None)
    return reset is not None and reset.__module__.startswith("torch.nn")


class UnwrittenStorages(TorchDispatchMode):
    """Tracks the storages that torch.empty() made and that no operator has written to since."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}  # by storage, which they keep alive

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = operator(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or operator.is_view:
            return result
        is_empty = "empty" in operator.__name__
        if operator is torch.ops.aten._to_copy.default:  # .to(dtype)
            is_empty = args[0] in self
        if is_empty:
            self.tensors[storage_id(result)] = result
        else:
            self.tensors.pop(storage_id(result), None)
        return result

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.tensors


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
