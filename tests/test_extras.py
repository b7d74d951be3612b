"""Without extras/ and tools/ the repository trains, resumes and evaluates as before, and refuses what
needs them. Every test runs in a copy without these folders."""

import json
import pathlib
import subprocess
import sys

import pytest

import config
from model.build import build_model
from tests.conftest import copy_tracked, launch, make_config, needs_extra, rows

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
    sections = {
        "data": {"sources": sources},
        "optim": {"schedule_steps": 4},
        "eval": {"batches": 2},
        "checkpoint": {},
    }
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
    ("parallel.float8=rowwise", "extras/float8"),
    ("optim.name=muon", "extras/optimizers"),
    ("optim.state_dtype=bfloat16", "extras/optimizers"),
    ("profile.at_step=1", "extras/profiler"),
    ("model.init_from=folder", "extras/huggingface"),
    ("data.tokenizer=owner/name", "extras/huggingface"),
    ("data.path=elsewhere", "tools/prepare"),
]


@pytest.mark.parametrize(("option", "folder"), REMOVED)
def test_an_option_whose_extra_was_removed_exits_with_2(option, folder, core, write_config):
    path = write_config()
    done = launch(path, f"--{option}", repo=core)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if folder in line]
    assert "this copy of the repository" in line
    assert not [*path.parent.glob("outputs/*")]


@needs_extra("lora", "chat")
@pytest.mark.parametrize("extra", ["lora", "chat"])
def test_import_of_a_removed_extra_names_its_folder(extra, tmp_path, monkeypatch):
    """Also where extras/ has others, as for an extra that needs another one."""
    monkeypatch.setattr("extras.__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"extras.{extra}", raising=False)
    for module in [name for name in sys.modules if name.startswith(f"extras.{extra}.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ModuleNotFoundError) as error:
        if extra == "lora":
            build_model(make_config().model, config.Lora())
        else:
            from extras.chat.packing import Packed  # noqa: F401
    assert f"needs extras/{extra}," in config.removed_extra(error.value)


def test_plan_without_the_planner_is_refused(core, write_config):
    done = launch(write_config(), "--dry-run", repo=core)
    assert done.returncode == 2 and "needs tools/planner" in done.stderr


def test_tests_of_the_core_are_collected(core):
    """And most configurations load."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run([sys.executable, *command], cwd=core, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "tests/test_training.py" in done.stdout and "tests/extras" not in done.stdout
    code = "from tests.conftest import shipped_configs; print(len(shipped_configs()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=core, capture_output=True, text=True)
    assert int(done.stdout) >= 10, done.stderr
