"""Rebinds an optimizer that was built before sharding, and detects one that was not rebound.

fully_shard() replaces every parameter. An optimizer built before keeps the old ones: the full weights stay in memory,
and step() silently updates nothing (docs/optimizer_before_sharding.md). train.py builds its optimizer after sharding.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from model.llama import named_parameters


@contextlib.contextmanager
def rebind_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """`with rebind_optimizer(model, optimizer): parallelize(model, cfg, world)` rebinds an optimizer without state to
    the new parameters of the same names. Order, groups and settings stay. materialize() may follow.

    Raises ValueError for an optimizer that cannot be rebound, and for a parameter name that is gone afterwards.
    """
    if optimizer.state:
        raise ValueError("the optimizer has state, which would be lost: make it anew after sharding, or rebind it "
                         "before anything steps it, loads into it or makes its state (as optim.build_optimizer does)")
    # by object, not by storage: on meta all storages have the same (null) address
    known = {id(p): name for name, p in named_parameters(model)}
    names = [known.pop(id(p), None) for _, p in _entries(optimizer)]
    if None in names:
        entry, _ = _entries(optimizer)[names.index(None)]
        raise ValueError(f"{entry} is no parameter of the model, or the optimizer holds it already: rebind_optimizer "
                         "goes around the sharding")
    placeholder = torch.empty(0)  # stands in, so that each full weight is freed once its unit is sharded
    for group in optimizer.param_groups:
        group["params"] = [placeholder] * len(group["params"])
    try:
        yield
    finally:  # after an exception too: parameters not yet sharded are rebound unchanged
        found, wanted = dict(named_parameters(model)), iter(names)
        for group in optimizer.param_groups:
            group["params"] = [found.get(next(wanted), placeholder) for _ in group["params"]]
    if gone := [name for name in names if name not in found]:
        raise ValueError(f"the model has no {', '.join(gone)} any more, which the optimizer held: within "
                         "rebind_optimizer parameters may be replaced, but not renamed, tied or removed")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError unless the optimizer holds exactly the model's trainable parameters, with state for all or
    none. Do not call it between forward and backward: the model may then hold unsharded parameters."""
    names = {id(p): name if p.requires_grad else f"{name}, which is frozen" for name, p in named_parameters(model)}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p): entry for entry, p in _entries(optimizer)}
    missing = [name for key, name in names.items() if key in trained and key not in held]
    foreign = [f"{entry} ({names.get(key, 'unknown')})" for key, entry in held.items() if key not in trained]
    if missing or foreign:
        raise RuntimeError(
            "the optimizer does not hold the model's trainable parameters. "
            f"It lacks {len(missing)}: {', '.join(missing[:8])}. "
            f"It holds {len(foreign)} others: {', '.join(foreign[:8])}. "
            "Made before sharding it would keep the full weights and never train the model: make it after sharding, or "
            "shard within parallel.rebind.rebind_optimizer(model, optimizer)")
    stateless = [name for name, p in named_parameters(model) if p.requires_grad and not optimizer.state.get(p)]
    if 0 < len(stateless) < len(trained):
        raise RuntimeError(f"the optimizer has state, but none for {', '.join(stateless[:8])}: checkpoints would lose "
                           "what it makes later; make it in optim.build_optimizer")


def _entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """(description of its position, parameter) of every parameter that the optimizer holds."""
    return [(f"param_groups[{i}]['params'][{j}] {tuple(p.shape)}", p)
            for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
