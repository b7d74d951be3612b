"""What reaches into torch because no argument of torch does it, each for the versions that need it, with its test."""

import contextlib
import datetime
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize


def set_default_timeout(timeout: datetime.timedelta) -> None:
    """Sets the timeout of groups that DeviceMesh creates: in all versions these take torch's default, 30 minutes, not
    that of init_process_group(). Test: test_parallel.py, test_all_process_groups_have_the_runs_timeout."""
    dist.distributed_c10d.default_pg_timeout = timeout


@contextlib.contextmanager
def allow_integer_parameters() -> Iterator[None]:
    """Within it, fully_shard() accepts frozen integer parameters, such as NF4 codes. torch 2.11 first creates every
    sharded parameter with requires_grad=True, which fails for integers, and only then copies the original's flag; 2.12
    does not. Test: test_torch_patches.py, test_frozen_integers_are_sharded."""
    if torch.__version__ >= (2, 12):  # pyrefly: ignore[unsupported-operation]  # TorchVersion allows it
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    with mock.patch.object(
        _fsdp_param, "nn", SimpleNamespace(Parameter=parameter, Module=nn.Module)
    ):
        yield


def share_classes(model: nn.Module) -> None:
    """Gives modules of one class, parametrized alike (tp and casts of unsharded parameters do that), one class again:
    torch creates a class for each, and torch.compile would compile a graph for each class, in all versions
    (parametrize.py: _inject_new_class). Tests: test_torch_patches.py, test_modules_parametrized_alike_share_a_class;
    test_parallel.py, test_all_layers_share_one_compiled_graph."""
    shared: dict[tuple, type] = {}
    for module in model.modules():
        if parametrize.is_parametrized(module):
            own = type(module)
            module.__class__ = shared.setdefault((*own.__bases__, *module.parametrizations), own)
