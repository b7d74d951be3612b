"""Checks on the meta device that a block calls its matmuls in the order in which recomputation numbers them."""

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from config import ConfigError
from model.llama import Llama
from parallel.selective import matmuls_of


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
