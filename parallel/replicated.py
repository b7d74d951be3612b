"""The option `replicated`: frozen parameters that every rank stores in full. FSDP2 ignores them."""

import fnmatch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import config
from config import ConfigError
from model.llama import Llama, named_parameters
from parallel.materialize import is_quantized


def replicated_parameters(model: Llama, p: config.Parallel) -> set[nn.Parameter]:
    """The parameters with a name that matches a pattern of `replicated`. A tied matrix has two names.

    Raises ConfigError for a pattern that matches nothing, or that matches a trainable parameter,
    whose gradient would not be reduced.
    """
    parameters = dict(named_parameters(model, remove_duplicate=False))
    layer_of = {name: name.rpartition(".")[0] for name in parameters}
    replicated: set[nn.Parameter] = set()
    for pattern in p.replicated:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            first_names = ", ".join(list(parameters)[:3])
            raise ConfigError(
                f"[parallel] replicated: {pattern!r} matches none of {first_names}, ..."
            )
        # A quantized layer's parameters are replicated together, because a rank computes all of them
        # from the rows of the weight that it reads.
        layers = {layer_of[name] for name in matching}
        quantized = {layer for layer in layers if is_quantized(model.get_submodule(layer))}
        matching += [name for name in parameters if layer_of[name] in quantized]
        trained = [name for name in matching if parameters[name].requires_grad]
        if trained:
            raise ConfigError(
                f"[parallel] replicated: {pattern!r} matches {', '.join(trained[:3])}, "
                "which is trained: freeze it (model.freeze) or shard it"
            )
        replicated.update(parameters[name] for name in matching)
    return replicated


class Cast(nn.Module):
    """Parametrization: casts a stored parameter to the dtype that forward computes in."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def cast_at_access(
    modules: list[nn.Module], replicated: set[nn.Parameter], dtype: torch.dtype
) -> None:
    """Casts the replicated parameters of a unit's modules to this dtype at each access.

    They are stored in their original dtype, so that a checkpoint does not depend on `replicated`.
    """
    for module in list(nn.ModuleList(modules).modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_cast = parameter.is_floating_point() and parameter.dtype != dtype
            if parameter in replicated and is_cast:
                # unsafe: the dtype changes, which torch would refuse.
                parametrize.register_parametrization(module, name, Cast(dtype), unsafe=True)
