"""What benchmarks.gpu measures: groups of arms, the most informative first.

An arm is a configuration with changed options. Those of "environment", "training" and "tests" are
checks; "ceilings" and some of "faster" measure the parts of a step alone. All others train on one
random micro-batch: 3 steps to warm up (the first compiles), 8 timed. Then 1 and 8 of three times
that micro-batch. The slope between the two medians is a micro-batch's time. The intercept is the
optimizer's, with the cost of each step's synchronization. Speed and MFU are of a step of 16
sequences, composed of these two. One of eight GPUs takes as many of the configurations' 128. So
arms with other micro-batches can be compared.
"""

import config
from benchmarks import REPO
from benchmarks.gpu.environment import ENVIRONMENT
from benchmarks.gpu.trace import trace
from benchmarks.gpu.training import GPU_TESTS, TRAINING
from benchmarks.kernels import CEILINGS, block, float8_products, weight_gradients

CONFIGS = REPO / "configs"
COMMON = [
    "--run.device=auto",
    "--train.global_batch_size=16",
    "--checkpoint=off",
    "--eval=off",
    # so that eight steps change the loss, and rounding does not: at the configurations' own rate a
    # fresh model's loss on one batch falls so steeply that float8's differed by a third
    "--optim.warmup_steps=0",
    "--optim.schedule=constant",
    "--optim.lr=3e-5",
]
TINY = [
    "--model.dim=64",
    "--model.n_layers=1",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.head_dim=16",
    "--model.ffn_dim=128",
    "--model.vocab_size=512",
    "--train.seq_len=32",
]
ON_A_CPU = ["--parallel.compile=false", "--parallel.param_dtype=float32"]  # quickly
# arms that are no change of options
SHIPPED = "as shipped"
BARE = "bare loop"
AGAIN = "as shipped, again"
WHOLE = "blocks compiled whole"

MICRO_BATCH = "--train.micro_batch_size="
RECOMPUTE = "--parallel.recompute="
STATE = "--optim.state_dtype=bfloat16"
FLOAT8 = "--parallel.float8=tensorwise"
ONCE = [
    "--parallel.gather_once=true",
    "--parallel.sync_every_micro_batch=false",
]
CHANGES = [
    STATE,
    f"{RECOMPUTE}elementwise",
    "--parallel.reshard_after_forward=true",
    f"{MICRO_BATCH}8",
    f"{MICRO_BATCH}4",
    f"{MICRO_BATCH}2",
    f"{MICRO_BATCH}1",
    f"{RECOMPUTE}none",
    f"{RECOMPUTE}selective",
    f"{RECOMPUTE}full",
    "--parallel.compile=false",
]


def arms(name: str, *lists: list[str]) -> dict[str, tuple[str, list[str]]]:
    """{arm: (configuration, changes)}, without changes to what the configuration already has."""
    path = str(CONFIGS / f"{name}.toml")
    shipped = config.load(path, COMMON)
    arms = {}
    for changes in lists:
        if not changes:
            arms[SHIPPED] = (name, changes)
        elif config.load(path, [*COMMON, *changes]) != shipped:
            options = [change.partition(".")[2] for change in changes]
            arms[", ".join(options)] = (name, changes)
    return arms


# What could make a step faster, the most decisive first: {arm: (configuration, changes, seconds on
# an H200)}. Those of 8B are compared with group "8B".
FASTER = {
    "trace": ("llama8b-h200", [], 25),
    "once": ("llama8b-h200", ONCE, 45),
    "float8 products": ("llama8b", [], 6),
    "weight gradients": ("llama8b", [], 3),
    "block of 8B": ("llama8b", [], 5),
    "block of 3B": ("llama3b", [], 4),
    "block of 1B": ("llama1b", [], 4),
    "once, tensorwise": ("llama8b-h200", [*ONCE, FLOAT8], 40),
    WHOLE: ("llama8b-h200", [], 45),
    f"3B, {SHIPPED}": ("llama3b", [], 40),
    "3B, once": ("llama3b", ONCE, 35),
    f"1B, {SHIPPED}": ("llama1b", [], 45),
    "1B, once": ("llama1b", ONCE, 35),
    "trace of tensorwise": ("llama8b-h200", [FLOAT8], 25),
}
CHECKS = {"training": TRAINING, "tests": GPU_TESTS}  # each runs processes of its own
GROUPS = {
    "environment": {name: (path, []) for name, (_, path) in ENVIRONMENT.items()},
    **{group: {name: ("tiny", []) for name in checks} for group, checks in CHECKS.items()},
    "1B": arms("llama1b", [], [f"{RECOMPUTE}elementwise", STATE, f"{MICRO_BATCH}8"])
    | {BARE: ("llama1b", [])},
    "8B": arms("llama8b-h200", [], [FLOAT8], ["--parallel.float8=rowwise"]),
    "faster": {arm: (name, changes) for arm, (name, changes, _) in FASTER.items()},
    "ceilings": {name: (path, []) for name, (_, path) in CEILINGS.items()},
    "3B": arms("llama3b", [], [STATE, f"{MICRO_BATCH}2"]) | {BARE: ("llama3b", [])},
    "adapters": {
        "LoRA": ("llama8b-lora", []),
        "QLoRA": ("llama8b-qlora", []),
    },  # over a base drawn at random
    "options": arms("llama1b", [], *([change] for change in CHANGES)) | {AGAIN: ("llama1b", [])},
}
# arms that call a function of their own
PARTS = {
    **{arm: function for arm, (function, _) in {**ENVIRONMENT, **CEILINGS}.items()},
    **dict.fromkeys(("trace", "trace of tensorwise"), trace),
    **dict.fromkeys(("block of 8B", "block of 3B", "block of 1B"), block),
    "float8 products": float8_products,
    "weight gradients": weight_gradients,
}


def is_trained(group: str, arm: str) -> bool:
    """Whether an arm trains a model, and so has a plan."""
    return group not in CHECKS and arm not in PARTS
