"""A situation: what somebody brings, the command that they type, and what must come out.

A report from the field becomes one more row of a table in this folder. The tables are SITUATIONS in
the modules beside this one, and test_field.py runs each row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DONE = "finished"

# base.toml: a user's file, which leaves everything to its default that it can
BASE = """\
[model]
dim = 48
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 80
vocab_size = 320

[data]
path = "FOLDER/prepared"

[train]
steps = 2
seq_len = 32
global_batch_size = 8
micro_batch_size = 2

[optim]
lr = 3e-3
warmup_steps = 2

[parallel]
param_dtype = "float32"

[run]
name = "field"
output_dir = "FOLDER/outputs"
device = "cpu"

[log]
every_steps = 1
tensorboard = false
"""


@dataclass
class Situation:
    """One row. The command runs in an empty folder that holds `files` and base.toml, a tiny model
    that trains on a CPU for two steps.

    name: a sentence that says what is brought.
    command: what follows ./run_train.sh, separated by spaces; {folder} is the folder's path.
    says: texts that the output must hold, in any order. Values that differ from one machine to the
        next are left out.
    files: {name: content}. A function gets the path and makes what is there.
    exit_code: 0 success, 1 failure, 2 invalid input.
    never: texts that the output must not hold. "Traceback" is never allowed.
    check: gets the folder after the command, and asserts more about what it left.
    """

    name: str
    command: str
    says: tuple[str, ...]
    files: dict[str, str | bytes | Callable[[Path], None]] = field(default_factory=dict)
    exit_code: int = 0
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    never: tuple[str, ...] = ()
    check: Callable[[Path], None] | None = None
    needs: tuple[str, ...] = ()  # extras, by their folders' names
