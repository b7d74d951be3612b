"""What test_rebind.py runs on several ranks."""

import weakref

import torch

from benchmarks.optimizer_before_sharding import full_model
from extras.migrate.rebind import rebind_optimizer
from model.llama import Llama, named_parameters
from optim import build_optimizer
from parallel.materialize import materialize
from parallel.parallelize import parallelize
from parallel.verify import check_optimizer
from tests import cases
from tests.conftest import make_config


def new_model(cfg, meta: bool) -> Llama:
    if not meta:
        return full_model(cfg)
    with torch.device("meta"):
        return Llama(cfg.model)


def groups(model) -> list[dict]:
    """The vectors first, and backwards: an order that nothing but the old entries knows."""
    parameters = list(model.parameters())[::-1]
    return [
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": 0.1,
            "betas": (0.8, 0.9),
        },
    ]


def train(model, optimizer, cfg) -> dict:
    """Three steps: each one's loss, and hashes of the weights after them."""
    ids = torch.randint(
        0, cfg.model.vocab_size, (4, 17), generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for _ in range(3):
        loss = model(ids[:, :-1], ids[:, 1:])[0]["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": cases.digests(dict(named_parameters(model)))}


def described(model, optimizer) -> list[tuple[list[str], dict]]:
    names = {id(p): name for name, p in named_parameters(model)}
    return [
        ([names[id(p)] for p in group["params"]], {k: v for k, v in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]


def made_after(cfg, world) -> dict:
    model = cases.build(cfg, world)
    return train(model, torch.optim.AdamW(groups(model), lr=3e-3, fused=True), cfg)


def made_before(cfg, world, meta: bool) -> dict:
    """Optimizer first, then sharding within rebind_optimizer, and what can be seen of it at each point."""
    model = new_model(cfg, meta)
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3, fused=True)
    before = described(model, optimizer)
    full = [weakref.ref(p) for p in model.parameters()]
    with rebind_optimizer(model, optimizer):
        parallelize(model, cfg, world)
        alive = sum(p() is not None for p in full)
    after = described(model, optimizer)
    if meta:
        materialize(model, cfg.run.seed, world.device)
    check_optimizer(model, optimizer)  # materialize left the objects as they were
    found = train(model, optimizer, cfg)
    check_optimizer(model, optimizer)  # and so did the first forward
    return {
        **found,
        "alive": alive,
        "before": before,
        "after": after,
        "end": described(model, optimizer),
    }


def all_orders(every: list[dict]) -> list[dict[str, dict]]:
    """Each model trained with its optimizer made after sharding, and before it, on meta and with values."""
    found = []
    with cases.process_group() as world:
        for sections in every:
            cfg = make_config(**sections)
            ours = cases.world_for(cfg, world)
            found.append(
                {
                    "after": made_after(cfg, ours),
                    "meta": made_before(cfg, ours, meta=True),
                    "real": made_before(cfg, ours, meta=False),
                }
            )
    return found


def not_carried_over(sections: dict) -> dict:
    """The fault itself."""
    cfg = make_config(**sections)
    with cases.process_group() as world:
        model = full_model(cfg)
        optimizer = torch.optim.AdamW(groups(model), lr=3e-3, fused=True)
        full = [weakref.ref(p) for p in model.parameters()]
        parallelize(model, cfg, world)
        initial = cases.digests(dict(named_parameters(model)))
        found = {
            **train(model, optimizer, cfg),
            "initial": initial,
            "states": len(optimizer.state),
            "alive": sum(p() is not None for p in full),
        }
        try:
            check_optimizer(model, optimizer)
            found["error"] = "none"
        except RuntimeError as error:
            found["error"] = str(error)
        own = build_optimizer(model, cfg.optim)
        check_optimizer(model, own)
        del model, optimizer, own
    return found
