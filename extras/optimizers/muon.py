"""Implements optim.name = "muon": Muon for the blocks' matrices, and AdamW for all else.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by a nearly
orthogonal matrix. It needs the full momentum, which is sharded like the parameter. In each step,
one all-to-all sends all matrices of one shape to their owners. The owners orthogonalize them in
batches, and a second all-to-all returns the shards. Both run within a replica, which owns its share
of the matrices. A third all-to-all exchanges the shares between replicas. The result is the same on
any mesh.

Shapes: R rows and C columns of a matrix; r rows and c columns of this rank's shard of it.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

import config
from extras.optimizers import adamw_bfloat16
from optim import build_adamw, local_tensor

# Newton-Schulz iteration of https://github.com/KellerJordan/Muon: x -> A x + B x^3 + C x^5 is the
# steepest quintic at 0 whose iterates stay near 1. Singular values end up within about 0.7 ... 1.2
# instead of at 1, which trains as well.
A = 3.4445
B = -4.7750
C = 2.0315
ITERATIONS = 5
EPS = 1e-7
# RMS of an update's elements, about the same as AdamW's, so that AdamW's learning rate fits
# (https://arxiv.org/abs/2502.16982)
RMS = 0.2
MOMENTUM = 0.95  # Nesterov's
BATCH = 2**27  # elements to orthogonalize at a time


class Muon(torch.optim.Optimizer):
    """Muon with AdamW's weight decay for linear layers, and AdamW for all other parameters.

    The caller must skip a step whose gradient norm is not finite, so the host waits for the norm.
    """

    def __init__(
        self,
        model: nn.Module,
        names: dict[nn.Parameter, str],
        o: config.Optim,
        seed: int,
        compile: bool,
    ):
        """names: trained parameter -> name."""
        matrices = {}
        others = {}
        for p, name in names.items():
            # a matrix of another module, such as a fork's table, is not a linear map
            is_linear = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
            if p.ndim == 2 and is_linear and name.startswith("blocks."):
                matrices[p] = name
            else:
                others[p] = name
        self.adamw = build_adamw(others, o, seed, compile) if others else None

        groups = []
        if matrices:
            groups.append(
                {
                    "params": [*matrices],
                    "lr": o.muon_lr or o.lr,
                    "lr_ratio": (o.muon_lr or o.lr) / o.lr,
                    "momentum": MOMENTUM,
                    "weight_decay": o.weight_decay,
                }
            )
        if self.adamw:
            groups += self.adamw.param_groups
        super().__init__(groups, {})
        if self.adamw:
            self.state.update(self.adamw.state)  # shares the dictionaries, like the groups
        for p in matrices:
            self.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "momentum": torch.zeros_like(p, dtype=getattr(torch, o.state_dtype)),
            }

        self.matrix_sets = by_shape([*matrices])
        self.numbers: dict[nn.Parameter, adamw_bfloat16.ElementNumbers] = {}  # for bfloat16 only
        if o.state_dtype == "bfloat16":
            for p, name in matrices.items():
                self.numbers[p] = adamw_bfloat16.number_elements(p, f"{seed} {name}")
        self.update = update_bfloat16
        if compile:
            self.update = torch.compile(update_bfloat16, fullgraph=True, dynamic=True)

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore[bad-override]  # without a closure: nothing here passes one
        if self.adamw:
            self.adamw.step()
        for matrix_set in self.matrix_sets:
            group = self.param_groups[0]  # contains all matrices
            lr = group["lr"]
            decay = 1 - lr * group["weight_decay"]
            scale = lr * RMS * math.sqrt(max(matrix_set.shape))
            directions = self._directions(matrix_set, group["momentum"])
            updates = matrix_set.orthogonalized(directions)
            for p, update in zip(matrix_set.matrices, updates):
                if p.grad is not None:
                    local_tensor(p).mul_(decay).add_(update, alpha=-scale)

    def _directions(self, matrix_set: "MatrixSet", beta: float) -> Tensor:
        """Updates the momenta of a set's matrices.

        Returns this rank's shards (n, r, c) of the Nesterov directions of the n matrices that this
        replica owns.
        """
        owned = matrix_set.owned_by_replica[matrix_set.replica]
        shard = local_tensor(matrix_set.matrices[0])
        directions = shard.new_zeros((owned, *shard.shape), dtype=matrix_set.dtype)
        for i, p in enumerate(matrix_set.matrices):
            if p.grad is None:
                continue
            grad = local_tensor(p.grad)
            state = self.state[p]
            state["step"] += 1
            if not grad.numel():  # with fewer rows than ranks, some shards are empty
                continue
            momentum = local_tensor(state["momentum"])
            if self.numbers:
                momentum = self.update(momentum, grad, state["step"], self.numbers[p], beta)
            else:
                momentum.lerp_(grad, 1 - beta)
            i_owned = i - matrix_set.first_owned
            if 0 <= i_owned < owned:
                directions[i_owned] = grad.lerp(momentum, beta)
        return directions


def update_bfloat16(
    momentum: Tensor,
    grad: Tensor,
    step: Tensor,
    numbers: adamw_bfloat16.ElementNumbers,
    beta: float,
) -> Tensor:
    """Updates a bfloat16 momentum (r, c) with stochastic rounding. Returns it before rounding."""
    exact = momentum.float().lerp(grad, 1 - beta)
    bits = adamw_bfloat16.random_bits(step, numbers)
    momentum.copy_(adamw_bfloat16.stochastic_round(exact, bits & 0xFFFF))
    return exact


class MatrixSet:
    """Matrices with the same shape and sharding, in the order of their owners.

    Ranks are numbered replica by replica.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        owners: list[int],
        mesh_shape: Sequence[int],
        replicas: int,
        shard_group: dist.ProcessGroup | None,
    ):
        """owners: the rank that owns each matrix, ascending. shard_group: this replica's ranks."""
        first = matrices[0]
        ranks = math.prod(mesh_shape) // replicas  # in each replica
        rank = dist.get_rank() if ranks * replicas > 1 else 0
        self.matrices = matrices
        self.shape = first.shape
        self.dtype = torch.bfloat16 if local_tensor(first).is_cuda else torch.float32
        self.replica = rank // ranks
        self.rank = rank % ranks  # in this replica
        self.shard_group = shard_group
        self.replica_group = None
        placements = (Replicate(),)
        if isinstance(first, DTensor):
            placements = first.placements
            if replicas > 1:
                self.replica_group = first.device_mesh.get_group(0)

        # for each rank of this replica, the index of its shards in a batch of full matrices
        coordinates = list(itertools.product(*[range(size) for size in mesh_shape]))
        self.shards = []
        for coordinate in coordinates[self.replica * ranks :][:ranks]:
            rows, columns = shard_of(self.shape, mesh_shape, placements, coordinate)
            self.shards.append((slice(None), rows, columns))
        # the number of matrices of each owner; `matrices` has the same order
        self.owned_by_rank = [owners.count(self.replica * ranks + i) for i in range(ranks)]
        replica_of = [owner // ranks for owner in owners]
        self.owned_by_replica = [replica_of.count(i) for i in range(replicas)]
        self.first_owned = sum(self.owned_by_replica[: self.replica])

    def orthogonalized(self, x: Tensor) -> Tensor:
        """Orthogonalizes the matrices that this replica owns, and exchanges them between replicas.

        x has this rank's shards (n, r, c) of these matrices. Returns this rank's shards (all, r, c)
        of all matrices.
        """
        shard_shape = x.shape[1:]
        owned = self.owned_by_rank[self.rank]
        # sent: this rank's elements of each rank's matrices; received: each rank's elements of this
        # rank's matrices
        sent = [n * shard_shape.numel() for n in self.owned_by_rank]
        received = []
        for _, rows, columns in self.shards:
            received.append(owned * (rows.stop - rows.start) * (columns.stop - columns.start))

        x = exchange(x.flatten(), sent, received, self.shard_group)
        full = x.new_empty((owned, *self.shape))  # (owned, R, C)
        for shard, values in zip(self.shards, x.split(received)):
            # matrices that tp replicates arrive from each tp rank
            full[shard] = values.view(full[shard].shape)
        if owned:
            for batch in full.split(max(1, BATCH // self.shape.numel())):
                batch.copy_(newton_schulz(batch))
        x = torch.cat([full[shard].flatten() for shard in self.shards])
        x = exchange(x, received, sent, self.shard_group)

        replicas = len(self.owned_by_replica)
        if replicas > 1:
            sent = [len(x)] * replicas  # the same to each
            received = [n * shard_shape.numel() for n in self.owned_by_replica]
            x = exchange(x.repeat(replicas), sent, received, self.replica_group)
        return x.view(len(self.matrices), *shard_shape)


def newton_schulz(x: Tensor) -> Tensor:
    """Approximates U V^T of each matrix (N, R, C) with the singular value decomposition U S V^T."""
    if x.shape[1] > x.shape[2]:
        return newton_schulz(x.mT).mT
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp(min=EPS)).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (N, R, R)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x


def flop(shape: Sequence[int]) -> int:
    """The FLOP of newton_schulz() for one matrix."""
    short, long = sorted(shape)
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


def owners(work: Sequence[int], ranks: int, replicas: int) -> list[int]:
    """The rank that owns each matrix, given the work of each. Assigns the largest matrix first, to
    the least loaded rank.

    Then numbers the ranks by descending load, and deals them out to the replicas in turn. So rank 0
    has the highest load, and the replicas have about equal loads.
    """
    loads = [(0, i) for i in range(ranks)]
    assigned = [0] * len(work)
    for matrix in sorted(range(len(work)), key=lambda i: -work[i]):
        load, i = loads[0]
        assigned[matrix] = i
        heapq.heapreplace(loads, (load + work[matrix], i))

    rank_of = {}
    loads.sort(key=lambda entry: (-entry[0], entry[1]))
    for n, (_, i) in enumerate(loads):
        rank_of[i] = n % replicas * (ranks // replicas) + n // replicas
    return [rank_of[i] for i in assigned]


def by_shape(matrices: list[nn.Parameter]) -> list[MatrixSet]:
    """Groups matrices with the same shape and sharding into sets."""
    if not matrices:
        return []
    # all matrices are on one mesh of all ranks, or in a single process
    mesh = matrices[0].device_mesh if isinstance(matrices[0], DTensor) else None
    mesh_shape = mesh.shape if mesh else (1,)
    ranks = math.prod(mesh_shape)
    replicas = 1
    shard_group: Any = None  # all ranks
    if mesh and "dp_replicate" in (mesh.mesh_dim_names or ()):
        replicas = mesh.size(0)
        if mesh.ndim == 2:  # without tp, it is FSDP2's shard group
            shard_group = mesh.get_group(1)
        else:
            shard_group, _ = dist.new_subgroups(ranks // replicas)

    work = [flop(p.shape) for p in matrices]
    owner_of = dict(zip(matrices, owners(work, ranks, replicas)))
    alike: dict[tuple, list[nn.Parameter]] = {}
    for p in sorted(matrices, key=lambda p: owner_of[p]):
        placements = p.placements if isinstance(p, DTensor) else None
        alike.setdefault((p.shape, placements), []).append(p)
    return [
        MatrixSet(same, [owner_of[p] for p in same], mesh_shape, replicas, shard_group)
        for same in alike.values()
    ]


def shard_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[slice, slice]:
    """The rows and columns of a matrix that the rank at a mesh coordinate stores."""
    begin = [0, 0]
    end = [*shape]
    # the last mesh dimension, tp, shards first
    for size, placement, i in reversed([*zip(mesh_shape, placements, coordinate)]):
        if placement.is_replicate():
            continue
        dim = placement.dim  # pyrefly: ignore[missing-attribute]  # shards have it
        chunk = math.ceil((end[dim] - begin[dim]) / size)
        stop = end[dim]
        end[dim] = min(begin[dim] + (i + 1) * chunk, stop)
        begin[dim] = min(begin[dim] + i * chunk, stop)
    return slice(begin[0], end[0]), slice(begin[1], end[1])


def exchange(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """All-to-all of flat slices. Sends the next sent[i] elements of x to rank i of the group.

    Returns the elements that this rank receives, in the order of the ranks.
    """
    if len(sent) == 1:
        return x
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent, group)
    return out
