"""Counts memory, work and communication of the operators on fake tensors as the real program runs.

Counted sees every operator below autograd and FSDP2, with its inputs and outputs. simulate.py runs
a step under it and tells it where each phase begins; plan.py and devices.py turn the phases into
GiB and seconds. Sizes are bytes of this rank, work is FLOP (two for each multiplication and
addition) or bytes moved. Formulas stand where they are used.

Shapes: B sequences, H heads, S positions of a sequence (of queries or of keys), D width of a head.
"""

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from parallel.activation_checkpoint import GROUPED_MM, LINEAR_MATMULS

# torch's CUDA allocator keeps a pool of memory for each stream, and gives none of it to another: a
# run reserves what each pool held at its own peak. FSDP2's streams, by attribute of its
# FSDPCommContext:
STREAMS = {
    "all_gather_copy_in_stream": "all-gather",
    "all_gather_stream": "all-gather",
    "reduce_scatter_stream": "reduce-scatter",
    "all_reduce_stream": "all-reduce",
}
COMPUTATION = "computation"  # the pool of all other memory
ROUNDED_TO = 512  # bytes, by the allocator

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional
# by name: extras/lora/nf4.py, which defines it, may not be loaded
NF4 = "frozen.nf4_product.default"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MATMULS = LINEAR_MATMULS | {
    aten._scaled_mm.default,
    aten.mm.out,
    aten.mm.dtype,
    aten.addmm_.default,
    aten.addmm.dtype_out,
}
# Other matmuls, with a formula of torch's. Compiled blocks save their results too: they are
# expensive to recompute.
FORMULAS = {aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
# with the arguments query, key and value
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._efficient_attention_forward.default,
}
BACKWARD_OF_ATTENTION = {
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}
COLLECTIVES = {
    c10d._allgather_base_.default: "all_gather",
    functional.all_gather_into_tensor.default: "all_gather",
    c10d._reduce_scatter_base_.default: "reduce_scatter",
    functional.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.allreduce_.default: "all_reduce",
    functional.all_reduce.default: "all_reduce",
    c10d.alltoall_base_.default: "all_to_all",
}
# Namespaces whose operators are counted, by a formula or by the bytes that they move.
KNOWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "frozen", "profiler"}
# Operators of aten that compute more than they move. Only some of them have a formula.
COMPUTES = re.compile(
    r"mm(_|$)|mv_?$|dot$|conv(?!ert)|attention|linalg(?!_vector_norm)|fft|cdist|rnn|lstm|gru"
)
MOVES_NOTHING = {aten.empty.memory_format, aten._unsafe_view.default}
# bytes that Inductor's kernels move, relative to a block's eager operators in its dtype
FUSED = 0.45
# bytes that eager nf4.dequantize() moves for each weight, to 16 bits
NF4_UNFUSED = 24
# memory of eager nf4.dequantize(), weights and intermediates, relative to the weights
NF4_INTERMEDIATES = 5


@dataclass
class Phase:
    """A part of the step: a unit's forward or backward, or the update."""

    # such as "forward block 3"
    name: str
    # bytes by kind, when their sum is highest
    peak: Counter = field(default_factory=Counter)
    # bytes by kind, when the phase ends
    end: Counter = field(default_factory=Counter)
    # bytes of each pool, when it holds most, and when the phase ends
    peak_of_pools: Counter = field(default_factory=Counter)
    end_of_pools: Counter = field(default_factory=Counter)
    # FLOP of "matmuls", "float8" and "attention"; of these the "model", without recomputation; and
    # bytes "moved"
    work: Counter = field(default_factory=Counter)
    # occurrences in a step, for several micro-batches
    times: int = 1
    # by (mesh dimension, collective, "number" or "bytes")
    sent: Counter = field(default_factory=Counter)
    # FSDP2's all-gathers that it waits for, each by how many phases before they were issued
    gathered_before: set[int] = field(default_factory=set)
    # whether FSDP2 waits for all reductions when it ends
    ends_reduced: bool = False
    # calls of operators whose FLOP are in no formula, by name
    uncounted: Counter = field(default_factory=Counter)


