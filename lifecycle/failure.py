"""How a rank ends after an error: its exit code, what it logs, and whether a restart may help."""

import contextlib
import logging
import os
import signal
import sys
import traceback
from typing import NamedTuple, NoReturn

import torch

import config
from checkpoint.save import SaveFailed
from config import ConfigError
from lifecycle import INPUT_IS_WRONG
from lifecycle.folder import failures
from optim import NoTargets


class Failure(NamedTuple):
    exit_code: int
    text: str  # for the log, with a traceback if the error is unexpected
    final: bool  # a restart cannot help


def failure_of(
    error: BaseException, cfg: config.Config, ranks: int, stop_signal: int, is_first_step: bool
) -> Failure:
    """What an error of a run means. stop_signal: that of a stop, 0 without one; is_first_step: no
    step was trained."""
    text = str(error)
    if isinstance(error, ConfigError):
        return Failure(INPUT_IS_WRONG, text, final=True)
    if isinstance(error, KeyboardInterrupt):
        return Failure(128 + (stop_signal or signal.SIGINT), text, final=True)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        # after the first step a restart may help: fragmentation, an evaluation, another process on
        # the device
        return Failure(1, out_of_memory_text(text, cfg, ranks), final=is_first_step)
    if isinstance(error, SaveFailed):
        return Failure(1, text, final=False)
    if isinstance(error, OSError) and error.filename:  # of a full disk, perhaps
        return Failure(1, f"{error.filename}: {error.strerror}", final=False)
    if isinstance(error, FloatingPointError | NoTargets):
        return Failure(1, text, final=True)
    return Failure(1, "".join(traceback.format_exception(error)).rstrip(), final=False)


def out_of_memory_text(text: str, cfg: config.Config, ranks: int) -> str:
    """The error, and if the planner can make it, advice on what would fit."""
    text = f"out of memory: {text}"
    with contextlib.suppress(Exception):
        # there may be too little memory left for this, or no planner
        from extras.planner.advice import out_of_memory

        text += "\n" + out_of_memory(cfg, ranks, config.words_without("--launch="))
    return text


def final_exit_code(cfg: config.Config, launch_id: str | None) -> int | None:
    """The exit code of this launch's final failure, if torchrun restarted it although that cannot
    help; else None."""
    if not launch_id:
        return None
    for failure in failures(config.run_folder(cfg), launch_id):
        if failure["final"]:
            return failure["exit_code"]
    return None


def exit_immediately(code: int) -> NoReturn:
    """Exits a failed process immediately: teardown would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(code)
