"""Counts memory, work and communication of the operators on fake tensors while the real program runs."""

import functools
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
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

from parallel.activation_checkpoint import ATTENTION, GROUPED_MM, LINEAR_MATMULS

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional
NF4 = (
    "frozen.nf4_product.default"  # by name: extras/lora/nf4.py, which defines it, may not be loaded
)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PRODUCTS = LINEAR_MATMULS | {
    aten._scaled_mm.default,
    aten.mm.out,
    aten.mm.dtype,
    aten.addmm_.default,
    aten.addmm.dtype_out,
}
# What compiled blocks save too, since it is expensive to compute again.
FORMULAS = {aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
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
# Namespaces whose operators are counted: by a formula or, if they compute little, by the bytes that they move.
KNOWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "frozen", "profiler"}
# Operators of theirs that compute more than they move, and of which only some have a formula.
COMPUTES = re.compile(
    r"mm(_|$)|mv_?$|dot$|conv(?!ert)|attention|linalg(?!_vector_norm)|fft|cdist|rnn|lstm|gru"
)
MOVES_NOTHING = {aten.empty.memory_format, aten._unsafe_view.default}
# bytes that Inductor's kernels move, relative to a block's eager operators in its dtype
FUSED = 0.45
NF4_UNFUSED = 24  # bytes that eager nf4.dequantize() moves for each weight, to 16 bits


@dataclass
class Phase:
    """A part of the step: a unit's forward or backward, or the update."""

    name: str  # such as "forward block 3"
    peak: Counter = field(default_factory=Counter)  # bytes by kind, when their sum is highest
    end: Counter = field(default_factory=Counter)  # bytes by kind, when the phase ends
    # FLOP of "products", "float8", "attention", and of the "model", without recomputation; bytes "moved"
    work: Counter = field(default_factory=Counter)
    times: int = 1  # occurrences in a step, for several micro-batches
    # by (mesh dimension, collective, "number" or "bytes")
    sent: Counter = field(default_factory=Counter)
    # calls of operators whose FLOP are in no formula, by name
    uncounted: Counter = field(default_factory=Counter)


@functools.cache
def wraps_tensors(kind: type) -> bool:
    """Whether operators on tensors of a class call others on those inside: a DTensor, or what FSDP2 all-gathers by the
    class's own methods (extras/float8/all_gather.py)."""
    return hasattr(kind, "__tensor_flatten__") or (
        hasattr(kind, "fsdp_pre_all_gather") and not issubclass(kind, FakeTensor)
    )


