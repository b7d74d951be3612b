"""Without extras/ and tools/ the repository trains, resumes and evaluates as before, and refuses what
needs them. Every test runs in a copy without these folders."""

import json
import pathlib

import pytest

from tests.conftest import copy_tracked, launch, rows

pytestmark = [pytest.mark.early, pytest.mark.slow]


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("extras") / "core"
    return copy_tracked(folder, without=("extras", "tools", "tests/extras", "tests/tools"))


def test_core_trains_resumes_and_evaluates_as_the_full_repository(core, write_config, tmp_path):
    """On a mixture that the full one prepared: with tp, then cp, then one rank, against one rank."""
    sources = []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.jsonl"
        texts = [f"{name} text number {i} of many words" * 20 for i in range(200)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"source": str(path)})
    sections = {"data": {"sources": sources}, "eval": {"batches": 2}, "checkpoint": {}}
    sections["optim"] = {"schedule_steps": 4}
    path = write_config("core", **sections)
    done = [
        launch(write_config("full", **sections), cwd=tmp_path),
        launch(path, "--train.steps=2", "--parallel.tp=2", nproc=2, cwd=tmp_path, repo=core),
        launch(path, "--train.steps=3", "--parallel.cp=2", nproc=2, cwd=tmp_path, repo=core),
        launch(path, cwd=tmp_path, repo=core),
        launch(path, "--eval-only", cwd=tmp_path, repo=core),
    ]
    assert [run.returncode for run in done] == [0] * 5, [run.stderr for run in done]
    expected = rows(tmp_path / "outputs/full")
    assert len(expected) == 4
    for row, other in zip(rows(tmp_path / "outputs/core"), expected, strict=True):
        for key in ("step", "loss", "grad_norm", "batch_digest"):
            assert row[key] == pytest.approx(other[key], rel=1e-5), key
    evaluated = json.loads(done[4].stdout.splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(rows(tmp_path / "outputs/full", "eval")[-1]["loss"])


# an option, what its line says that this copy does not have
REMOVED = [
    ("--parallel.float8=rowwise", "extras/float8"),
    ("--model.init_from=folder", "extras/huggingface"),
    ("--data.path=elsewhere", "tools/prepare"),
    ("--dry-run", "tools/planner"),
]


@pytest.mark.parametrize(("option", "folder"), REMOVED)
def test_an_option_whose_extra_was_removed_exits_with_2(option, folder, core, write_config):
    path = write_config()
    done = launch(path, option, repo=core)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if folder in line]
    assert "this copy" in line
    assert not [*path.parent.glob("outputs/*")]
