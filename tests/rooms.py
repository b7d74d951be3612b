"""Optional rooms: the files and folders that `rm` removes. What is left works as before, and so do its tests: one that
needs a removed room is skipped, and says so."""

import functools
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable

import pytest

REPO = pathlib.Path(__file__).parent.parent
OPTIONAL = (
    "planner",
    "huggingface",
    "migrate",
    "generate.py",
    "extras/reports/report.py",
    "board.py",
    "extras/reports/tracker.py",
    "benchmarks",
    "minimal.py",
    "extras/optimizers/adamw_bfloat16.py",
    "extras/optimizers/muon.py",
    "data/show.py",
    "data/hub.py",
    "data/arrow.py",
    "data/mixture.py",
    "data/tokenizer_json.py",
    "data/text_bytes.py",
    "extras/chat/conversations.py",
    "extras/chat/messages.py",
    "extras/chat/packing.py",
    "extras/chat/template.py",
    "extras/chat/make_chat.py",
    "extras/chat/terminal.py",
    "checkpoint/__main__.py",
    "checkpoint/tools.py",
    "checkpoint/staging.py",
    "checkpoint/plan_cache.py",
    "lifecycle/descriptors.py",
    "extras/reports/profiler.py",
    "launch/slurm.py",
    "extras/lora/adapters.py",
    "extras/lora/nf4.py",
    "extras/float8/matmul.py",
    "extras/float8/all_gather.py",
    "parallel/tensor.py",
    "parallel/context.py",
    "parallel/collectives.py",
    "parallel/selective.py",
    "parallel/matmul_order.py",
    "parallel/replicated.py",
    "parallel/optional_patches.py",
)

LACK = "Skipped: needs"


@functools.cache
def missing() -> tuple[str, ...]:
    return tuple(room for room in OPTIONAL if not (REPO / room).exists())


@functools.cache
def signs_of(room: str) -> re.Pattern:
    """What an error says that is due to this room's absence."""
    module = room.removesuffix(".py").replace("/", ".")
    parent, _, name = map(re.escape, module.rpartition("."))
    signs = [
        rf"needs (\S+ and )*{re.escape(room)}/?( and \S+)*, which this copy of the repository does not have",
        rf"No module named '?{re.escape(module)}\b",
        rf"(No such file or directory|can't open file).*/{re.escape(room)}\b",
    ]
    if parent:
        signs += [
            f"cannot import name '{name}' from '{parent}'",
            f"module '{parent}' has no attribute '{name}'",
        ]
    return re.compile("|".join(signs))


def needed(error: str) -> str | None:
    """The removed room that an error is due to; of any other error None."""
    return next((room for room in missing() if signs_of(room).search(error)), None)


def skip_for_lack(report: pytest.TestReport | pytest.CollectReport, error: str) -> None:
    """Turns a failure that is due to a removed room into a skip."""
    if report.failed and (room := needed(error)):
        report.outcome, report.longrepr = (
            "skipped",
            (report.nodeid.partition("::")[0], 0, f"{LACK} {room}"),
        )


def copy_tracked(folder: pathlib.Path, without: Iterable[str] = ()) -> pathlib.Path:
    """The repository as a newcomer has it, tracked files alone, and without these rooms."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        if (REPO / name).exists() and not any(
            f"{name}/".startswith(f"{room}/") for room in without
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)
    return folder
