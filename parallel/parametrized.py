"""What tensor.py and replicated.py need where they parametrize the modules of every block."""

from torch import nn
from torch.nn.utils import parametrize


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
