"""Counts memory, work and communication of the real program's operators on fake tensors.

Counted sees every operator below autograd and FSDP2, with its inputs and outputs. simulate.py runs
a step under it and calls begin() at each phase. plan.py and devices.py turn the phases into GiB and
seconds. Sizes are bytes on this rank. Work is FLOP (two per multiplication and addition) or bytes
moved. Each formula is next to its use.

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

# torch's CUDA allocator has a memory pool for each stream, and never moves memory between pools. So
# a run reserves the sum of the pools' peaks. These are FSDP2's streams, as attributes of its
# FSDPCommContext.
STREAMS = {
    "all_gather_copy_in_stream": "all-gather",
    "all_gather_stream": "all-gather",
    "reduce_scatter_stream": "reduce-scatter",
    "all_reduce_stream": "all-reduce",
}
COMPUTATION = "computation"  # the pool of all other memory
ROUNDED_TO = 512  # the allocator's granularity in bytes

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional
# a name, because extras/lora/nf4.py, which defines the operator, may not be loaded
NF4 = "frozen.nf4_product.default"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MATMULS = LINEAR_MATMULS | {
    aten._scaled_mm.default,
    aten.mm.out,
    aten.mm.dtype,
    aten.addmm_.default,
    aten.addmm.dtype_out,
}
# Other matmuls, for which torch has a formula. Compiled blocks save their results too, which are
# expensive to recompute.
FORMULAS = {aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
# operators with the arguments query, key and value
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
# Operators in these namespaces are counted by a formula or by the bytes that they move.
KNOWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "frozen", "profiler"}
# aten operators that may compute more than they move; only some of them have a formula
COMPUTES = re.compile(
    r"mm(_|$)|mv_?$|dot$|conv(?!ert)|attention|linalg(?!_vector_norm)|fft|cdist|rnn|lstm|gru"
)
MOVES_NOTHING = {aten.empty.memory_format, aten._unsafe_view.default}
# bytes that Inductor's kernels move, relative to a block's eager operators in the block's dtype
FUSED = 0.45
# bytes that eager nf4.dequantize() to 16 bits moves for each weight
NF4_UNFUSED = 24
# memory of eager nf4.dequantize(), for weights and intermediates, relative to the weights
NF4_INTERMEDIATES = 5


@dataclass
class Phase:
    """A part of the step: a unit's forward or backward, or the update."""

    # such as "forward block 3"
    name: str
    # bytes by kind when their sum is highest
    peak: Counter = field(default_factory=Counter)
    # bytes by kind at the phase's end
    end: Counter = field(default_factory=Counter)
    # bytes of each pool at the pool's peak, and at the phase's end
    peak_of_pools: Counter = field(default_factory=Counter)
    end_of_pools: Counter = field(default_factory=Counter)
    # FLOP of "matmuls", "float8" and "attention"; their sum without recomputation, "model"; bytes
    # "moved"
    work: Counter = field(default_factory=Counter)
    # occurrences in a step, which has several micro-batches
    times: int = 1
    # by (mesh dimension, collective, "number" or "bytes")
    sent: Counter = field(default_factory=Counter)
    # for each FSDP2 all-gather that the phase waits for, how many phases ago it was issued
    gathered_before: set[int] = field(default_factory=set)
    # whether FSDP2 waits for all reductions at the phase's end
    ends_reduced: bool = False
    # calls of operators without a formula for their FLOP, by name
    uncounted: Counter = field(default_factory=Counter)


class ModuleState(NamedTuple):
    """A module's memory between steps: parameters, gradients, optimizer state."""

    size: Counter  # bytes of the tensors by kind, and of float8 "scales"
    on_device: Counter  # allocated bytes by which counting them increased live memory
    in_pools: Counter  # their allocated bytes in each pool


class Storage(NamedTuple):
    """Memory allocated on the device."""

    kind: str
    size: int  # bytes, rounded up as the allocator does
    pool: str


@functools.cache
def wraps_tensors(kind: type) -> bool:
    """Whether operators on tensors of this class call operators on the tensors inside.

    DTensor does, and so does a class with FSDP2's all-gather extensions
    (extras/float8/all_gather.py).
    """
    if hasattr(kind, "__tensor_flatten__"):
        return True
    return hasattr(kind, "fsdp_pre_all_gather") and not issubclass(kind, FakeTensor)


