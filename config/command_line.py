"""The command line: CONFIG, flags, --section.key=value, --help."""

import argparse
import contextlib
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from config.option import ConfigError, Problems, removed_extra
from config.options import Config
from config.read import load, load_resolved, nearest
from system import INPUT_IS_WRONG, TRANSIENT_ERRORS, print_error

REPO = pathlib.Path(__file__).parent.parent


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see --help")


def argument_parser() -> Parser:
    """A parser of command lines that begin with CONFIG. A tool adds its flags. parse_arguments() adds
    the options."""
    parser = Parser(prog="run_train.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG", type=config_path)
    return parser


def config_path(word: str) -> str:
    """The path of CONFIG, which is a file, or the name of one in configs/. Raises ConfigError."""
    if "/" in word or os.path.isfile(word):
        return word
    paths = {path.stem: str(path) for path in sorted((REPO / "configs").glob("*.toml"))}
    name = word.removesuffix(".toml")
    if name not in paths and os.path.exists(word):
        return word
    if name not in paths:
        raise ConfigError(
            f"{word}: neither a file nor a name in configs/: {', '.join(paths)}{nearest(name, paths)}"
        )
    return paths[name]


def parse_arguments(argv: list[str], parser: Parser | None = None) -> argparse.Namespace:
    """Parses the command line of train.py, or of a tool with its own parser. Raises ConfigError."""
    if parser is None:
        parser = argument_parser()
        parser.add_argument("--eval-only", action="store_true")
    args, args.overrides = parser.parse_known_args(argv)
    unknown = [word for word in args.overrides if not re.match("--[^=]+=", word)]
    if unknown:
        parser.error(
            f"{', '.join(unknown)}: unknown; CONFIG comes first, then options as "
            "--section.key=value, in one word"
        )
    return args


def from_command_line(
    argv: list[str], usage: str, parser: Parser | None = None, resolved: bool = False
) -> tuple[argparse.Namespace, Config]:
    """A program's arguments and configuration. parser: as in parse_arguments(). resolved: whether the
    file is one that to_toml() wrote.

    Prints every problem and exits with 2 if the command line or the configuration is invalid. Exits
    with 0 after --help.
    """
    with exits_if_input_is_wrong():
        if any(word in ("--help", "-h") or word.startswith("--help=") for word in argv):
            from config.help import print_help

            print_help(argv, usage)
            sys.exit()
        args = parse_arguments(argv, parser)
        return args, load_resolved(args.config) if resolved else load(args.config, args.overrides)


@contextlib.contextmanager
def exits_if_input_is_wrong() -> Iterator[None]:
    """If its body raises ConfigError, or imports an extra that was removed, prints a line for each
    problem and exits with 2."""
    try:
        yield
    except (ConfigError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not removed_extra(error):
            raise
        print_error(removed_extra(error) or str(error))
        sys.exit(INPUT_IS_WRONG)


def run_tool(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a tool's main() with the command line, and exits with its result.

    Exits with 2 for invalid input, with 1 for an error of a disk or a machine, and with 130 after
    Ctrl-C, as a shell does. These print a line for each problem, and no traceback.
    """
    try:
        with exits_if_input_is_wrong():
            sys.exit(main(sys.argv[1:]))
    except OSError as error:
        if error.filename is None:  # raised by a library
            raise
        hint = "; the same command may work later" if error.errno in TRANSIENT_ERRORS else ""
        print_error(f"{error.filename}: {error.strerror}{hint}")
        sys.exit(1)
    except Problems as error:  # of a disk, not of the input
        print_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def command(*words: object) -> str:
    """A run_train.sh command, to paste into the shell that started this process."""
    script = os.path.relpath(REPO / "run_train.sh")
    if script.startswith("../../"):
        script = str(REPO / "run_train.sh")
    elif not script.startswith("../"):
        script = f"./{script}"
    return shlex.join([script, *map(str, words)])
