"""Checks that one process can do before the ranks start. Also prepares the data, except inside a
SLURM job."""

import importlib.util
import os
import pathlib
import shlex
import shutil
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import config
from checkpoint import catalog, compare
from config import ConfigError
from data.dataset import open_dataset
from data.folder import is_prepared
from data.preparer import Preparer, trains_meanwhile
from files import print_line
from launch.command import Ranks
from lifecycle.folder import check_folder, read_status
from lifecycle.gpus import listed_gpus, trains_on_gpus
from schema import together


def check_launch(cfg: config.Config, ranks: Ranks, args: Namespace, preparer: Preparer) -> bool:
    """Runs all checks and prepares the data. Returns whether there is anything left to do. Raises
    ConfigError."""
    folder = config.run_folder(cfg)
    if not args.eval_only and is_finished(cfg, folder):
        return False
    checks: list[Callable[[], Any]] = [
        lambda: config.mesh_shape(cfg, ranks.total),
        lambda: check_machine(cfg, ranks, args.eval_only),
        lambda: check_patterns(cfg),
    ]
    if not args.eval_only:
        checks.append(lambda: check_folder(folder))
    if ranks.job:
        checks.append(lambda: check_prepared(cfg, args))
    checks.append(
        lambda: catalog.choose(
            cfg, catalog.steps(cfg), catalog.problems_without_hashing, args.eval_only
        )
    )
    *_, (start, _) = together(*checks)
    if args.eval_only:
        check_evaluation(cfg, start)
    else:
        prepare_training(cfg, args, start, preparer)
    return True


def check_evaluation(cfg: config.Config, start: int) -> None:
    """Raises ConfigError if the checkpoint of step `start` cannot be evaluated on the data."""
    compare.check_same_run(cfg, start, compare.SAME_OUTPUTS)
    dataset = open_dataset(cfg, train=False)
    compare.check_same_tokenizer(cfg, start, dataset.tokenizer_files)


def prepare_training(cfg: config.Config, args: Namespace, start: int, preparer: Preparer) -> None:
    """Prepares the data and makes the run's folder. Raises ConfigError if that fails, or if
    training cannot resume after step `start` on this data."""
    compare.check_same_run(cfg, start)
    if cfg.model.init_from and (cfg.lora or not start):
        from extras.huggingface.weights import weights_to_read

        weights_to_read(cfg, start)
    preparer.begin(cfg, [args.config, *args.overrides])
    dataset = open_dataset(cfg)
    compare.check_same_data(cfg, start, dataset.identities)
    dataset.require_same_text(compare.data_before(cfg, start))
    folder = config.run_folder(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"[run] output_dir: {folder} cannot be made: {error.strerror}") from None


def is_finished(cfg: config.Config, folder: pathlib.Path) -> bool:
    """Whether a run is finished, with a good checkpoint of the last step or beyond. Prints so.
    Raises ConfigError."""
    status = read_status(folder)
    if status.get("state") != "finished":
        return False
    steps = catalog.steps(cfg)
    if max(steps, default=0) < cfg.train.steps:  # known without reading any of them
        return False
    start, _ = catalog.choose(cfg, steps, catalog.problems_of)
    compare.check_same_run(cfg, start)
    if start < cfg.train.steps:
        return False
    print_line(
        f"{folder}: finished at step {status.get('step', start)}; train.steps = {cfg.train.steps} "
        "asks for no more"
    )
    changes = compare.changes_since(cfg, start)
    changes.pop("train.steps", None)  # fewer than it has
    if changes:
        print_line(compare.describe_changes(start, changes))
    return True


def check_prepared(cfg: config.Config, args: Namespace) -> None:
    """Raises ConfigError if a job would have to prepare its data first: its GPUs would idle
    meanwhile."""
    if trains_meanwhile(cfg) or is_prepared(cfg):
        return
    command = shlex.join(["./run_train.sh", "-m", "data.prepare", args.config, *args.overrides])
    raise ConfigError(
        f"{args.config}: its data is not prepared, and none is inside a job; run {command} on the "
        "login node"
    )


def check_tracker(cfg: config.Config) -> None:
    """Raises ConfigError if the package of `log.tracker` is missing."""
    name = cfg.log.tracker
    if name and not importlib.util.find_spec(name):
        raise ConfigError(
            f"[log] tracker = {name}: needs the package {name}: {sys.executable} -m pip install "
            f"{name}"
        )


def check_machine(cfg: config.Config, ranks: Ranks, evaluates: bool = False) -> None:
    """Raises ConfigError with all that this machine lacks for the run. evaluates: it only evaluates
    a checkpoint."""
    checks: list[Callable[[], Any]] = [
        lambda: check_device(cfg, ranks.local),
        lambda: check_compiler(cfg),
        lambda: check_surroundings(cfg, ranks, evaluates),
    ]
    if not evaluates:
        checks.append(lambda: check_tracker(cfg))
    together(*checks)


