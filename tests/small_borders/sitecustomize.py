"""Python imports this module by itself at its start."""

from tests.small_borders import shrink

shrink()