class Counted(TorchDispatchMode):
    """Sees every operator on the fake tensors of one mode, and counts live memory by storage."""

    supports_higher_order_operators = True

    def __init__(
        self, fake: FakeTensorMode, dimensions: dict[str, str], on_host: set[str], granularity: int
    ):
        """dimensions: mesh dimension by process group name. on_host: kinds in host memory, which are not counted.
        granularity: bytes that the allocator rounds up to."""
        super().__init__()
        self.granularity = granularity
        self.fake, self.dimensions, self.on_host = fake, dimensions, on_host
        self.phases, self.times = [Phase("start")], 1
        self.live: Counter = Counter()  # bytes on the device by kind
        self.storages: dict[int, tuple[str, int]] = {}  # kind and bytes
        self.paused = self.fused = False  # inside unseen(); inside a compiled block
        self.kept: dict[
            str, list[Tensor]
        ] = {}  # the products' inputs, in a compiled block without checkpointing
        self.recomputing = False  # in such a block's backward
        self.keeping: list[Tensor] | None = None  # in such a block's forward
        # of the scores, that FlexAttention's mask keeps; None: SDPA, causal or not
        self.share: float | None = None
        self.shares: dict[
            int, float
        ] = {}  # for backward: of the attention whose output this storage is
        self.by_data = False  # whether the share of some mask depends on data
        self.names: dict[nn.Module, str] = {}
        self.first: dict[str, str] = {}  # where an uncounted operator is called first

    def begin(self, name: str) -> None:
        """Begins the next phase. Working memory that the last one leaves is activations, saved for backward."""
        for key, (kind, size) in list(self.storages.items()):
            if kind == "working memory":
                self.set(key, "activations", size)
        self.kept.pop(self.phases[-1].name, None)
        self.phases[-1].end = Counter(self.live)
        self.phases.append(Phase(name, Counter(self.live), times=self.times))

    def set(self, key: int, kind: str, size: int) -> None:
        # rounded up
        size = 0 if kind in self.on_host else -(-size // self.granularity) * self.granularity
        before, was = self.storages.get(key, (kind, 0))
        self.storages[key] = kind, size
        self.live[before] -= was
        self.live[kind] += size
        if size > was and self.live.total() > self.phases[-1].peak.total():
            self.phases[-1].peak = Counter(self.live)

    def mark(self, tensors: Iterable[Any], kind: str) -> None:
        """Sets the kind of these tensors' storages; starts to count those that were not counted yet."""
        for t in tensors:
            t = t._local_tensor if isinstance(t, DTensor) else t
            if isinstance(t, FakeTensor) and t.fake_mode is self.fake:
                storage = t.untyped_storage()
                if storage._cdata not in self.storages:
                    weakref.finalize(storage, self.drop, storage._cdata)
                self.set(storage._cdata, kind, storage.nbytes())

    def held(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Counter, Counter]:
        """Bytes between steps of a module's parameters, gradients, optimizer state and float8 scales; and what those
        that exist by now take of the device, as the allocator rounds them. Call it for parts before the whole."""
        own, before, exact = [*module.parameters()], Counter(self.live), Counter()
        states = [
            t
            for param in own
            for t in tree_iter(optimizer.state.get(param, {}))
            if isinstance(t, Tensor)
        ]
        trained = [param for param in own if param.requires_grad]
        gradients = [param.grad for param in own]
        for kind, tensors in (
            ("parameters", own),
            ("optimizer state", states),
            ("gradients", gradients),
        ):
            self.mark(tensors, kind)
        for kind, tensors in (
            ("parameters", own),
            ("optimizer state", states),
            ("gradients", trained),
        ):
            exact[kind] = sum(
                t._local_tensor.nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors
            )
        exact["scales"] = 4 * sum(
            hasattr(getattr(param, "_local_tensor", param), "fsdp_pre_all_gather") for param in own
        )
        return exact, self.live - before  # without the working memory that they counted as before

    def drop(self, key: int) -> None:
        kind, size = self.storages.pop(key)
        self.live[kind] -= size
        self.shares.pop(key, None)

    def resized(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Counts storage.resize_(), which bypasses the dispatcher: FSDP2 frees all-gathered parameters by it."""
        if storage._cdata in self.storages:
            self.set(storage._cdata, "gathered units", storage.nbytes())
        return storage

    def unseen(self, function: Callable, *args: Any) -> Any:
        """function(*args), uncounted."""
        with mock.patch.object(self, "paused", True):
            return function(*args)

    def __torch_dispatch__(self, operator, types, args: tuple = (), kwargs=None):
        if operator is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(map(wraps_tensors, types)):
            return NotImplemented  # they first: operators on their inner tensors come back here
        result = operator(*args, **kwargs)
        made = [t for t in tree_iter(result) if isinstance(t, FakeTensor)]
        if self.paused or any(t.fake_mode is not self.fake for t in made):
            return result
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, FakeTensor)]
        new = [t for t in made if t.untyped_storage()._cdata not in self.storages]
        if operator in COLLECTIVES:
            self.send(operator, args, [*read, *made])
        elif operator in PRODUCTS or str(operator) == NF4:
            self.multiply(operator, args, made[0])
        elif operator in BACKWARD_OF_ATTENTION or (
            operator in ATTENTION and isinstance(operator, OpOverload)
        ):
            self.attend(operator, args, kwargs, made)
        elif flop := self.flop(operator, args, kwargs, result):
            self.work("attention" if "attention" in operator.__name__ else "products", flop)
            if self.keeping is not None:  # parameters and gathered units stay in any case
                kept = [
                    t
                    for t in read
                    if self.storages.get(t.untyped_storage()._cdata, ("",))[0]
                    in ("working memory", "activations")
                ]
                self.mark(kept, "working memory")
                self.keeping += kept
        else:
            is_known = isinstance(operator, OpOverload) and operator.namespace in KNOWN
            if not is_known or (
                operator.namespace == "aten" and COMPUTES.search(operator.overloadpacket.__name__)
            ):
                self.leave_out(str(operator).removesuffix(".default"))
            if not is_known or (
                operator.namespace in ("aten", "fsdp")
                and not operator.is_view
                and operator not in MOVES_NOTHING
            ):
                # pyrefly: ignore[unsupported-operation]  # a fraction, where typeshed's Counter holds an int
                self.phases[-1].work["moved"] += sum(
                    t.nbytes for t in [*read, *made] if t.dtype != torch.float32 or not self.fused
                ) * (FUSED if self.fused else 1)
            if self.fused and is_known and operator != aten.empty.memory_format:
                new = [t for t in new if t.dtype != torch.float32]
        self.mark(new, "working memory")
        return result

    def work(self, kind: str, flop: int) -> None:
        """Counts FLOP. The model's are those of forward and backward, with five of attention's matmuls in backward as
        four; not those of a forward that runs again during backward, which has gradients, unlike backward itself."""
        self.phases[-1].work[kind] += flop
        backward, again = torch._C._current_graph_task_id() != -1, torch.is_grad_enabled()
        if not (backward and again):
            self.phases[-1].work["model"] += (
                flop * 4 // 5 if backward and kind == "attention" else flop
            )

    def multiply(self, operator: Any, args: tuple, out: Tensor) -> None:
        """Counts a product of two matrices."""
        work, x = self.phases[-1].work, args["addmm" in operator.__name__]
        self.work("float8" if x.dtype in FLOAT8 else "products", 2 * x.shape[-1] * out.numel())
        if str(operator) == NF4:
            # its dequantized weights, during the product; eager, with intermediates
            codes, scales = args[1:3]
            weights = torch.empty(
                2 * codes.numel() * (1 if self.fused else 5), dtype=x.dtype, device=x.device
            )
            self.mark([weights], "working memory")
            work["moved"] += (
                codes.nbytes + scales.nbytes + weights.nbytes
                if self.fused
                else NF4_UNFUSED * 2 * codes.numel()
            )
        elif self.keeping is not None:
            self.mark([x], "working memory")  # also in float32: it is kept
            self.keeping.append(x)

    def attend(
        self, operator: OpOverload, args: tuple, kwargs: dict, made: list[FakeTensor]
    ) -> None:
        """Counts attention. SDPA skips scores only if it is causal, half of them: not those that a mask hides."""
        given = dict(zip((a.name for a in operator._schema.arguments), args)) | kwargs
        q, k, v = (given[name] for name in ("query", "key", "value"))
        if operator in ATTENTION:
            if self.keeping is not None and k.shape[2] > q.shape[2]:
                # all-gathered over cp, and not once more
                self.keeping += [k, v]
            share = self.share if self.share is not None else 0.5 if given.get("is_causal") else 1.0
            self.shares[made[0].untyped_storage()._cdata] = share
            matmuls = 2
        else:
            share = self.shares.get(given["out"].untyped_storage()._cdata, 1.0)
            matmuls = 5  # backward recomputes the scores
        self.work("attention", int(2 * matmuls * share * q.numel() * k.shape[2]))

    def flop(self, operator: Any, args: tuple, kwargs: dict, result: Any) -> int:
        """FLOP by the shapes, of torch's formula; 0 if there is none."""
        if not isinstance(operator, OpOverload):
            return 0
        if operator == GROUPED_MM:  # whatever the groups' sizes
            return 2 * args[0].numel() * args[1].shape[-1]
        formula = flop_registry.get(operator.overloadpacket)
        return formula(*args, **kwargs, out_val=result) if formula else 0

    def leave_out(self, name: str) -> None:
        if name not in self.first:
            module, phase = self.module_of(sys._getframe()), self.phases[-1].name
            self.first[name] = f"{module} ({phase})" if module else phase
        self.phases[-1].uncounted[name] += 1

    def module_of(self, frame: FrameType | None) -> str | None:
        """The name of the innermost module whose code runs in this frame or around it; None in backward."""
        while frame is not None:
            if isinstance(module := frame.f_locals.get("self"), nn.Module) and module in self.names:
                return self.names[module]
            frame = frame.f_back
        return None

    def send(self, operator: Any, args: tuple, tensors: list[Tensor]) -> None:
        if self.recomputing:
            return
        kind, by_fsdp = COLLECTIVES[operator], operator.namespace == "c10d"
        group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        name = dist.ProcessGroup.unbox(group).group_name if group is not None else args[-1]
        # extras/optimizers/muon.py's
        dimension = self.dimensions.get(name, "replica" if kind == "all_to_all" else "dp_shard")
        if by_fsdp and dimension == "cp":  # with dp_shard = 1, FSDP2 shards over cp alone
            dimension = "dp_shard"
        sent = self.phases[-1].sent
        sent[dimension, kind, "number"] += 1
        sent[dimension, kind, "bytes"] += max(t.nbytes for t in tensors)
        if dimension in ("dp_shard", "dp_replicate"):
            self.mark(tensors, "gathered units" if kind == "all_gather" else "reductions")
