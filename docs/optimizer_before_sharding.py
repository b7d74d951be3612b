"""What an optimizer made before sharding costs: bytes that every rank retains, and does it train?

    ./run_train.sh -m docs.optimizer_before_sharding [RANKS ...]

Three steps of float32 AdamW without prefetch, over gloo. The page of this name has the arms.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.launcher import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

import config
from model.llama import Block, Llama, named_parameters
from parallel.materialize import materialize
from parallel.mesh import World
from parallel.parallelize import parallelize
from run.rank import distributed

ARMS = ("after", "before", "rebind", "fsdp1")
BATCH, LENGTH = 12, 32  # sequences of all ranks together, and their tokens
SETTINGS = {
    "model": dict(dim=256, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=512, vocab_size=2048),
    "train": {"steps": 3, "seq_len": LENGTH, "global_batch_size": BATCH},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "parallel": {"param_dtype": "float32", "prefetch_forward": 0, "prefetch_backward": 0},
    "run": {"device": "cpu"},
}


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
    model = Llama(cfg.model)  # full, with its values, as code without sharding makes it
    materialize(model, cfg.run.seed, world.device)
    if arm == "after":
        parallelize(model, cfg, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, fused=True)
    if arm == "fsdp1":
        options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True}
        model = FullyShardedDataParallel(model, **options, device_id=world.device)
    elif arm != "after":
        with rebind(model, optimizer) if arm == "rebind" else contextlib.nullcontext():
            parallelize(model, cfg, world)
    return model, optimizer


def retained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of this rank: weights, what the optimizer alone holds, gradients, states."""
    weights = list(model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in weights + held if p.grad is not None]
    states = [t for state in optimizer.state.values() for t in state.values()]
    counted: set[int] = set()  # addresses: a storage of two kinds counts for the first
    sizes = []
    for kind in (weights, held, gradients, states):
        shards = [t.to_local() if isinstance(t, DTensor) else t for t in kind]
        storages = {t.data_ptr(): t.nbytes() for t in (s.untyped_storage() for s in shards)}
        sizes.append(sum(size for address, size in storages.items() if address not in counted))
        counted |= storages.keys()
    return sizes


def measure(arm: str, cfg: config.Config, world: World) -> tuple[list[int], int, list[str]]:
    """This rank's bytes in the second step, their sum after zero_grad(), and the losses."""
    model, optimizer = prepare(arm, cfg, world)
    torch.manual_seed(1)
    ids = torch.randint(cfg.model.vocab_size, (BATCH, LENGTH + 1))[world.dp_rank :: world.dp_size]
    rows = []
    for _ in range(cfg.train.steps):
        loss = model(ids[:, :-1], ids[:, 1:])[0]["loss"] / (BATCH * LENGTH)
        (loss * world.dp_size).backward()
        optimizer.step()
        sizes = retained(model, optimizer)
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        rows.append((sizes, sum(retained(model, optimizer)), f"{loss.item():.4f}"))
    return *rows[1][:2], [loss for _, _, loss in rows]


def on_this_rank() -> list[tuple]:
    cfg = config.from_dict(SETTINGS, "benchmark")
    with distributed(cfg) as world:
        return [measure(arm, cfg, world) for arm in ARMS]


def main(ranks: int) -> None:
    """Rows of the page's table, of the rank that retains most, and the losses."""
    local = LaunchConfig(1, 1, ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="1")
    by_rank = elastic_launch(local, on_this_rank)().values()
    after = 0
    for arm, rows in zip(ARMS, zip(*by_rank)):
        sizes, cleared, losses = max(rows, key=lambda row: sum(row[0]))
        after = after or sum(sizes)
        mib = " | ".join(f"{size / 2**20:.2f}" for size in (*sizes, sum(sizes), cleared))
        print(f"| {ranks} | {arm} | {mib} | {sum(sizes) - after:,} | {', '.join(losses)} |")


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["2"]:
        main(int(argument))
