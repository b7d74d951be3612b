"""The arguments of --dry-run, which config/command_line.py adds to the command line. Needs no torch."""

import argparse
from collections.abc import Sequence
from typing import Any

from config import positive


def add_arguments(parser: argparse.ArgumentParser, planning: bool) -> None:
    """Adds the arguments that require --dry-run. planning: whether it is given, else each errs."""

    def add(flag: str, **options: Any) -> None:
        if not planning:
            # None: it is followed by a value
            values = 0 if "action" in options else None
            options = {"action": NeedsDryRun, "nargs": values, "dest": options.get("dest")}
        parser.add_argument(flag, **options)

    add("--gpu")
    add("--plot")
    add("--json", action="store_true")
    add("--config", action="store_true", dest="show_config")
    add("--world-size", type=world_sizes)
    add("--gpu-memory-gib", type=positive)
    add("--gpus-per-node", type=positive_integer)


def positive_integer(text: str) -> int:
    return positive(text, int)


def world_sizes(text: str) -> list[int]:
    return [positive_integer(number) for number in text.split(",")]


class NeedsDryRun(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence | None,
        option_string: str | None = None,
    ) -> None:
        hint = ""
        if option_string == "--config":
            hint = "; the configuration's own file comes first, without --config"
        parser.error(f"{option_string} needs --dry-run{hint}")
