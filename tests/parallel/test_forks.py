"""What a fork adds is used, or refused by name before the first step, with what to write."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.build import meta_model
from model.init import constant
from model.llama import Block, Llama
from optim import local_tensor
from parallel.verify import refuse_hooks, refuse_unread_mask, refuse_unsaved_state
from tests.conftest import build, make_config, mesh_for, refuses, token_ids
from tests.distributed import distributed

pytestmark = pytest.mark.quick


def after_init(name: str, change: Callable[[Any], object]) -> Any:
    """A patch of model.llama: this class, whose constructor ends in `change`."""
    changed = getattr(__import__("model.llama").llama, name)

    class Changed(changed):
        def __init__(self, *args):
            super().__init__(*args)
            change(self)

    where = "model.build.Llama" if name == "Llama" else f"model.llama.{name}"
    return mock.patch(where, Changed)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.002)


def init_data(module: nn.Module) -> None:
    """As transformers' models do."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.002)


def own_gate(block: Block) -> None:
    block.gate = nn.Parameter(torch.full((1,), 0.5))
    block.init = {"gate": constant(0.0)}


O_PROJ = r"blocks\.0\.attention\.o_proj\.weight"


@pytest.mark.parametrize(
    "name, change, parameter",
    [
        ("Llama", lambda m: m.apply(init_weights), r"embedding\.weight, blocks\.0"),
        ("Llama", lambda m: m.apply(init_data), r"blocks\.0\.attention\.q_proj\.weight"),
        ("Attention", lambda a: a.o_proj.weight.data[:4].zero_(), O_PROJ),
        ("Attention", lambda a: setattr(a.o_proj, "weight", nn.Parameter(torch.ones(8))), O_PROJ),
        ("Block", own_gate, r"blocks\.0\.gate, blocks\.1\.gate: "),
    ],
)
def test_value_given_in_a_constructor_is_refused(name, change, parameter):
    with after_init(name, change), refuses(parameter, "constructor", "torch.empty", "self.init"):
        meta_model(make_config().model)


@distributed(ranks=2)
def test_hook_is_called_with_the_shard_s_gradient_or_refused(world):
    model = build(make_config(), world)
    ids = token_ids(2, 17)
    weight = model.embedding.weight

    def drop(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        local_tensor(parameter.grad).zero_()

    weight.register_post_accumulate_grad_hook(drop)
    refuse_hooks(model)
    model(ids[:, :-1], ids[:, 1:])[0]["loss"].backward()
    assert weight.grad is not None and local_tensor(weight.grad).count_nonzero() == 0
    weight.register_hook(lambda gradient: gradient * 0)
    with refuses(r"embedding\.weight: the hook", "register_post_accumulate_grad_hook"):
        refuse_hooks(model)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q.tanh(), k, v, is_causal=True, enable_gqa=True)


def near(documents: Tensor | None) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q >= k) & (q - k < 8)


def windowed(model: Llama, documents: Tensor | None, length: int = 32) -> Tensor:
    ids = torch.arange(length)
    return near(documents)(0, 0, ids[:, None], ids)[None, None]


def test_mask_rule_that_is_not_read_is_refused():
    model = meta_model(make_config().model)
    refuse_unread_mask(model)
    in_the_rule = mock.patch("parallel.verify.mask_mod", near)
    in_the_mask = mock.patch.object(Llama, "build_mask", windowed)
    with in_the_rule, refuses("build_mask", "returns None", "mask_mod", "is not causal"):
        refuse_unread_mask(model)
    with in_the_mask, refuses("build_mask", "returns a mask", "mask_mod", "is causal"):
        refuse_unread_mask(model)
    with in_the_rule, in_the_mask:
        refuse_unread_mask(model)


def share_feed_forward(model: Llama) -> None:
    model.blocks[1].feed_forward = model.blocks[0].feed_forward


def share_norm(model: Llama) -> None:
    model.head.norm.weight = model.blocks[1].feed_forward_norm.weight


HOOK = r"head\.weight: the hook.*build_optimizer"


@pytest.mark.parametrize(
    "change, words",
    [
        (share_feed_forward, r"0\.feed_forward\.gate_proj\.weight.*blocks.0 and blocks.1.*: units"),
        (share_norm, r"1\.feed_forward_norm\.weight.*blocks.1 and head share it.*: units"),
        (
            lambda m: setattr(m, "scale", nn.Parameter(torch.empty(48))),
            "scale: .* no unit.*: units",
        ),
        (lambda m: m.head.weight.register_hook(lambda gradient: None), HOOK),
        (lambda m: m.head.weight.register_post_accumulate_grad_hook(lambda p: None), HOOK),
        (lambda m: setattr(m.blocks[0].attention, "attend", capped), "cp = 2.*0.attention.attend"),
    ],
)
@distributed(ranks=2, fake=True)
def test_change_that_cannot_be_parallelized_is_refused(world, change, words):
    cfg = make_config(parallel={"cp": 2} if "cp = 2" in words else {})
    with after_init("Llama", change), refuses(words):
        build(cfg, mesh_for(cfg, world))


class Own(torch.optim.Optimizer):
    """SGD that counts its steps."""

    def __init__(self, model: nn.Module):
        super().__init__(model.parameters(), {"lr": 0.1, "weight_sum": 0.0})
        self.steps = 0
        self.momentum = {0: torch.zeros(3)}
        for p in model.parameters():
            self.state[p] = {"step": torch.zeros(()), "z": p.detach().clone()}

    def step(self) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] += 1
                p.data.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda o: o.param_groups[0].update(weight_sum=1.0), r"groups\[0\]\['weight_sum'\]"),
        (lambda o: setattr(o, "steps", 1), "its attribute steps"),
        (lambda o: o.momentum.update({0: torch.ones(3)}), "its attribute momentum"),
        (lambda o: setattr(o, "_late", [torch.zeros(2)]), "its attribute _late"),
        (lambda o: next(iter(o.state.values())).update(late=torch.zeros(())), "'late'"),
    ],
)
def test_what_a_step_changes_but_no_checkpoint_stores_is_refused(change, words):
    model = nn.Linear(4, 4)
    model(torch.ones(4)).sum().backward()
    optimizer = Own(model)
    refuse_unsaved_state(model, optimizer)
    optimizer.step()  # as it should be
    refuse_unsaved_state(model, optimizer)
    optimizer.register_step_pre_hook(lambda *unused: change(optimizer))
    with refuses("first step of Own", words, "build_optimizer", r"torch\.zeros"):
        optimizer.step()


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("weight", {"step": 0}, "state of weight: 'step' is int, not a tensor"),
        ("shared", {"step": torch.zeros(())}, r"state\['shared'\] is not of a parameter"),
    ],
)
def test_state_that_no_checkpoint_stores_is_refused(key, value, words):
    model = nn.Linear(4, 4)
    optimizer = Own(model)
    optimizer.state[dict(model.named_parameters()).get(key, key)] = value
    with refuses(words, "build_optimizer", r"torch\.zeros"):
        refuse_unsaved_state(model, optimizer)
