"""Checks that one process can do before the ranks start. Also prepares the data, except inside a SLURM job."""

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
from files import print_line
from launch.command import Ranks
from launch.interruption import Interruption
from lifecycle.folder import check_folder, read_status
from lifecycle.gpus import visible_gpus
from schema import together


def check_launch(
    cfg: config.Config, ranks: Ranks, args: Namespace, interruption: Interruption
) -> bool:
    """Runs all checks and prepares the data. Returns whether there is anything left to do. Raises ConfigError."""
    # Imports from higher layers, as in a tool's main(). Local: torch takes seconds to load, and few launches need it.
    from data.dataset import open_dataset
    from data.folder import is_prepared
    from data.prepare import prepare

    interruption.allow()  # to verify a checkpoint reads every byte, and preparing may take hours
    folder = config.run_folder(cfg)
    if (
        not args.eval_only
        and read_status(folder).get("state") == "finished"
        and nothing_left(cfg, folder)
    ):
        return False
    together(
        lambda: config.mesh_shape(cfg, ranks.total), lambda: args.eval_only or check_folder(folder)
    )
    if ranks.job and cfg.data.order == "global" and not is_prepared(cfg):
        # the job's GPUs would idle meanwhile
        command = shlex.join(["./run_train.sh", "-m", "data.prepare", args.config, *args.overrides])
        raise ConfigError(
            f"{args.config}: its data is not prepared, and none is inside a job; run {command} on the "
            "login node"
        )
    *_, (start, _) = together(
        lambda: check_device(cfg, ranks.local),
        lambda: check_patterns(cfg),
        lambda: check_compiler(cfg),
        lambda: check_tracker(cfg),
        lambda: catalog.choose(
            cfg, catalog.steps(cfg), catalog.problems_without_hashing, args.eval_only
        ),
    )
    if args.eval_only:
        compare.check_same_run(cfg, start, compare.SAME_OUTPUTS)
        dataset = open_dataset(cfg, train=False)
        compare.check_same_tokenizer(cfg, start, dataset.tokenizer_files)
    else:
        compare.check_same_run(cfg, start)
        if cfg.model.init_from and (cfg.lora or not start):
            from extras.huggingface.weights import weights_to_read

            weights_to_read(cfg, start)
        prepare(cfg)
        dataset = open_dataset(cfg)
        compare.check_same_data(cfg, start, dataset.identities())
        dataset.require(compare.data_before(cfg, start))
    if cfg.eval and dataset.has_validation():
        empty = [stream for stream in dataset.validation if stream.length < 2]
        if len(empty) == len(dataset.validation):
            # some are from before a text always held out some
            where = ", ".join(str(stream.path.parent) for stream in empty)
            raise ConfigError(
                f"{where}: holds no validation text; delete the folder to prepare it anew, or "
                "--eval=off"
            )
    try:
        if not args.eval_only:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"[run] output_dir: {folder} cannot be made: {error.strerror}") from None
    return True


def nothing_left(cfg: config.Config, folder: pathlib.Path) -> bool:
    """Whether a finished run has a good checkpoint of the last step or beyond. Prints so. Raises ConfigError."""
    found = catalog.steps(cfg)
    if max(found, default=0) < cfg.train.steps:  # known without reading any of them
        return False
    start, _ = catalog.choose(cfg, found, catalog.problems_of)
    compare.check_same_run(cfg, start)
    if start < cfg.train.steps:
        return False
    step = read_status(folder).get("step", start)
    print_line(
        f"{folder}: finished at step {step}; train.steps = {cfg.train.steps} asks for no more"
    )
    return True


def check_tracker(cfg: config.Config) -> None:
    """Raises ConfigError if the package of `log.tracker` is missing."""
    if (name := cfg.log.tracker) and not importlib.util.find_spec(name):
        raise ConfigError(
            f"[log] tracker = {name}: needs the package {name}: {sys.executable} -m pip install {name}"
        )


def trains_on_gpus(cfg: config.Config) -> bool:
    return cfg.run.device == "cuda" or (cfg.run.device == "auto" and visible_gpus() > 0)


def check_device(cfg: config.Config, local_ranks: int) -> None:
    if trains_on_gpus(cfg):
        from lifecycle.process_group import pick_device

        pick_device(cfg, local_ranks - 1)


def check_compiler(cfg: config.Config) -> None:
    named = [os.environ.get("CC"), os.environ.get("CXX"), "gcc", "g++", "clang", "cc"]
    flex = trains_on_gpus(cfg)  # where FlexAttention is compiled even if blocks are not
    wanted = ["[parallel] compile = true"] * cfg.parallel.compile
    wanted += ["[data] document_mask = true"] * (flex and cfg.data.document_mask)
    wanted += [f"[parallel] cp = {cfg.parallel.cp}"] * (flex and cfg.parallel.cp > 1)
    if wanted and not any(map(shutil.which, filter(None, named))):
        raise ConfigError(
            f"{wanted[0]}: needs a compiler for C and C++, and this machine has none (gcc, clang, or "
            "what CC and CXX name)"
        )


def check_patterns(cfg: config.Config) -> None:
    if cfg.model.freeze or cfg.parallel.replicated:
        from model.build import meta_model

        model = meta_model(cfg.model, cfg.lora)
        if cfg.parallel.replicated:
            from parallel.replicated import matching_parameters

            matching_parameters(model, cfg.parallel)
