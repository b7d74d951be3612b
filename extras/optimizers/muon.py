"""Muon for the blocks' matrices, the same on any mesh; AdamW for the rest: optim.name = "muon" (optional).

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by a nearly orthogonal matrix, for which
it needs the full one, where each rank has a piece. The momentum is sharded as its parameter. In a step, all matrices of
one shape go to their owners by one all-to-all; these orthogonalize them in batches, and another returns the pieces.
Both run within a replica, which owns its share of the matrices; a third exchanges the shares.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

import config

# Of https://github.com/KellerJordan/Muon: the steepest quintic at 0 whose iterates stay near 1. Singular values end up
# within about 0.7 ... 1.2, not at 1, which trains as well.
A, B, C, ITERATIONS, EPS = 3.4445, -4.7750, 2.0315, 5, 1e-7
RMS = 0.2  # of an update's elements, about AdamW's, so that its learning rate fits: https://arxiv.org/abs/2502.16982
BATCH = 2**27  # elements that are orthogonalized at a time


class Muon(torch.optim.Optimizer):
    """Weight decay is AdamW's. It leaves skipping a step to its caller: the host waits for the gradient norm."""

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        o: config.Optim,
        seed: int,
        compile: bool,
        adamw: Callable[[dict[nn.Parameter, str]], torch.optim.Optimizer],
    ):
        """names: of the trained parameters. adamw: makes the optimizer of those that are not matrices of a block."""
        matrices = {
            p: name for p, name in names.items() if p.ndim == 2 and name.startswith("blocks.")
        }
        others = {p: name for p, name in names.items() if p not in matrices}
        self.adamw = adamw(others) if others else None
        self.lr_ratio = (o.muon_lr or o.lr) / o.lr  # the schedule sets the rate of all groups
        own = {
            "params": [*matrices],
            "lr": o.lr,
            "momentum": o.muon_momentum,
            "weight_decay": o.weight_decay,
        }
        super().__init__(
            [own] * bool(matrices) + (self.adamw.param_groups if self.adamw else []), {}
        )
        # the same dictionaries, as are the groups
        self.state.update(self.adamw.state if self.adamw else {})
        for p in matrices:
            self.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "momentum": torch.zeros_like(p, dtype=getattr(torch, o.state_dtype)),
            }
        self.shapes = by_shape([*matrices])
        self.place: dict[nn.Parameter, Tensor] = {}
        if o.state_dtype == "bfloat16":
            from extras.optimizers.adamw_bfloat16 import shard_offset

            self.place = {p: shard_offset(p, f"{seed} {name}") for p, name in matrices.items()}
        self.update = (
            torch.compile(update_bfloat16, fullgraph=True, dynamic=True)
            if compile
            else update_bfloat16
        )

    @torch.no_grad()
    def step(self) -> None:  # pyrefly: ignore[bad-override]  # without a closure: nothing here passes one
        if self.adamw:
            self.adamw.step()
        for shape in self.shapes:
            group = self.param_groups[0]
            lr = group["lr"] * self.lr_ratio
            decay, scale = 1 - lr * group["weight_decay"], lr * RMS * math.sqrt(max(shape.size))
            for p, direction in zip(
                shape.matrices, shape.orthogonalized(self._directions(shape, group["momentum"]))
            ):
                if p.grad is not None:
                    local(p).mul_(decay).add_(direction, alpha=-scale)

    def _directions(self, shape: "Shape", beta: float) -> Tensor:
        """Updates the momenta of one shape's matrices. Returns Nesterov's directions of those that this replica owns:
        (n, rows, columns) of this rank's pieces."""
        p = local(shape.matrices[0])
        found = p.new_zeros((shape.shares[shape.replica], *p.shape), dtype=shape.dtype)
        for i, p in enumerate(shape.matrices, -shape.first):
            if p.grad is None:
                continue
            grad, state = local(p.grad), self.state[p]
            state["step"] += 1
            if not grad.numel():  # with fewer rows than ranks, some shards are empty
                continue
            momentum = local(state["momentum"])
            if self.place:
                momentum = self.update(momentum, grad, state["step"], self.place[p], beta)
            else:
                momentum.lerp_(grad, 1 - beta)
            if 0 <= i < len(found):
                found[i] = grad.lerp(momentum, beta)
        return found


def update_bfloat16(
    momentum: Tensor, grad: Tensor, step: Tensor, place: Tensor, beta: float
) -> Tensor:
    """Updates a momentum (R, C) in bfloat16, rounded stochastically; returns it as it was before rounding."""
    from extras.optimizers.adamw_bfloat16 import random_bits, stochastic_round

    exact = momentum.float().lerp(grad, 1 - beta)
    momentum.copy_(stochastic_round(exact, random_bits(momentum, step, place) & 0xFFFF))
    return exact


