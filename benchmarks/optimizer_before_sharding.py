"""What an optimizer made before sharding costs: bytes that every rank retains, and does it train?

    python -m benchmarks.optimizer_before_sharding
    python -m benchmarks.optimizer_before_sharding --ranks 1 2 3 4 --plot docs/optimizer_before_sharding.png
    python -m benchmarks.optimizer_before_sharding --ranks 2 --json

Compares four ways to the same three steps of float32 AdamW, without prefetch, on CPU processes over
gloo that it starts itself:

    after     FSDP2, the optimizer made after sharding, as train.py does
    before    FSDP2, the optimizer made before sharding
    rebind    FSDP2, the optimizer made before, sharding within rebind()
    fsdp1     FullyShardedDataParallel(use_orig_params=True), the optimizer made before

Counts the storages, each once, of explicit sets of tensors: the model's parameters, further tensors
in the optimizer's groups, the gradients of both, and the optimizer's state. It does so after the
update of the second step, before and after zero_grad(). Activations, buffers of collectives and the
peak while sharding are not counted.
"""

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.launcher import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

import config
from model.llama import Block, Llama, named_parameters, parameter_count
from parallel.materialize import materialize
from parallel.mesh import World
from parallel.parallelize import parallelize
from run.rank import distributed

ARMS = ("after", "before", "rebind", "fsdp1")
STEPS = 3
BATCH = 12  # sequences of all ranks together: 1, 2, 3 and 4 ranks divide them
LENGTH = 32
SETTINGS = {
    "model": {
        "dim": 256,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 512,
        "vocab_size": 2048,
    },
    "train": {"steps": STEPS, "seq_len": LENGTH, "global_batch_size": BATCH, "micro_batch_size": 1},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "parallel": {
        "param_dtype": "float32",
        "reduce_dtype": "float32",
        "prefetch_forward": 0,
        "prefetch_backward": 0,
    },
    "run": {"device": "cpu"},
}


def full_model(cfg: config.Config) -> Llama:
    """The full model with its values, as code without sharding makes it, equal on every rank."""
    model = Llama(cfg.model)
    materialize(model, cfg.run.seed, torch.device("cpu"))
    return model


def adamw(model: nn.Module, cfg: config.Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, fused=True)


