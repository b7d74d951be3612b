"""What a fork adds is used, or refused by name before the first step, with what to write."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.build import meta_model
from model.init import constant, normal
from model.llama import Attention, Block, Llama, RMSNorm
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


def zero_rows(attention: Attention) -> None:
    with torch.no_grad():
        attention.o_proj.weight[:4] = 0


def replace_weight(attention: Attention) -> None:
    attention.o_proj.weight = nn.Parameter(0.01 * torch.randn(48, 48))


def own_gate(block: Block) -> None:
    block.gate = nn.Parameter(torch.full((1,), 0.5))
    block.init = {"gate": constant(0.0)}


def gate_of_a_number(block: Block) -> None:
    block.gate = nn.Parameter(torch.tensor([0.5]))
    block.init = {"gate": constant(0.0)}


@pytest.mark.parametrize(
    "name, change, parameter",
    [
        ("Llama", lambda model: model.apply(init_weights), r"embedding\.weight, blocks\.0"),
        ("Llama", lambda model: model.apply(init_data), r"blocks\.0\.attention\.q_proj\.weight"),
        ("FeedForward", lambda f: nn.init.zeros_(f.down_proj.weight), r"blocks\.0.*down_proj"),
        ("Attention", zero_rows, r"blocks\.0\.attention\.o_proj\.weight"),
        ("Llama", lambda model: model.apply(init_data).to(torch.bfloat16), r"blocks\.0.*q_proj"),
        ("Attention", replace_weight, r"blocks\.0\.attention\.o_proj\.weight"),
        ("Block", own_gate, r"blocks\.0\.gate, blocks\.1\.gate: "),
        ("Block", gate_of_a_number, r"blocks\.0\.gate, blocks\.1\.gate: "),
    ],
)
def test_value_given_in_a_constructor_is_refused(name, change, parameter):
    with after_init(name, change), refuses(parameter, "constructor", "torch.empty", "self.init"):
        meta_model(make_config().model)


def layer_norm(block: Block) -> None:
    block.attention_norm = nn.LayerNorm(48)
    block.attention_norm.init = {"weight": constant(1.0), "bias": normal(0.1)}
    block.attention.q_proj = nn.Linear(48, 48, bias=False)
    block.attention.q_proj.init = {"weight": normal(0.02)}


@distributed(ranks=1)
def test_module_of_torch_begins_as_declared(world):
    with after_init("Block", layer_norm):
        norm = build(make_config(), world).blocks[0].attention_norm
    assert norm.weight.full_tensor().eq(1).all() and norm.bias.full_tensor().std() > 0.05


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@distributed(ranks=1)
def test_hook_of_a_constructor_is_refused(world, register):
    add = lambda head: getattr(head.weight, register)(lambda gradient: None)  # noqa: E731
    with after_init("Head", add), refuses(r"head\.weight: the hook", "build_optimizer"):
        build(make_config(), world)


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


@distributed(ranks=2)
def test_own_attend_is_refused_under_context_parallelism(world):
    cfg = make_config(parallel={"cp": 2})
    changed = after_init("Attention", lambda attention: setattr(attention, "attend", capped))
    with changed, refuses("cp = 2", r"blocks\.0\.attention\.attend", "model/attention.py"):
        build(cfg, mesh_for(cfg, world))


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


def share_block(model: Llama) -> None:
    model.blocks[1] = model.blocks[0]


def share_one_norm(model: Llama) -> None:
    model.head.norm.weight = model.blocks[1].feed_forward_norm.weight


def add_parameter(model: Llama) -> None:
    model.scale = nn.Parameter(torch.empty(48))


def add_norm(model: Llama) -> None:
    model.embedding_norm = RMSNorm(48, 1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            share_feed_forward,
            (r"blocks\.0\.feed_forward\.gate_proj\.weight", "blocks.0 and blocks.1"),
        ),
        (share_block, (r"blocks\.0\.attention_norm\.weight", "blocks.0 and blocks.1 share")),
        (share_one_norm, (r"blocks\.1\.feed_forward_norm\.weight", "blocks.1 and head share")),
        (add_parameter, ("scale: belongs to no unit",)),
        (add_norm, (r"embedding_norm\.weight: belongs to no unit",)),
    ],
)
@distributed(ranks=1)
def test_parameter_in_no_unit_or_two_is_refused(world, change, words):
    with after_init("Llama", change), refuses(*words, "parallel/fsdp.py: units"):
        build(make_config(), world)


@pytest.mark.parametrize(
    "output, kind",
    [
        (lambda x: (x, x.mean()), "tuple"),
        (lambda x: (x, {}, x), "tuple"),
        (lambda x: [x], "list"),
        (lambda x: None, "None"),
    ],
)
@distributed(ranks=1)
def test_block_that_returns_something_else_is_refused(world, output, kind):
    forward = Block.forward
    changed = mock.patch.object(Block, "forward", lambda *args: output(forward(*args)))
    with changed, refuses(rf"blocks\.0 returns {kind}: ", "model/llama.py: Llama.forward"):
        build(make_config(), world)(token_ids(1, 8))


class Own(torch.optim.Optimizer):
    """SGD that counts its steps."""

    def __init__(self, model: nn.Module):
        super().__init__(model.parameters(), {"lr": 0.1, "weight_sum": 0.0})
        self.steps = 0
        for p in model.parameters():
            self.state[p] = {"step": torch.zeros(()), "z": p.detach().clone()}

    def step(self) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] += 1
                p.data.sub_(p.grad, alpha=group["lr"])


def in_group(optimizer: Own) -> None:
    optimizer.param_groups[0]["weight_sum"] += 1


def in_tensor_of_group(optimizer: Own) -> None:
    optimizer.param_groups[0].setdefault("d", torch.zeros(())).add_(1)


def in_attribute(optimizer: Own) -> None:
    optimizer.steps += 1


def in_late_state(optimizer: Own) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["late"] = torch.zeros(())


@pytest.mark.parametrize(
    "change, words",
    [
        (in_group, r"param_groups\[0\]\['weight_sum'\]"),
        (in_tensor_of_group, r"param_groups\[0\]\['d'\]"),
        (in_attribute, "its attribute steps"),
        (in_late_state, "'late'"),
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
        ("weight", {"history": [torch.zeros(2)]}, "state of weight: 'history' is list"),
        ("shared", {"step": torch.zeros(())}, r"state\['shared'\] is not of a parameter"),
    ],
)
def test_state_that_no_checkpoint_stores_is_refused(key, value, words):
    model = nn.Linear(4, 4)
    optimizer = Own(model)
    optimizer.state[dict(model.named_parameters()).get(key, key)] = value
    with refuses(words, "build_optimizer", r"torch\.zeros"):
        refuse_unsaved_state(model, optimizer)
