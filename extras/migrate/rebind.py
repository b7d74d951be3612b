"""Rebinds an optimizer that was built before sharding; parallel/verify.py detects one that was not
rebound.

fully_shard() replaces every parameter. An optimizer built before keeps the old ones: the full
weights stay in memory, and step() silently updates nothing (docs/optimizer_before_sharding.md).
train.py builds its optimizer after sharding.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from model.llama import named_parameters
from parallel.verify import optimizer_entries


@contextlib.contextmanager
def rebind_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """`with rebind_optimizer(model, optimizer): parallelize(model, cfg, world)` rebinds an
    optimizer without state to the new parameters of the same names. Order, groups and settings
    stay. materialize() may follow.

    Raises ValueError for an optimizer that cannot be rebound, and for a parameter name that is gone
    afterwards.
    """
    if optimizer.state:
        raise ValueError(
            "the optimizer has state, which would be lost: make it anew after sharding, or rebind it "
            "before anything steps it, loads into it or makes its state (as optim.build_optimizer does)"
        )
    # by object, not by storage: on meta all storages have the same (null) address
    name_of = {id(parameter): name for name, parameter in named_parameters(model)}
    names = []
    for entry, parameter in optimizer_entries(optimizer):
        name = name_of.pop(id(parameter), None)
        if name is None:
            raise ValueError(
                f"{entry} is not a parameter of the model, or the optimizer holds it already: "
                "rebind_optimizer must enclose the sharding"
            )
        names.append(name)
    # stands in, so that each full weight is freed once its unit is sharded
    placeholder = torch.empty(0)
    for group in optimizer.param_groups:
        group["params"] = [placeholder] * len(group["params"])
    try:
        yield
    finally:  # after an exception too: parameters not yet sharded are rebound unchanged
        parameters = dict(named_parameters(model))
        rebound = iter([parameters.get(name, placeholder) for name in names])
        for group in optimizer.param_groups:
            group["params"] = [next(rebound) for _ in group["params"]]
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(
            f"the model has no {', '.join(missing)} any more, which the optimizer held: within "
            "rebind_optimizer parameters may be replaced, but not renamed, tied or removed"
        )
