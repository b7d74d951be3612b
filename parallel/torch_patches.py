"""Workarounds that use torch's internals, where torch has no option.

Each names the versions that need it, and the test that fails without it.
"""

import contextlib
import datetime
import functools
import logging
import signal
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

# pyrefly: ignore[unsupported-operation]  # TorchVersion allows it
IS_TORCH_2_11 = torch.__version__ < (2, 12)


def set_default_timeout(timeout: datetime.timedelta) -> None:
    """Sets the timeout of the process groups that DeviceMesh creates.

    In all versions they use torch's default of 30 minutes, not the timeout of init_process_group().
    Test: run/test_rank.py, test_all_process_groups_have_the_runs_timeout.
    """
    dist.distributed_c10d.default_pg_timeout = timeout


def shorten_nccl_timeout(seconds: float) -> None:
    """Sets the timeout of NCCL's collectives in all process groups; a no-op without NCCL.

    In all versions a group keeps its initial timeout, and NCCL's flight recorder writes what it waits
    for only when that is over.
    Test: parallel/test_torch_patches.py, test_nccl_times_out_before_the_watchdog.
    """
    if not dist.is_nccl_available():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if torch.device("cuda") in group._device_types:
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backend._set_default_timeout(datetime.timedelta(seconds=seconds))


def accept_integer_parameters() -> None:
    """Makes fully_shard() accept frozen integer parameters, such as NF4 codes.

    torch 2.11 creates every sharded parameter with requires_grad=True, which fails for integers, and
    copies the original's flag later. Newer versions do not need this.
    Test: parallel/test_torch_patches.py, test_frozen_integers_are_sharded.
    """
    if not IS_TORCH_2_11:
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    # pyrefly: ignore[bad-assignment]  # that file uses only these two names of torch.nn
    _fsdp_param.nn = SimpleNamespace(Parameter=parameter, Module=nn.Module)


def free_reduce_scatter_inputs(model: nn.Module) -> None:
    """Makes the computing stream wait for FSDP2's last reduce-scatter, and frees its input.

    In all versions FSDP2 keeps the input until the model's next reduce-scatter, or until the end of a
    backward that is set as the last. Version 2.11 stores one state, newer ones a list.
    Test: parallel/test_fsdp.py, test_next_micro_batch_finds_the_first_units_gathered.
    """
    # pyrefly: ignore[not-callable]  # a sharded model
    fsdp = model._get_fsdp_state()
    if IS_TORCH_2_11:
        states = list(filter(None, [fsdp._comm_ctx.reduce_scatter_state]))
        fsdp._comm_ctx.reduce_scatter_state = None
    else:
        states = fsdp._comm_ctx.reduce_scatter_states
    for state in states:
        if state.event is not None:  # None on a CPU
            fsdp._device_handle.current_stream().wait_event(state.event)
    states.clear()


def share_classes(model: nn.Module) -> None:
    """Restores one class for modules that had one class and are parametrized alike.

    In all versions torch creates a class for each parametrized module (parametrize.py:
    _inject_new_class), and torch.compile would compile a graph for each class. Tensor parallelism
    and casts of replicated parameters parametrize modules.
    Test: parallel/test_fsdp.py, test_all_blocks_share_one_compiled_graph.
    """
    shared: dict[tuple, type] = {}
    for module in model.modules():
        if parametrize.is_parametrized(module):
            module_class = type(module)
            alike = (*module_class.__bases__, *module.parametrizations)
            module.__class__ = shared.setdefault(alike, module_class)


def silence_advice_on_policies() -> None:
    """Silences what torch logs about each selective checkpointing policy that it compiles.

    All versions advise against changing a tensor in place. No block does.
    Test: parallel/test_torch_patches.py, test_advice_on_compiled_policies_is_silenced.
    """
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def shield_compilers(signals: Iterable[signal.Signals]) -> None:
    """Makes Inductor and Triton start their compiler processes with these signals blocked.

    They are the signals that ask a run to stop. scancel, for example, sends them to all processes of
    a job, but only the ranks should act on them. In all versions, if a signal kills a compiler or a
    worker, the rank fails instead of saving, or waits for a kernel forever.
    Test: parallel/test_torch_patches.py, test_a_stop_does_not_reach_what_compiles.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    def with_blocked(start: Callable) -> Callable:
        @functools.wraps(start)
        def shielded(*arguments: object, **keywords: object) -> object:
            # A child process inherits this thread's mask.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            try:
                return start(*arguments, **keywords)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        return shielded

    cpp_builder.run_compile_cmd = with_blocked(cpp_builder.run_compile_cmd)
    SubprocPool.__init__ = with_blocked(SubprocPool.__init__)
    with contextlib.suppress(ImportError):
        # pyrefly: ignore[missing-import]  # builds for CPUs come without it
        from triton.runtime import build

        build._build = with_blocked(build._build)  # compiles Triton's driver, in the rank itself