def local_shard(t: Any) -> Any:
    """A DTensor's local tensor. Returns anything else unchanged."""
    return t._local_tensor if isinstance(t, DTensor) else t


def fake_tensors(tree: Any) -> list[FakeTensor]:
    return [t for t in tree_iter(tree) if isinstance(t, FakeTensor)]


def is_known(operator: Any) -> bool:
    """Whether the operator is torch's or ours, and not a fork's or a higher-order operator."""
    return isinstance(operator, OpOverload) and operator.namespace in KNOWN


def computes_much(operator: Any) -> bool:
    """Whether an operator's name suggests that it may compute more than it moves."""
    if not is_known(operator):
        return True
    return operator.namespace == "aten" and bool(COMPUTES.search(operator.overloadpacket.__name__))


def moves_bytes(operator: OpOverload) -> bool:
    """Whether a known operator reads and writes memory, unlike views, allocations and
    collectives."""
    if operator.is_view or operator in MOVES_NOTHING:
        return False
    return operator.namespace in ("aten", "fsdp")


def is_attention(operator: Any) -> bool:
    return operator in ATTENTION or operator in BACKWARD_OF_ATTENTION


def flop_by_formula(operator: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """The FLOP by torch's formula for the operator; 0 if there is none."""
    if not isinstance(operator, OpOverload):
        return 0
    if operator == GROUPED_MM:
        # (tokens, in) by (groups, in, out): each token is in one group
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
        """dimensions: process group name -> mesh dimension. on_host: kinds that are in host memory,
        which is not counted. granularity: the allocator rounds sizes up to this many bytes."""
        super().__init__()
        self.fake = fake
        self.dimensions = dimensions
        self.on_host = on_host
        self.granularity = granularity

        self.phases = [Phase("start")]
        # occurrences in a step of the phases that begin from now on
        self.times = 1
        # bytes on the device by kind
        self.live: Counter = Counter()
        # live storages by address
        self.storages: dict[int, Storage] = {}
        # bytes in each pool
        self.live_in_pools: Counter = Counter()
        # returns the pool of new allocations
        self.pool_now: Callable[[], str] = lambda: COMPUTATION
        # True inside run_uncounted()
        self.paused = False
        # storage of an FSDP2 all-gather's output -> index of the phase that issued it
        self.gathering: dict[int, int] = {}

        # True inside a compiled block
        self.fused = False
        # compiled blocks without activation checkpointing, which save the inputs of their matmuls
        self.saving_blocks: set[nn.Module] = set()
        # these inputs, by the phase that frees them
        self.saved_inputs: dict[str, list[Tensor]] = {}
        # the inputs of the block that runs forward; None outside the forward of such a block
        self.saving: list[Tensor] | None = None
        # True while backward recomputes the forward of such a block, see gpu_paths.save_matmuls()
        self.recomputing = False

        # share of the scores that the mask of the current FlexAttention keeps; None for SDPA
        self.mask_share: float | None = None
        # whether the share of any mask depends on data
        self.mask_depends_on_data = False
        # storage of attention's output -> share of the scores that it computed, for its backward
        self.shares: dict[int, float] = {}

    def begin(self, name: str) -> None:
        """Begins a phase. Working memory that the previous phase leaves becomes activations."""
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
        """Sets the kind and the bytes of a storage. Updates the phase's peaks."""
        # round up
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
        """Sets the kind of the tensors' storages, and counts storages that are new."""
        for t in map(local_shard, tensors):
            if isinstance(t, FakeTensor) and t.fake_mode is self.fake:
                storage = t.untyped_storage()
                if storage._cdata not in self.storages:
                    weakref.finalize(storage, self.drop_storage, storage._cdata)
                self.set_storage(storage._cdata, kind, storage.nbytes())

    def mark_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleState:
        """Marks a module's parameters, gradients and optimizer state, and returns their bytes.

        Call it for the blocks before the model. Gradients need not exist yet; a trained parameter's
        gradient counts with the parameter's size.
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
        # each float8 weight has one float32 scale
        size["scales"] = 4 * sum(hasattr(local_shard(t), "fsdp_pre_all_gather") for t in params)
        in_pools: Counter = Counter()
        gradients = [param.grad for param in params]
        for t in map(local_shard, [*params, *optimizer_state, *gradients]):
            if isinstance(t, FakeTensor):
                storage = self.storages[t.untyped_storage()._cdata]
                in_pools[storage.pool] += storage.size
        # a difference of Counters drops negative counts, such as former working memory
        return ModuleState(size, self.live - before, in_pools)

    def resized(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Counts storage.resize_(), which bypasses the dispatcher. FSDP2 frees parameters with
        it."""
        if storage._cdata in self.storages:
            self.set_storage(storage._cdata, "gathered units", storage.nbytes())
        return storage

    def run_uncounted(self, function: Callable, *args: Any) -> Any:
        """Calls function(*args), and counts only its collectives."""
        with mock.patch.object(self, "paused", True):
            return function(*args)

    def __torch_dispatch__(self, operator, types, args: tuple = (), kwargs=None):
        if operator is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # a shortcut for half of all calls
            return args[0].fake_device
        if any(map(wraps_tensors, types)):
            # let the class handle it first: its operators on the tensors inside return here
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
            # FSDP2 copies parameters out of an all-gather's output
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
                # in a compiled block, float32 stays in registers
                new = [t for t in new if t.dtype != torch.float32]
        self.mark(new, "working memory")
        return result

    def add_flop(self, kind: str, flop: int) -> None:
        """Adds FLOP to the phase, and to "model" unless they are recomputation.

        "model" counts four of attention's five matmuls in backward, because one recomputes the
        scores. It excludes a forward that runs again during backward. This forward has gradients
        enabled, unlike backward itself.
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
            # Count even a float32 input: it leaves the registers, because it is saved. In place of
            # a float8 input, the compiler saves the tensor before rounding, and rounds it again.
            self.mark([x], "working memory")
            self.saving.append(x)

    def count_dequantization(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Counts the dequantized weights that exist, in x's dtype, during an NF4 matmul. A byte of
        `codes` holds two weights."""
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
        """Counts attention: each matmul has 2 * B * H * S_queries * S_keys * D FLOP * share.

        `share` is the share of the scores that are computed. Causal SDPA skips half of them. SDPA
        computes the scores that a mask tensor hides.
        """
        names = (argument.name for argument in operator._schema.arguments)
        arguments = dict(zip(names, args)) | kwargs
        # (B, H, S, D) each
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        if operator in ATTENTION:
            if self.saving is not None and k.shape[2] > q.shape[2]:
                # all-gathered over cp; saved, so that backward does not all-gather them again
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
        """Counts any other operator with a formula, such as bmm."""
        kind = "attention" if "attention" in operator.__name__ else "matmuls"
        self.add_flop(kind, flop)
        if self.saving is None:
            return
        # parameters and all-gathered units stay anyway
        for t in inputs:
            storage = self.storages.get(t.untyped_storage()._cdata)
            if storage and storage.kind in ("working memory", "activations"):
                self.mark([t], "working memory")
                self.saving.append(t)

    def count_bytes(
        self, operator: Any, inputs: list[FakeTensor], outputs: list[FakeTensor]
    ) -> None:
        """Counts the bytes that an operator without a formula moves. Records its name if it may
        compute much."""
        if computes_much(operator):
            self.phases[-1].uncounted[str(operator).removesuffix(".default")] += 1
        if is_known(operator) and not moves_bytes(operator):
            return
        tensors = [*inputs, *outputs]
        if self.fused:
            # in a compiled block, float32 stays in registers
            moved = FUSED * sum(t.nbytes for t in tensors if t.dtype != torch.float32)
        else:
            moved = sum(t.nbytes for t in tensors)
        # moved may be a float, but typeshed's Counter holds int
        # pyrefly: ignore[unsupported-operation]
        self.phases[-1].work["moved"] += moved

    def count_collective(self, operator: Any, args: tuple, buffers: list[Tensor]) -> None:
        """Counts a collective over a mesh dimension, with the bytes of its larger buffer."""
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

        "replica" means all ranks of a replica: extras/optimizers/muon.py sends matrices among them.
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
            # with dp_shard = 1, FSDP2 shards over only cp
            return "dp_shard"
        return dimension