class ModuleState(NamedTuple):
    """What a module holds between steps: parameters, gradients, optimizer state."""

    size: Counter  # bytes of the tensors by kind, and of float8 "scales"
    on_device: Counter  # by how much live memory grew when they were counted, as allocated
    in_pools: Counter  # bytes that they take of each pool


class Storage(NamedTuple):
    """Memory that is allocated on the device."""

    kind: str
    size: int  # bytes, rounded up as the allocator does
    pool: str


@functools.cache
def wraps_tensors(kind: type) -> bool:
    """Whether operators on tensors of this class call others on the tensors inside.

    A DTensor does, and so does what FSDP2 all-gathers by methods of the class
    (extras/float8/all_gather.py).
    """
    if hasattr(kind, "__tensor_flatten__"):
        return True
    return hasattr(kind, "fsdp_pre_all_gather") and not issubclass(kind, FakeTensor)


def local_shard(t: Any) -> Any:
    """A DTensor's tensor on this rank; anything else as it is."""
    return t._local_tensor if isinstance(t, DTensor) else t


def fake_tensors(tree: Any) -> list[FakeTensor]:
    return [t for t in tree_iter(tree) if isinstance(t, FakeTensor)]


def is_known(operator: Any) -> bool:
    """Whether the operator is one of torch's or ours: not a fork's, not of higher order."""
    return isinstance(operator, OpOverload) and operator.namespace in KNOWN


def computes_much(operator: Any) -> bool:
    """Whether an operator without a formula may compute more than it moves, judged by its name."""
    if not is_known(operator):
        return True
    return operator.namespace == "aten" and bool(COMPUTES.search(operator.overloadpacket.__name__))


def moves_bytes(operator: OpOverload) -> bool:
    """Whether a known operator reads and writes memory: no view, allocation or collective."""
    if operator.is_view or operator in MOVES_NOTHING:
        return False
    return operator.namespace in ("aten", "fsdp")


def is_attention(operator: Any) -> bool:
    return operator in ATTENTION or operator in BACKWARD_OF_ATTENTION