@contextlib.contextmanager
def rebind(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives an optimizer without state, after the sharding within, the new parameters of the same
    names."""
    name_of = {id(parameter): name for name, parameter in named_parameters(model)}
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []  # so that each full weight is freed as its unit is sharded
    yield
    parameters = dict(named_parameters(model))
    for group, group_names in zip(optimizer.param_groups, names):
        group["params"] = [parameters[name] for name in group_names]


def prepare(arm: str, cfg: config.Config, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = full_model(cfg)
    if arm == "after":
        parallelize(model, cfg, world)
        return model, adamw(model, cfg)
    optimizer = adamw(model, cfg)
    if arm == "before":
        parallelize(model, cfg, world)
    elif arm == "rebind":
        with rebind(model, optimizer):
            parallelize(model, cfg, world)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=world.device,
        )
    return model, optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def retained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank by kind; a storage that two kinds share counts for the first."""
    counted = set()

    def size(tensors: Iterable[torch.Tensor | None]) -> int:
        storages = {}  # bytes by address
        for tensor in tensors:
            if tensor is not None:
                storage = local(tensor).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        fresh = storages.keys() - counted
        counted.update(fresh)
        return sum(storages[address] for address in fresh)

    parameters = list(model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {
        "weights": size(parameters),
        "held by the optimizer alone": size(held),
        "gradients": size(p.grad for p in parameters + held),
        "states": size(t for state in optimizer.state.values() for t in state.values()),
    }
    return {**kinds, "total": sum(kinds.values())}


def measure(arm: str, cfg: config.Config, world: World) -> dict:
    """This rank's part of one arm."""
    model, optimizer = prepare(arm, cfg, world)
    initial = [local(p).detach().clone() for p in model.parameters()]
    ids = torch.randint(
        cfg.model.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    ours = ids[world.dp_rank :: world.dp_size]
    losses = []
    sizes = {}
    for step in range(1, STEPS + 1):
        loss = model(ours[:, :-1], ours[:, 1:])[0]["loss"]
        (loss * (world.dp_size / (BATCH * LENGTH))).backward()
        optimizer.step()
        if step == 2:
            sizes = retained(model, optimizer)
        optimizer.zero_grad()
        if step == 2:
            sizes["after zero_grad"] = retained(model, optimizer)["total"]
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / (BATCH * LENGTH))
    moved = any(not torch.equal(local(p), old) for p, old in zip(model.parameters(), initial))
    return {**sizes, "states made": len(optimizer.state), "moved": moved, "losses": losses}


def run_on_ranks(ranks: int, function: Callable, *arguments: Any) -> list:
    """Results of function(*arguments) by rank, each in its own process."""
    local = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    results = elastic_launch(local, function)(*arguments)
    return [results[rank] for rank in range(ranks)]


def on_this_rank(arms: list[str], settings: dict) -> list[dict]:
    """Every arm after the other in one process group. For an fsdp1 arm that torch cannot run here
    the row has the reason."""
    torch.set_num_threads(1)
    cfg = config.from_dict(settings, "benchmark")
    rows = []
    with distributed(cfg) as world:
        for arm in arms:
            try:
                rows.append(measure(arm, cfg, world))
            except Exception as error:
                if arm != "fsdp1":
                    raise
                rows.append({"left out": f"{type(error).__name__}: {error}"})
            gc.collect()
    return rows


def expected_difference(parameters: int, ranks: int) -> float:
    """Bytes that a rank retains more with the optimizer made before, by formula: 4 P (1 - 2 / N).

    The full float32 weights are kept, 4 P; AdamW's two states of the shard are never made, 8 P / N.
    """
    return 4 * parameters * (1 - 2 / ranks)


def table(ranks: int, arms: list[str], settings: dict = SETTINGS) -> list[dict]:
    """A row for each arm, the first of which is "after": bytes of the rank that retains most."""
    rows_of_rank = run_on_ranks(ranks, on_this_rank, arms, settings)
    with torch.device("meta"):
        parameters = parameter_count(Llama(config.from_dict(settings, "benchmark").model))
    rows = []
    for i, arm in enumerate(arms):
        of_ranks = [rank_rows[i] for rank_rows in rows_of_rank]
        most = max(of_ranks, key=lambda row: row.get("total", 0))
        moved = any(row.get("moved", False) for row in of_ranks)
        rows.append({"ranks": ranks, "arm": arm, **most, "moved": moved, "parameters": parameters})
        if "total" in most:
            rows[-1]["more than after"] = most["total"] - rows[0]["total"]
            rows[-1]["formula"] = expected_difference(parameters, ranks) if arm == "before" else 0.0
    return rows


MIB_COLUMNS = (
    "weights",
    "held by the optimizer alone",
    "gradients",
    "states",
    "total",
    "after zero_grad",
)


def to_text(rows: list[dict]) -> str:
    lines = [
        f"{rows[0]['parameters']:,} parameters; MiB of the rank that retains most",
        "| ranks | arm | weights | optimizer alone | gradients | states | total | after zero_grad "
        "| more than `after`, bytes | formula, bytes | weights move | losses of 3 steps |",
        "|" + "|".join(["---"] * 12) + "|",
    ]
    for row in rows:
        cells = [str(row["ranks"]), row["arm"]]
        if "left out" in row:
            cells.append(f"left out: {row['left out']}")
            empty = "".join([" |"] * 10)
            lines.append(f"| {' | '.join(cells)}{empty}")
            continue
        for key in MIB_COLUMNS:
            cells.append(f"{row[key] / 2**20:.2f}")
        for key in ("more than after", "formula"):
            cells.append(f"{row[key]:,.0f}")
        cells.append("yes" if row["moved"] else "no")
        cells.append(", ".join(f"{loss:.4f}" for loss in row["losses"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    """Bars of the measured bytes by arm and number of ranks. Marks on `before`'s bars show the
    formula."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "total" in row]
    ranks = sorted({row["ranks"] for row in rows})
    measured = {row["arm"] for row in rows}
    arms = [arm for arm in ARMS if arm in measured]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        mib = {row["ranks"]: row["total"] / 2**20 for row in rows if row["arm"] == arm}
        offset = (i - (len(arms) - 1) / 2) * width
        positions = [j + offset for j, n in enumerate(ranks) if n in mib]
        label = f"{arm} (does not train)" if arm == "before" else arm
        axes.bar(positions, list(mib.values()), width, label=label)
        if arm == "before":
            formula = []
            for row in rows:
                if row["arm"] == arm:
                    after = row["total"] - row["more than after"]
                    formula.append((after + row["formula"]) / 2**20)
            axes.plot(positions, formula, "k_", markersize=22, label="after + 4P(1 - 2/N)")
    axes.set(
        xlabel="ranks",
        ylabel="MiB retained per rank",
        xticks=range(len(ranks)),
        xticklabels=ranks,
        title="The optimizer made before or after sharding, float32 AdamW",
    )
    axes.legend()
    figure.savefig(path, dpi=100)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 3, 4])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--plot", metavar="PATH", help="also draw the figures, as PNG (needs matplotlib)"
    )
    args = parser.parse_args(argv)
    rows = [row for ranks in args.ranks for row in table(ranks, list(ARMS))]
    print(json.dumps(rows) if args.json else to_text(rows))
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
