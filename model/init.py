"""Initial values of parameters and buffers.

A module declares them by name, in __init__:

    self.gate = nn.Parameter(torch.empty(1))
    self.init = {"gate": constant(0.0)}

parallel/materialize.py calls these functions once for each block of a parameter's rows. So no rank
ever holds a full parameter, and the values do not depend on the mesh.
"""

import math
from collections.abc import Callable

from torch import Tensor, nn

# fill(rows, first_row) fills `rows` (n, ...) in place. They are rows of the full parameter, from
# `first_row` on, in float32. It may draw from torch's default generators, as torch.nn.init does. A
# parameter of at most 65,536 elements is filled in one call, and so is any buffer, in its own dtype.
Fill = Callable[[Tensor, int], object]


def constant(value: float) -> Fill:
    """Fills with one value."""
    return lambda rows, first_row: rows.fill_(value)


def normal(std: float, cutoff: float = math.inf) -> Fill:
    """Draws from a normal distribution with mean 0, truncated at `cutoff` standard deviations."""
    if math.isinf(cutoff):
        return lambda rows, first_row: rows.normal_(0.0, std)
    return lambda rows, first_row: nn.init.trunc_normal_(
        rows, 0.0, std, -cutoff * std, cutoff * std
    )
