"""Parses the command line of --dry-run. Needs no torch, so invalid input fails in milliseconds."""

import argparse
import contextlib
import math
from argparse import Namespace
from typing import Any

import config


def parse(argv: list[str], usage: str) -> tuple[Namespace, config.Config]:
    """Returns the planner's arguments and the configuration. Exits with 2 if they are invalid.
    `usage` is the text of --help."""
    parser = config.argument_parser()
    parser.add_argument("--dry-run", action="store_true")  # run_train.sh passes it on
    parser.add_argument("--gpu")
    parser.add_argument("--plot")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", action="store_true", dest="show_config")
    parser.add_argument("--world-size", type=world_sizes)
    parser.add_argument("--gpu-memory-gib", type=positive)
    parser.add_argument("--gpus-per-node", type=positive_integer, default=8)
    return config.from_command_line(argv, usage, parser)


def positive_integer(text: str) -> int:
    return positive(text, int)


def world_sizes(text: str) -> list[int]:
    return [positive_integer(number) for number in text.split(",")]


def positive(text: str, kind: type = float) -> Any:
    """A positive finite number, as a type for argparse."""
    with contextlib.suppress(ValueError):
        number = kind(text)
        if 0 < number < math.inf:
            return number
    requirement = "an integer" if kind is int else "finite"
    raise argparse.ArgumentTypeError(f"{text} must be {requirement}, above 0")
