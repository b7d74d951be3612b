"""Activation checkpointing: which blocks discard their activations after forward and recompute them in backward."""

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import config
from config import ConfigError
from model.llama import Llama


def is_checkpointed(setting: str | int, layer: int) -> bool:
    """Whether the block of this index (from 0) is checkpointed. setting: the option `recompute`, either a mode, which
    is for every block, or n for the last of every n blocks."""
    return setting != "none" and (isinstance(setting, str) or layer % setting == setting - 1)


def apply_activation_checkpointing(model: Llama, setting: str | int) -> None:
    """Wraps blocks in place. "none": no block. "full": every block saves only its input. n: every n-th block does; the
    others save everything. "elementwise" and "selective": every block saves a part."""
    wrap = partial(checkpoint_wrapper, preserve_rng_state=False)  # no dropout: no RNG state
    if setting in config.SELECTIVE:
        wrap = partial(checkpoint_selectively, setting=setting)
    for layer, block in enumerate(model.blocks):
        if is_checkpointed(setting, layer):
            model.blocks[layer] = wrap(block)


aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
GROUPED = aten._grouped_mm.default  # of a mixture of experts: F.grouped_mm()
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._efficient_attention_forward.default,
    torch.ops.higher_order.flex_attention,  # with a document mask
}
KEEP_EVERY = {"elementwise": 1, "selective": 2}  # mode -> n: every n-th matrix product is saved


def matmuls_of(module: nn.Module) -> set:
    """The operators of its linear layers: MATRIX_PRODUCTS, and what layers of other kinds name as `matmuls`."""
    return MATRIX_PRODUCTS.union(*(getattr(layer, "matmuls", ()) for layer in module.modules()))


def checkpoint_selectively(block: nn.Module, setting: str, also: Collection = ()) -> nn.Module:
    """The block, wrapped.

    "elementwise": it saves attention and matrix products; it recomputes norms, RoPE and activation function.
    "selective": it saves attention and every second matrix product; it recomputes the rest.
    Matrix products are those of linear layers and, numbered apart, grouped ones; batched ones (bmm) are recomputed.
    also: operators that both settings save in any case.

    A linear layer's attribute `keep_output` decides for its output in both modes: True, it is saved; False, it is
    recomputed; absent, the layers without it are numbered. A block's `keep_first` names operators whose first result
    in the block is saved.
    """
    layers = {
        name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)
    }
    linears, keeps = (
        [*layers],
        {name: getattr(layer, "keep_output", None) for name, layer in layers.items()},
    )
    kept = {*[name for name in linears if keeps[name] is None][: -1 : KEEP_EVERY[setting]]}
    kept |= {name for name in linears if keeps[name]}
    contexts = partial(
        _save_expensive_ops,
        matmuls_of(block),
        {linears.index(name) for name in kept},
        KEEP_EVERY[setting],
        getattr(block, "keep_first", ()),
        also,
    )
    drop_advice_on_policies()
    return checkpoint_wrapper(block, preserve_rng_state=False, context_fn=contexts)