def check_surroundings(cfg: config.Config, ranks: Ranks, evaluates: bool) -> None:
    """Raises ConfigError for limits, disks and networks that the run needs more of. Prints what it
    may need more of."""
    if config.has_extra("preflight"):
        from extras.preflight.survey import survey

        survey(cfg, ranks, evaluates)


def check_device(cfg: config.Config, local_ranks: int) -> None:
    """Raises ConfigError if this machine lacks a GPU for one of its ranks, or a rank for one of its
    GPUs, or does not support an option."""
    if not trains_on_gpus(cfg):
        return
    try:
        import torch  # noqa: F401  # here first, to report why it cannot be loaded
    except (ImportError, OSError) as error:
        raise ConfigError(f"torch cannot be loaded: {error}{other_libraries()}") from None
    from lifecycle.device import pick_device

    together(
        lambda: pick_device(cfg, local_ranks - 1), lambda: check_all_gpus_are_used(local_ranks)
    )


def check_all_gpus_are_used(local_ranks: int) -> None:
    """Raises ConfigError if torch sees more GPUs than were counted, unless the number of ranks was
    given."""
    import torch

    gpus = torch.cuda.device_count()
    is_given = os.environ.get("NPROC") or os.environ.get("SLURM_GPUS_ON_NODE")
    if gpus > local_ranks and not is_given:
        raise ConfigError(
            f"torch finds {gpus} GPUs here, and nvidia-smi lists {listed_gpus()}: NPROC={gpus} trains "
            f"on all, NPROC={local_ranks} on that many"
        )


def other_libraries() -> str:
    """What may put other libraries before those that torch was built with."""
    given = []
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        if os.environ.get(name):
            given.append(f"{name}={os.environ[name]}")
    if not given:
        return ""
    return f"; are other libraries in its way? {', '.join(given)}; unset it, or unload its module"


def check_compiler(cfg: config.Config) -> None:
    """Raises ConfigError if an option compiles and this machine lacks what that needs."""
    option = option_that_compiles(cfg)
    if option:
        together(lambda: require_compilers(cfg, option), lambda: require_headers(option))


def option_that_compiles(cfg: config.Config) -> str | None:
    """The option for which kernels are compiled on this machine, if there is one."""
    if cfg.parallel.compile:
        return "[parallel] compile = true"
    if not trains_on_gpus(cfg):  # where FlexAttention is compiled even if blocks are not
        return None
    if cfg.data.document_mask:
        return "[data] document_mask = true"
    if cfg.parallel.cp > 1:
        return f"[parallel] cp = {cfg.parallel.cp}"
    return None


def require_compilers(cfg: config.Config, option: str) -> None:
    """Raises ConfigError without the compilers that Triton, for GPUs, and Inductor, for CPUs, look
    for."""
    on_gpus = trains_on_gpus(cfg)
    compilers = []
    if on_gpus:
        compilers.append(("C", "CC", ["gcc", "clang"]))
    if cfg.parallel.compile and (not on_gpus or cfg.parallel.cpu_offload):
        compilers.append(("C++", "CXX", ["clang++" if sys.platform == "darwin" else "g++"]))
    problems = []
    for language, variable, programs in compilers:
        chosen = os.environ.get(variable)
        if any(shutil.which(name) for name in ([chosen] if chosen else programs)):
            continue
        missing = f"{variable}={chosen} is not there" if chosen else "this machine has none"
        problems.append(
            f"{option}: needs a compiler for {language}, and {missing} ({' or '.join(programs)}, or "
            f"what {variable} names)"
        )
    if problems:
        raise ConfigError(*problems)


def require_headers(option: str) -> None:
    """Raises ConfigError without the headers of Python, which what starts a kernel includes."""
    include = sysconfig.get_path("include", "posix_prefix")
    folders = [include]
    for variable in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        folders += os.environ.get(variable, "").split(os.pathsep)
    if not any(os.path.exists(os.path.join(folder, "Python.h")) for folder in folders if folder):
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"{option}: needs Python's headers, and {include}/Python.h is missing: apt install "
            f"{version}-dev (or python3-dev; on Fedora and RHEL dnf install python3-devel)"
        )


def check_patterns(cfg: config.Config) -> None:
    """Raises ConfigError if a pattern of `model.freeze` or `parallel.replicated` matches no
    parameter."""
    if not (cfg.model.freeze or cfg.parallel.replicated):
        return
    from model.build import meta_model

    model = meta_model(cfg.model, cfg.lora)  # which freezes
    if cfg.parallel.replicated:
        from parallel.replicated import matching_parameters

        matching_parameters(model, cfg.parallel)
