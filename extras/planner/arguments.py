"""The arguments of --dry-run. Needs no torch."""

import argparse
from collections.abc import Sequence
from typing import Any

from schema import positive


def add_arguments(parser: argparse.ArgumentParser, planning: bool) -> None:
    """Adds what --dry-run takes. planning: whether it is given; without it these are an error of the command line."""

    def add(flag: str, **options: Any) -> None:
        if not planning:
            takes = 0 if "action" in options else None  # values: none, or one
            options = {"action": NeedsDryRun, "nargs": takes, "dest": options.get("dest")}
        parser.add_argument(flag, **options)

    for flag in ("--gpu", "--plot"):
        add(flag)
    add("--json", action="store_true")
    add("--config", action="store_true", dest="show_config")
    add("--world-size", type=lambda text: [positive(n, int) for n in text.split(",")])
    add("--gpu-memory-gib", type=positive)
    add("--gpus-per-node", type=lambda text: positive(text, int))


class NeedsDryRun(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} needs --dry-run")
