"""An optimizer that was made before sharding: how to carry it over, and how to detect one that was not.

fully_shard() puts a new object in the place of every parameter. An optimizer made before keeps the old ones: the full
weights, which never see a gradient. So step() updates nothing, without an error, and the full weights stay in memory
(docs/optimizer_before_sharding.md). train.py makes its optimizer afterwards; this is for code that cannot.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from parallel.materialize import named_parameters


@contextlib.contextmanager
def rebind_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Carries an optimizer that has not stepped yet over to the parameters that sharding makes:

        with rebind_optimizer(model, optimizer):
            parallelize(model, cfg, world)

    Entries are matched by name, which sharding keeps; their order and their groups' settings stay. Within, the
    optimizer holds placeholders, so that each full weight is freed as soon as its unit is sharded. Afterwards
    materialize() may follow: FSDP2's parameters stay the same objects from here on.

    Raises ValueError for an optimizer that cannot be carried over and for a name that is gone afterwards. After an
    exception within, the optimizer holds what the model then has: its own parameters where sharding did not come to.
    """
    names = _names_by_group(model, optimizer)
    placeholder = torch.empty(0)
    for group in optimizer.param_groups:
        group["params"] = [placeholder] * len(group["params"])
    try:
        yield
    finally:
        found = dict(named_parameters(model))
        for group, wanted in zip(optimizer.param_groups, names):
            group["params"] = [found.get(name, placeholder) for name in wanted]
    gone = [name for wanted in names for name in wanted if name not in found]
    if gone:
        raise ValueError(f"the model has no {', '.join(gone)} any more, which the optimizer held before sharding: "
                         "within rebind_optimizer parameters may be replaced, but not renamed, tied or removed")


def _names_by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    if optimizer.state:
        raise ValueError("the optimizer has state, which would be lost: make it anew after sharding, or rebind it "
                         "before its first step and before anything is loaded into it or made in it (as "
                         "optim.build_optimizer does)")
    # by object and not by storage: on meta all storages have the same address, none
    known, seen = {id(p): name for name, p in named_parameters(model)}, set()
    for entry, p in _entries(optimizer):
        if id(p) not in known:
            raise ValueError(f"{entry} is no parameter of the model, or not any more: rebind_optimizer goes around the "
                             "sharding")
        if id(p) in seen:
            raise ValueError(f"{entry} is {known[id(p)]}, which the optimizer holds already")
        seen.add(id(p))
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError where the optimizer does not hold the model's trainable parameters, all and no others.

    For a model that is sharded at the moment: between forward and backward other tensors stand in for its parameters.
    """
    names = {id(p): (name, p.requires_grad) for name, p in named_parameters(model)}
    held = {id(p): entry for entry, p in _entries(optimizer)}
    missing = [name for key, (name, trained) in names.items() if trained and key not in held]
    foreign = [entry + (f" ({names[key][0]}, which is frozen)" if key in names else "")
               for key, entry in held.items() if not names.get(key, ("", False))[1]]
    if missing or foreign:
        raise RuntimeError(
            "the optimizer does not hold the model's trainable parameters."
            + (f" It lacks {_some(missing)}." if missing else "")
            + (f" It holds what is not among them: {_some(foreign)}." if foreign else "")
            + " Made before sharding it would keep the full weights alive and update those, and the model would never "
              "learn: make it after sharding, or shard within parallel.rebind.rebind_optimizer(model, optimizer)")


def _entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """(where it stands, in words; the parameter) of everything that the optimizer holds."""
    return [(f"param_groups[{i}]['params'][{j}] {tuple(p.shape)}", p)
            for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]


def _some(words: list[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
