"""Every situation of the tables beside this file, through run_train.sh."""

import importlib
import pathlib
import re

import pytest

import config
from tests.conftest import REPO, launch
from tests.field.situation import BASE, Situation

FOLDER = pathlib.Path(__file__).parent
NO_TABLE = ("__init__", "situation", "test_field")


def collect() -> list[Situation]:
    situations = []
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in NO_TABLE:
            situations += importlib.import_module(f"tests.field.{path.stem}").SITUATIONS
    return situations


SITUATIONS = collect()


def quoted_messages() -> list[re.Pattern]:
    """The messages that docs/troubleshooting.md explains, with … for each value."""
    page = (REPO / "docs/troubleshooting.md").read_text()
    patterns = []
    for block in re.findall(r"^```text message\n(.*?)^```", page, re.M | re.S):
        for line in block.splitlines():
            constant = [re.escape(part.strip()) for part in line.split("…")]
            patterns.append(re.compile(".*".join(constant)))
    return patterns


def make(situation: Situation, folder: pathlib.Path) -> None:
    (folder / "base.toml").write_text(BASE.replace("FOLDER", str(folder)))
    for name, content in situation.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content)


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_situation(situation, tmp_path):
    for extra in situation.needs:
        if not config.has_extra(extra):
            pytest.skip(f"needs extras/{extra}")
    make(situation, tmp_path)
    words = situation.command.replace("{folder}", str(tmp_path)).split(" ")
    ended = launch(*words, nproc=situation.ranks, cwd=tmp_path, **situation.environment)
    output = ended.stdout + ended.stderr
    assert ended.returncode == situation.exit_code, output
    plain = " ".join(output.split())
    for text in situation.says:
        assert text in plain, output
    for text in ("Traceback", *situation.never):
        assert text not in output, output
    if situation.exit_code == 2:
        assert any(message.search(plain) for message in quoted_messages()), (
            f"docs/troubleshooting.md explains no line of: {output}"
        )
    if situation.check:
        situation.check(tmp_path)


def test_names_are_unique():
    names = [situation.name for situation in SITUATIONS]
    assert len(names) == len(set(names))