class Shape:
    """Matrices of one shape, sharded alike, in the order of their owners; and which pieces of them go where."""

    def __init__(
        self, owned: list[tuple[int, nn.Parameter]], sizes: Sequence[int], replicas: int, group: Any
    ):
        """owned: (owner, matrix), sorted by owner. sizes: of the mesh, its ranks in order. group: of this replica."""
        self.matrices, self.group = [p for _, p in owned], group
        p, ranks = self.matrices[0], math.prod(sizes) // replicas
        self.size, self.dtype = p.shape, torch.bfloat16 if local(p).is_cuda else torch.float32
        self.replica, self.rank = divmod(dist.get_rank() if ranks * replicas > 1 else 0, ranks)
        placements = p.placements if isinstance(p, DTensor) else (Replicate(),)
        coordinates = [*itertools.product(*map(range, sizes))][self.replica * ranks :][:ranks]
        self.pieces = [(slice(None), *piece_of(p.shape, sizes, placements, c)) for c in coordinates]
        owners = [owner for owner, _ in owned]
        # of this replica
        self.owned = [owners.count(self.replica * ranks + r) for r in range(ranks)]
        self.shares = [sum(owner // ranks == r for owner in owners) for r in range(replicas)]
        self.first = sum(self.shares[: self.replica])  # this replica's first matrix
        self.between = (
            p.device_mesh.get_group(0) if isinstance(p, DTensor) and replicas > 1 else None
        )

    def orthogonalized(self, x: Tensor) -> Tensor:
        """This rank's pieces (n, rows, columns) of the replica's share of matrices -> those of all, orthogonalized."""
        mine, own = self.owned[self.rank], x.shape[1:]
        numel = [
            mine * math.prod(side.stop - side.start for side in piece) for _, *piece in self.pieces
        ]
        theirs = [n * own.numel() for n in self.owned]  # elements here of each owner's matrices
        x = exchange(x.flatten(), theirs, numel, self.group)
        full = x.new_empty((mine, *self.size))
        for piece, part in zip(self.pieces, x.split(numel)):
            # what tp replicates comes from each of its ranks
            full[piece] = part.view(full[piece].shape)
        for batch in full.split(max(1, BATCH // self.size.numel())) if mine else ():
            batch.copy_(newton_schulz(batch))
        x = torch.cat([full[piece].flatten() for piece in self.pieces])
        x = exchange(x, numel, theirs, self.group)
        if (replicas := len(self.shares)) > 1:
            x = exchange(
                x.repeat(replicas),
                [len(x)] * replicas,
                [n * own.numel() for n in self.shares],
                self.between,
            )
        return x.view(len(self.matrices), *own)


def newton_schulz(x: Tensor) -> Tensor:
    """(N, rows, columns) -> nearly U V^T of each matrix's singular value decomposition U S V^T."""
    if x.shape[1] > x.shape[2]:
        return newton_schulz(x.mT).mT
    x = (
        x
        / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=EPS)
    ).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def flop(shape: Sequence[int]) -> int:
    """Of a matrix's newton_schulz()."""
    short, long = sorted(shape)
    return ITERATIONS * (4 * short**2 * long + 2 * short**3)


def owners(work: Sequence[int], ranks: int, replicas: int) -> list[int]:
    """The rank that owns each matrix, given its work: the largest first, each to the rank with the least so far. Rank 0
    has most, and replicas have equal shares, since ranks are dealt out to them by their work."""
    found, loads = [0] * len(work), [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        load, found[i] = loads[0]
        heapq.heapreplace(loads, (load + work[i], found[i]))
    order = {
        rank: n
        for n, (_, rank) in enumerate(sorted(loads, key=lambda entry: (-entry[0], entry[1])))
    }
    return [
        order[rank] % replicas * (ranks // replicas) + order[rank] // replicas for rank in found
    ]


def by_shape(matrices: list[nn.Parameter]) -> list[Shape]:
    # one for all, of all ranks
    (mesh,) = {getattr(p, "device_mesh", None) for p in matrices} or {None}
    ranks, replicas, group = mesh.size() if mesh else 1, 1, None  # None: all ranks
    if mesh and mesh.mesh_dim_names[0] == "dp_replicate":
        replicas = mesh.size(0)  # without tp, FSDP2's group of shards is one
        group = mesh.get_group(1) if mesh.ndim == 2 else dist.new_subgroups(ranks // replicas)[0]
    found: dict[tuple, list[tuple[int, nn.Parameter]]] = {}
    who = owners([flop(p.shape) for p in matrices], ranks, replicas)
    for owner, p in sorted(zip(who, matrices), key=lambda pair: pair[0]):
        found.setdefault((p.shape, getattr(p, "placements", None)), []).append((owner, p))
    return [Shape(owned, mesh.shape if mesh else (1,), replicas, group) for owned in found.values()]


def piece_of(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[slice, ...]:
    """The rows and columns that the rank at a coordinate of the mesh has. The last dimension, tp, shards first."""
    begin, end = [0, 0], [*shape]
    for size, placement, at in reversed([*zip(sizes, placements, coordinate)]):
        if not placement.is_replicate():
            dim = placement.dim  # pyrefly: ignore[missing-attribute]  # shards have it
            start, step = begin[dim], math.ceil((end[dim] - begin[dim]) / size)
            begin[dim], end[dim] = (min(start + n * step, end[dim]) for n in (at, at + 1))
    return tuple(map(slice, begin, end))


def exchange(
    x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Sends consecutive parts of x, of these lengths, to the ranks of a group; returns what they send, in order."""
    if len(send) == 1:
        return x
    found = x.new_empty(sum(receive))
    dist.all_to_all_single(found, x, receive, send, group)
    return found


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