def flop_by_formula(operator: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """FLOP by the shapes, with torch's formula; 0 if there is none."""
    if not isinstance(operator, OpOverload):
        return 0
    if operator == GROUPED_MM:
        # (tokens, in) by (groups, in, out): each token in one group, whatever the groups' sizes
        tokens, weights = args[:2]
        return 2 * tokens.numel() * weights.shape[-1]
    formula = flop_registry.get(operator.overloadpacket)
    if formula is None:
        return 0
    return formula(*args, **kwargs, out_val=result)


class Counted(TorchDispatchMode):
    """Sees every operator on the fake tensors of one mode, and counts live memory by storage."""

    supports_higher_order_operators = True

    def __init__(
        self, fake: FakeTensorMode, dimensions: dict[str, str], on_host: set[str], granularity: int
    ):
        """dimensions: mesh dimension by process group name. on_host: kinds in host memory, which
        are not counted. granularity: bytes that the allocator rounds up to."""
        super().__init__()
        self.fake = fake
        self.dimensions = dimensions
        self.on_host = on_host
        self.granularity = granularity

        self.phases = [Phase("start")]
        # occurrences in a step of the phases that begin now
        self.times = 1
        # bytes on the device by kind
        self.live: Counter = Counter()
        # each live storage, by its address
        self.storages: dict[int, Storage] = {}
        # bytes of each pool
        self.live_in_pools: Counter = Counter()
        # the pool of what is allocated now
        self.pool_now: Callable[[], str] = lambda: COMPUTATION
        # inside run_uncounted()
        self.paused = False
        # the index of the phase that issued an all-gather of FSDP2, by its output's storage
        self.gathering: dict[int, int] = {}

        # inside a compiled block
        self.fused = False
        # compiled blocks without activation checkpointing: they save the inputs of their matmuls
        self.saving_blocks: set[nn.Module] = set()
        # these inputs, by the phase that drops them
        self.saved_inputs: dict[str, list[Tensor]] = {}
        # the list of them for the block whose forward runs; None outside such a forward
        self.saving: list[Tensor] | None = None
        # in the backward of such a block, while gpu_paths.save_matmuls() lets it run forward again
        self.recomputing = False

        # share of the scores that the mask of the FlexAttention that runs keeps; None for SDPA
        self.mask_share: float | None = None
        # whether the share of some mask depends on data
        self.mask_depends_on_data = False
        # share of the scores that attention computed, by its output's storage, for its backward
        self.shares: dict[int, float] = {}

    def begin(self, name: str) -> None:
        """Begins a phase. Working memory that the previous one leaves becomes activations."""
        for key, storage in list(self.storages.items()):
            if storage.kind == "working memory":
                self.set_storage(key, "activations", storage.size)
        self.saved_inputs.pop(self.phases[-1].name, None)
        self.phases[-1].end = Counter(self.live)
        self.phases[-1].end_of_pools = Counter(self.live_in_pools)
        self.phases.append(
            Phase(
                name,
                Counter(self.live),
                peak_of_pools=Counter(self.live_in_pools),
                times=self.times,
            )
        )

    def set_storage(self, key: int, kind: str, size: int) -> None:
        """Sets kind and bytes of a storage, and the phase's peak if memory has grown beyond it."""
        # rounded up
        size = 0 if kind in self.on_host else -(-size // self.granularity) * self.granularity
        former = self.storages.get(key, Storage(kind, 0, COMPUTATION))
        pool = former.pool
        if size != former.size:
            pool = self.pool_now()
            self.live_in_pools[former.pool] -= former.size
            self.live_in_pools[pool] += size
            peak = self.phases[-1].peak_of_pools
            peak[pool] = max(peak[pool], self.live_in_pools[pool])
        self.storages[key] = Storage(kind, size, pool)
        self.live[former.kind] -= former.size
        self.live[kind] += size
        if size > former.size and self.live.total() > self.phases[-1].peak.total():
            self.phases[-1].peak = Counter(self.live)

    def drop_storage(self, key: int) -> None:
        storage = self.storages.pop(key)
        self.live[storage.kind] -= storage.size
        self.live_in_pools[storage.pool] -= storage.size
        self.shares.pop(key, None)

    def mark(self, tensors: Iterable[Any], kind: str) -> None:
        """Sets the kind of the tensors' storages, and counts those that were not counted yet."""
        for t in map(local_shard, tensors):
            if isinstance(t, FakeTensor) and t.fake_mode is self.fake:
                storage = t.untyped_storage()
                if storage._cdata not in self.storages:
                    weakref.finalize(storage, self.drop_storage, storage._cdata)
                self.set_storage(storage._cdata, kind, storage.nbytes())

    def mark_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleState:
        """Marks a module's parameters, gradients and optimizer state, and returns their bytes.

        Call it for the blocks before the model. Gradients need not exist yet: that of a trained
        parameter counts with the parameter's size.
        """
        before = Counter(self.live)
        params = [*module.parameters()]
        trained = [param for param in params if param.requires_grad]
        optimizer_state = []
        for param in params:
            state = tree_iter(optimizer.state.get(param, {}))
            optimizer_state += [t for t in state if isinstance(t, Tensor)]
        self.mark(params, "parameters")
        self.mark(optimizer_state, "optimizer state")
        self.mark([param.grad for param in params], "gradients")

        size: Counter = Counter()
        size["parameters"] = sum(local_shard(t).nbytes for t in params)
        size["optimizer state"] = sum(local_shard(t).nbytes for t in optimizer_state)
        size["gradients"] = sum(local_shard(t).nbytes for t in trained)
        # a scale in float32 for each float8 weight
        size["scales"] = 4 * sum(hasattr(local_shard(t), "fsdp_pre_all_gather") for t in params)
        in_pools: Counter = Counter()
        gradients = [param.grad for param in params]
        for t in map(local_shard, [*params, *optimizer_state, *gradients]):
            if isinstance(t, FakeTensor):
                storage = self.storages[t.untyped_storage()._cdata]
                in_pools[storage.pool] += storage.size
        # the difference of Counters drops what was working memory before
        return ModuleState(size, self.live - before, in_pools)

    def resized(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Counts storage.resize_(), which bypasses the dispatcher. FSDP2 frees parameters by it."""
        if storage._cdata in self.storages:
            self.set_storage(storage._cdata, "gathered units", storage.nbytes())
        return storage

    def run_uncounted(self, function: Callable, *args: Any) -> Any:
        """function(*args), uncounted but for its collectives."""
        with mock.patch.object(self, "paused", True):
            return function(*args)

    def __torch_dispatch__(self, operator, types, args: tuple = (), kwargs=None):
        if operator is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # a shortcut for half of all calls
            return args[0].fake_device
        if any(map(wraps_tensors, types)):
            # the class goes first: operators on the tensors inside come back here
            return NotImplemented
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        outputs = fake_tensors(result)
        is_counted = not self.paused or operator in COLLECTIVES
        if not is_counted or any(t.fake_mode is not self.fake for t in outputs):
            return result
        inputs = fake_tensors((args, kwargs))
        new = [t for t in outputs if t.untyped_storage()._cdata not in self.storages]
        if operator is torch.ops.fsdp.split_with_sizes_copy.default:
            # FSDP2 copies parameters out of what it has all-gathered
            issued = self.gathering[args[0].untyped_storage()._cdata]
            self.phases[-1].gathered_before.add(len(self.phases) - 1 - issued)
        if operator in COLLECTIVES:
            self.count_collective(operator, args, [*inputs, *outputs])
        elif operator in MATMULS or str(operator) == NF4:
            self.count_matmul(operator, args, outputs[0])
        elif is_attention(operator):
            self.count_attention(operator, args, kwargs, outputs)
        elif flop := flop_by_formula(operator, args, kwargs, result):
            self.count_formula(operator, flop, inputs)
        else:
            self.count_bytes(operator, inputs, outputs)
            if self.fused and is_known(operator) and operator != aten.empty.memory_format:
                # in a compiled block float32 stays in registers
                new = [t for t in new if t.dtype != torch.float32]
        self.mark(new, "working memory")
        return result

    def add_flop(self, kind: str, flop: int) -> None:
        """Adds FLOP to the phase, and to the model's where the model itself does them.

        The model's are those of forward and backward, with attention's five matmuls in backward as
        four, as one recomputes the scores. A forward that runs again during backward does not
        count. It has gradients enabled, unlike backward itself.
        """
        work = self.phases[-1].work
        work[kind] += flop
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and torch.is_grad_enabled():
            return
        if in_backward and kind == "attention":
            flop = flop * 4 // 5
        work["model"] += flop

    def count_matmul(self, operator: Any, args: tuple, out: Tensor) -> None:
        """Counts x @ weights, (m, k) by (k, n): 2 * k * m * n FLOP."""
        # addmm(total, x, weights)
        x = args[1] if "addmm" in operator.__name__ else args[0]
        kind = "float8" if x.dtype in FLOAT8 else "matmuls"
        self.add_flop(kind, 2 * x.shape[-1] * out.numel())
        if str(operator) == NF4:
            _, codes, scales = args[:3]
            self.count_dequantization(x, codes, scales)
        elif self.saving is not None and x.dtype.itemsize > 1:
            # The input in float32, too: it is saved, so it leaves the registers. Of one in float8
            # the compiler saves what was rounded to it, and rounds again.
            self.mark([x], "working memory")
            self.saving.append(x)

    def count_dequantization(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Counts the weights in the dtype of x that exist during a matmul with NF4 weights.

        codes: two weights in each byte.
        """
        count = 2 * codes.numel()
        work = self.phases[-1].work
        if self.fused:
            weights = torch.empty(count, dtype=x.dtype, device=x.device)
            self.mark([weights], "working memory")
            work["moved"] += codes.nbytes + scales.nbytes + weights.nbytes
        else:
            temporaries = torch.empty(count * NF4_INTERMEDIATES, dtype=x.dtype, device=x.device)
            self.mark([temporaries], "working memory")
            work["moved"] += NF4_UNFUSED * count

    def count_attention(
        self, operator: OpOverload, args: tuple, kwargs: dict, outputs: list[FakeTensor]
    ) -> None:
        """Counts attention: for each matmul 2 * B * H * S_queries * S_keys * D FLOP * share.

        share: of the scores that are computed. SDPA skips half of them if it is causal. It computes
        those that a mask tensor hides.
        """
        names = (argument.name for argument in operator._schema.arguments)
        arguments = dict(zip(names, args)) | kwargs
        # (B, H, S, D) each
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        if operator in ATTENTION:
            if self.saving is not None and k.shape[2] > q.shape[2]:
                # all-gathered over cp: saved, so that backward does not gather them again
                self.saving += [k, v]
            share = self.mask_share
            if share is None:
                share = 0.5 if arguments.get("is_causal") else 1.0
            self.shares[outputs[0].untyped_storage()._cdata] = share
            # queries by keys, scores by values
            matmuls = 2
        else:
            share = self.shares.get(arguments["out"].untyped_storage()._cdata, 1.0)
            # dV, dP, dQ, dK, and the scores, recomputed
            matmuls = 5
        self.add_flop("attention", int(2 * matmuls * share * q.numel() * k.shape[2]))

    def count_formula(self, operator: OpOverload, flop: int, inputs: list[FakeTensor]) -> None:
        """Counts another operator that computes much, such as bmm."""
        kind = "attention" if "attention" in operator.__name__ else "matmuls"
        self.add_flop(kind, flop)
        if self.saving is None:
            return
        # parameters and gathered units stay in any case
        for t in inputs:
            storage = self.storages.get(t.untyped_storage()._cdata)
            if storage and storage.kind in ("working memory", "activations"):
                self.mark([t], "working memory")
                self.saving.append(t)

    def count_bytes(
        self, operator: Any, inputs: list[FakeTensor], outputs: list[FakeTensor]
    ) -> None:
        """Counts the bytes that an operator without a formula moves, and names it if it
        computes."""
        if computes_much(operator):
            self.phases[-1].uncounted[str(operator).removesuffix(".default")] += 1
        if is_known(operator) and not moves_bytes(operator):
            return
        tensors = [*inputs, *outputs]
        if self.fused:
            # in a compiled block float32 stays in registers
            moved = FUSED * sum(t.nbytes for t in tensors if t.dtype != torch.float32)
        else:
            moved = sum(t.nbytes for t in tensors)
        # a fraction, where typeshed's Counter holds an int
        # pyrefly: ignore[unsupported-operation]
        self.phases[-1].work["moved"] += moved

    def count_collective(self, operator: Any, args: tuple, buffers: list[Tensor]) -> None:
        """Counts a collective over a mesh dimension, by its larger buffer."""
        if self.recomputing:
            return
        kind = COLLECTIVES[operator]
        dimension = self.dimension_of(operator, args)
        sent = self.phases[-1].sent
        sent[dimension, kind, "number"] += 1
        sent[dimension, kind, "bytes"] += max(t.nbytes for t in buffers)
        if operator is c10d._allgather_base_.default:
            self.gathering[args[0].untyped_storage()._cdata] = len(self.phases) - 1
        if dimension in ("dp_shard", "dp_replicate"):
            self.mark(buffers, "gathered units" if kind == "all_gather" else "reductions")

    def dimension_of(self, operator: Any, args: tuple) -> str:
        """The mesh dimension of a collective.

        "replica" is all ranks of a replica: extras/optimizers/muon.py sends matrices among them.
        """
        group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        # a functional collective has the group's name as its last argument
        name = args[-1]
        if group is not None:
            name = dist.ProcessGroup.unbox(group).group_name
        if name not in self.dimensions:
            return "replica" if COLLECTIVES[operator] == "all_to_all" else "dp_shard"
        dimension = self.dimensions[name]
        is_of_fsdp = operator.namespace == "c10d"
        if is_of_fsdp and dimension == "cp":
            # with dp_shard = 1, FSDP2 shards over cp alone
            return "dp_shard"
        return dimension
