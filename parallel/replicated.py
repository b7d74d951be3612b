"""The option `replicated`: frozen parameters that every rank holds in full, and that FSDP2 ignores."""

import fnmatch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import config
from config import ConfigError
from model.llama import Linear, Llama, named_parameters
from parallel.torch_patches import share_classes


def matching_parameters(model: Llama, p: config.Parallel) -> set[nn.Parameter]:
    """The frozen parameters that `replicated` names. Raises ConfigError for a pattern that matches nothing, or that
    matches a trainable parameter: its gradient would not be reduced."""
    names, found = dict(named_parameters(model)), set()
    for pattern in p.replicated:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(
                f"[parallel] replicated: {pattern!r} matches none of {', '.join([*names][:3])}, ..."
            )
        # a quantized layer computes its parameters from the same rows, which a rank reads once: all or none
        paths = {name.rpartition(".")[0] for name in matching}
        modules = {path for path in paths if is_quantized(model.get_submodule(path))}
        matching += [name for name in names if name.rpartition(".")[0] in modules]
        if trained := [name for name in matching if names[name].requires_grad]:
            raise ConfigError(
                f"[parallel] replicated: {pattern!r} matches {', '.join(trained[:3])}, which is trained: "
                "freeze it (model.freeze) or shard it"
            )
        found |= {names[name] for name in matching}
    return found


def is_quantized(module: nn.Module) -> bool:
    return isinstance(module, Linear) and module.quantize is not None


class Cast(nn.Module):
    """Parametrization: casts a stored parameter to the dtype that forward computes in."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def cast_at_access(
    model: Llama, replicated: set[nn.Parameter], units: list[tuple[list[nn.Module], torch.dtype]]
) -> None:
    """Casts replicated parameters to their unit's param_dtype at each access, as FSDP2 casts sharded ones. The stored
    dtype stays, so that a checkpoint does not depend on what is sharded. units: (modules, param_dtype) of each."""
    for module, dtype in [
        (m, dtype) for modules, dtype in units for root in modules for m in root.modules()
    ]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (
                parameter in replicated
                and parameter.dtype != dtype
                and parameter.is_floating_point()
            ):
                # unsafe: changes dtype
                parametrize.register_parametrization(module, name, Cast(dtype), unsafe=True)
    share_classes(model)
