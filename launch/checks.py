"""Checks that one process can do before the ranks start. Also prepares the data, except inside a
SLURM job."""

import importlib.util
import os
import pathlib
import shlex
import shutil
import sys
from argparse import Namespace

import config
from checkpoint import catalog, compare
from config import ConfigError
from data.dataset import Dataset, open_dataset
from data.folder import is_prepared
from data.prepare import prepare
from files import print_line
from launch.command import Ranks
from lifecycle.folder import check_folder, read_status
from lifecycle.gpus import visible_gpus
from schema import together


def check_launch(cfg: config.Config, ranks: Ranks, args: Namespace) -> bool:
    """Runs all checks and prepares the data. Returns whether there is anything left to do. Raises
    ConfigError."""
    folder = config.run_folder(cfg)
    if not args.eval_only and is_finished(cfg, folder):
        return False
    if args.eval_only:
        config.mesh_shape(cfg, ranks.total)
    else:
        together(lambda: config.mesh_shape(cfg, ranks.total), lambda: check_folder(folder))
    if ranks.job:
        check_prepared(cfg, args)
    results = together(
        lambda: check_device(cfg, ranks.local),
        lambda: check_patterns(cfg),
        lambda: check_compiler(cfg),
        lambda: check_tracker(cfg),
        lambda: catalog.choose(
            cfg, catalog.steps(cfg), catalog.problems_without_hashing, args.eval_only
        ),
    )
    start, _ = results[-1]
    if args.eval_only:
        check_evaluation(cfg, start)
    else:
        prepare_training(cfg, start)
    return True


def check_evaluation(cfg: config.Config, start: int) -> None:
    """Raises ConfigError if the checkpoint of step `start` cannot be evaluated on the data."""
    compare.check_same_run(cfg, start, compare.SAME_OUTPUTS)
    dataset = open_dataset(cfg, train=False)
    compare.check_same_tokenizer(cfg, start, dataset.tokenizer_files)
    check_validation(cfg, dataset)


def prepare_training(cfg: config.Config, start: int) -> None:
    """Prepares the data and makes the run's folder. Raises ConfigError if that fails, or if
    training cannot resume after step `start` on this data."""
    compare.check_same_run(cfg, start)
    if cfg.model.init_from and (cfg.lora or not start):
        from extras.huggingface.weights import weights_to_read

        weights_to_read(cfg, start)
    prepare(cfg)
    dataset = open_dataset(cfg)
    compare.check_same_data(cfg, start, dataset.identities())
    dataset.require_same_text(compare.data_before(cfg, start))
    check_validation(cfg, dataset)
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
    meanwhile. Growing text is prepared next to the training."""
    if cfg.data.order == "growing" or is_prepared(cfg):
        return
    command = shlex.join(["./run_train.sh", "-m", "data.prepare", args.config, *args.overrides])
    raise ConfigError(
        f"{args.config}: its data is not prepared, and none is inside a job; run {command} on the "
        "login node"
    )


def check_validation(cfg: config.Config, dataset: Dataset) -> None:
    """Raises ConfigError if no source holds validation text, as of data from before a text always
    held out some."""
    if not (cfg.eval and dataset.has_validation()):
        return
    if any(stream.length >= 2 for stream in dataset.validation):  # an input and a target
        return
    folders = ", ".join(str(stream.path.parent) for stream in dataset.validation)
    raise ConfigError(
        f"{folders}: holds no validation text; delete the folder to prepare it anew, or --eval=off"
    )


def check_tracker(cfg: config.Config) -> None:
    """Raises ConfigError if the package of `log.tracker` is missing."""
    name = cfg.log.tracker
    if name and not importlib.util.find_spec(name):
        raise ConfigError(
            f"[log] tracker = {name}: needs the package {name}: {sys.executable} -m pip install "
            f"{name}"
        )


def trains_on_gpus(cfg: config.Config) -> bool:
    return cfg.run.device == "cuda" or (cfg.run.device == "auto" and visible_gpus() > 0)


def check_device(cfg: config.Config, local_ranks: int) -> None:
    """Raises ConfigError if this machine lacks a GPU for one of its ranks, or it does not support
    an option."""
    if trains_on_gpus(cfg):
        from lifecycle.process_group import pick_device

        pick_device(cfg, local_ranks - 1)


def check_compiler(cfg: config.Config) -> None:
    """Raises ConfigError if an option needs a compiler and this machine has none."""
    flex = trains_on_gpus(cfg)  # where FlexAttention is compiled even if blocks are not
    if cfg.parallel.compile:
        option = "[parallel] compile = true"
    elif flex and cfg.data.document_mask:
        option = "[data] document_mask = true"
    elif flex and cfg.parallel.cp > 1:
        option = f"[parallel] cp = {cfg.parallel.cp}"
    else:
        return
    compilers = [os.environ.get("CC"), os.environ.get("CXX"), "gcc", "g++", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        raise ConfigError(
            f"{option}: needs a compiler for C and C++, and this machine has none (gcc, clang, or "
            "what CC and CXX name)"
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