def _save_expensive_ops(
    matmuls: set, kept: set[int], every: int, keep_first: Collection, also: Collection
):
    """Contexts for one block's forward and recomputation. kept: indices of matrix products in call order, which is the
    order of named_modules(): see check_matmul_order. The last is never saved: it feeds only the residual add, so
    backward does not read it (the partitioner drops it when compiled; eager mode would save it for nothing). Of grouped
    products each n-th is saved from the first on (every = n), also the last: a router's gradient reads it.
    keep_first: operators whose first result is saved; also: operators whose every result is saved.
    """
    numbers = defaultdict(itertools.count)  # calls so far per kind, counted apart in recomputation

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in ATTENTION or operator in also:
            return CheckpointPolicy.MUST_SAVE
        if operator in matmuls and next(numbers["product", context.is_recompute]) in kept:
            return CheckpointPolicy.MUST_SAVE
        if operator == GROUPED and next(numbers["grouped", context.is_recompute]) % every == 0:
            return CheckpointPolicy.MUST_SAVE
        if operator in keep_first and next(numbers[operator, context.is_recompute]) == 0:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def drop_advice_on_policies() -> None:
    """Drops what torch logs, in all versions, for every selective checkpointing policy that it compiles: not to change
    a tensor in place. No block does. Test: test_torch_patches.py, test_the_advice_on_policies_is_dropped."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_advice_on_policies)


def _is_no_advice_on_policies(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def check_matmul_order(model: Llama, setting: str, seq_len: int) -> None:
    """For the modes of recomputation that number matmuls: raises ConfigError if a block's forward does not call each
    nn.Linear once, in the order of named_modules(), with no other matmul in between. Runs one block of each kind, in
    the model's forward on the meta device: call it while the model is plain."""
    where = f'[parallel] recompute = "{setting}": numbers the matmuls of a block'
    advice = 'or use recompute = "none", "full" or every n-th block'
    outputs: dict[tuple, tuple] = {}
    names = {module: name for name, module in model.named_modules()}
    with contextlib.ExitStack() as stack:
        for block in model.blocks:
            stack.enter_context(
                mock.patch.object(block, "forward", partial(_once, outputs, block, block.forward))
            )
        order = stack.enter_context(MatmulOrder(matmuls_of(model)))
        for hook in (
            register_module_forward_pre_hook(order.enter),
            register_module_forward_hook(order.leave),
        ):
            stack.callback(hook.remove)
        try:
            tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
            functional_call(model, cast(model, torch.bfloat16), tokens)
        except (
            RuntimeError
        ) as error:  # also NotImplementedError: shapes or branches that depend on values
            raise ConfigError(
                f"{where}, whose order is unknown: {order.operator} in {names[order.running[-1]]} fails "
                "on the meta device, without values; take an operator whose shapes do not depend on "
                f"them, {advice}"
            ) from error
    for block, _ in outputs.values():
        inside = {*block.modules()}
        due = [names[module] for module in block.modules() if isinstance(module, nn.Linear)]
        found = [names[module] for module in order.matmuls if module in inside]
        for n, (name, called) in enumerate(
            itertools.zip_longest(due, found, fillvalue="nothing"), 1
        ):
            if name != called:
                raise ConfigError(
                    f"{where} in the order of named_modules(), but number {n} of {names[block]} is of "
                    f"{called} in forward, of {name} in that order; assign the linear layers in __init__ "
                    f"in the order in which forward calls them, each once and with no matmul in between, "
                    f"{advice}"
                )


def cast(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters, in the dtype that they compute in: grouped_mm() takes no others."""
    return {
        name: p.detach().to(dtype) for name, p in model.named_parameters() if p.is_floating_point()
    }


def _once(outputs: dict[tuple, tuple], block: nn.Module, forward: Callable, *args, **kwargs) -> Any:
    """forward() of the first block of its kind; for the others its output, since meta tensors have no values. Blocks
    of a kind have equal modules and attributes, but for tensors and floats, such as an init_std."""
    kind = tuple(
        (
            name,
            type(module),
            *(
                (key, value)
                for key, value in vars(module).items()
                if value is None or isinstance(value, int | str)
            ),
        )
        for name, module in block.named_modules()
    )
    if kind not in outputs:
        outputs[kind] = block, forward(*args, **kwargs)
    return outputs[kind][1]


class MatmulOrder(TorchDispatchMode):
    """Records, for each matmul, the innermost module that runs, and the last operator."""

    def __init__(self, operators: set):
        super().__init__()
        self.operators = operators
        self.running: list[nn.Module] = []
        self.matmuls: list[nn.Module] = []
        self.operator: Any = None

    def enter(self, module: nn.Module, args: tuple) -> None:
        self.running.append(module)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operator = operator
        if operator in self.operators:
            self.matmuls.append(self.running[-1])
        return operator(*args, **(kwargs or {}))
