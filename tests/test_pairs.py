"""Options in pairs: real runs, in which each option has each of its values and any two that touch the same code are
together, against tests/plain.py, which knows nothing of ranks. What is combined is in tests/pairs.py."""

import math
import pathlib
import re
import shutil
import typing
from dataclasses import MISSING
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest

import config
from data.prepare import prepare
from tests import cases, pairs, plain
from tests.conftest import REPO, lacks, make_config, rows
from tests.test_training import weights

pytestmark = [pytest.mark.first, pytest.mark.slow]

EXACT = 1e-5  # in float32


class Leg(NamedTuple):
    """A launch, which begins after a step, 0 or that of a checkpoint."""

    sections: dict
    begins_after: int
    refused: str = ""  # part of why it is


class Trained(NamedTuple):
    case: pairs.Case
    folder: pathlib.Path
    legs: list[Leg]
    refused: list[str]  # why each leg was


def legs_of(sections: dict) -> list[Leg]:
    """With [checkpoint] a run is started again in its middle, with what allow_changed allows changed."""
    checkpoint = sections.get("checkpoint")
    if checkpoint is None:
        return [Leg(sections, 0)]
    if checkpoint["resume"] == "never":
        return [Leg(sections, 0), Leg(sections, pairs.STEPS, 'resume = "never"')]
    begun = {
        **sections,
        "train": {**sections["train"], "steps": pairs.FIRST_LEG},
        "optim": {
            **sections["optim"],
            "schedule_steps": sections["optim"]["schedule_steps"] or pairs.STEPS,
        },
        "checkpoint": {**checkpoint, "resume": "auto"},
    }
    before = pairs.FIRST_LEG if checkpoint["resume"] == "auto" else checkpoint["resume"]
    return [Leg(begun, 0), Leg(pairs.changed(sections), before)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepared) -> pathlib.Path:
    """Of texts, bases, adapters, prepared data and runs."""
    found = tmp_path_factory.mktemp("pairs")
    fill(found, prepared)
    return found


def fill(folder: pathlib.Path, prepared: pathlib.Path) -> None:
    pairs.materials(folder)
    (folder / "tokenizer").mkdir()
    for copy in ("tokenizer.model", "tokenizer/tokenizer.model"):
        shutil.copy(prepared / "tokenizer.model", folder / copy)


@pytest.fixture(scope="module")
def array(folder) -> pairs.Array:
    return pairs.Array(folder)


def train(array: list[pairs.Case], folder, on_ranks) -> list[Trained]:
    """Each case in one process group with the others of its number of ranks."""
    by_ranks: dict[int, list[Trained]] = {}
    data: dict[str, str] = {}
    for number, case in enumerate(array):
        sections = pairs.sections_of(case, folder)
        sections["data"]["path"] = prepared_once(sections, folder, data)
        sections["run"] |= {"name": f"case-{number}", "output_dir": str(folder / "runs")}
        run = Trained(case, folder / "runs" / f"case-{number}", legs_of(sections), [])
        by_ranks.setdefault(pairs.ranks_of(case), []).append(run)
    for ranks, runs in sorted(by_ranks.items()):
        launches = []
        for run in runs:
            launches += [(run, leg.sections) for leg in run.legs]
        sections = [sections for _, sections in launches]
        refused = on_ranks(ranks, cases.train_in_turn, sections, timeout=900)[0]
        for (run, _), why in zip(launches, refused):
            run.refused.append(why)
    return [run for runs in by_ranks.values() for run in runs]


def prepared_once(sections: dict, folder: pathlib.Path, made: dict[str, str]) -> str:
    """The folder of its data; cases may share it."""
    text = {key: value for key, value in sections["data"].items() if key != "document_mask"}
    path = made.setdefault(repr(text), str(folder / f"data-{len(made)}"))
    cfg = make_config(**{**sections, "data": {**sections["data"], "path": path}})
    with mock.patch("data.prepare.worker_count", lambda: 0):
        prepare(cfg)
    return path


class Near(NamedTuple):
    """How far from the plain run a run may be, relatively."""

    first_loss: float
    loss: float
    grad_norm: float


def near(cfg: config.Config) -> Near:
    p = cfg.parallel
    if p.float8 != "none":
        return Near(2e-2, 5e-2, 0.3)
    if p.param_dtype != "float32" or p.output_dtype == "bfloat16":
        return Near(2**-8, 2**-6, 2**-3)
    if p.reduce_dtype != "float32" or cfg.optim.state_dtype != "float32":
        return Near(EXACT, 2**-7, 2**-5)
    return Near(EXACT, EXACT, 1e-4)


def test_every_option_has_an_entry():
    known = {*pairs.OPTIONS, *pairs.MESH_OPTIONS, *pairs.IN_EVERY_RUN, *pairs.ELSEWHERE}
    known |= pairs.in_a_mixture()
    for option in pairs.options():
        assert option in known, (
            f"{option} is in no run of this file: give it values in tests/pairs.py: OPTIONS, have "
            "tests/plain.py compute what they do, and name it in the ROOMS whose code reads it; or "
            "enter in ELSEWHERE the test that observes it"
        )
    unknown = known - pairs.options().keys() - {*pairs.SWITCHES, "mesh"}
    assert not unknown, f"config.py has no such options: {unknown}"
    for option in pairs.OPTIONS:
        assert pairs.rooms_of(option), f"{option} is in none of the ROOMS of tests/pairs.py"


def test_every_option_has_two_values_besides_its_default():
    """Or all that it can have."""
    for option, field in pairs.options().items():
        if option in pairs.OPTIONS and option not in pairs.ELSEWHERE:
            annotation = config.SCHEMA.options[option].annotation
            wanted = min(2, choices(annotation) - (field.default is not MISSING))
            default = [*field.default] if isinstance(field.default, tuple) else field.default
            others = [value for value in pairs.OPTIONS[option] if value != default]
            assert len(others) >= wanted, f"{option}: {others} besides {default}"


def choices(annotation: Any) -> float:
    """How many values an option can have."""
    count = 0.0
    for kind in config.schema.members(annotation):
        if kind is bool:
            count += 2
        elif typing.get_origin(kind) is Literal:
            count += len(typing.get_args(kind))
        else:
            return math.inf
    is_optional = type(None) in typing.get_args(annotation)
    return count + is_optional


def test_what_no_run_shows_is_observed_elsewhere():
    for option, test in pairs.ELSEWHERE.items():
        file, name = test.split(": ")
        if (REPO / file).exists() or not file.startswith("tests/extras/"):
            assert re.search(rf"^def {name}\(", (REPO / file).read_text(), re.M), (option, test)


def test_every_option_has_each_of_its_values_in_a_run(array, folder):
    """And two that share a room are together, but for the pairs that are refused."""
    runs = array.cases[: pairs.QUICK]
    for option, values in pairs.OPTIONS.items():
        for index in array.values[option]:
            value = values[index]
            alone = pairs.joined({}, option, index)
            if lacks(**pairs.sections_of(alone, folder)):
                continue
            assert any(
                pairs.counts(case, option) and case.get(option, 0) == index for case in runs
            ), (option, value)
    assert array.pairs_after[-1] == array.pairs - len(array.refused)
    assert array.pairs_after[min(len(runs), pairs.QUICK) - 1] >= 0.94 * array.pairs_after[-1]


def test_runs_are_the_plain_ones(array, folder, on_ranks):
    check_all(train(array.cases[: pairs.QUICK], folder, on_ranks))


@pytest.mark.nightly
def test_runs_of_any_two_options_are_the_plain_ones(tmp_path, prepared, on_ranks):
    """Of options that share no room too, compiled ones, on more meshes."""
    fill(tmp_path, prepared)
    check_all(train(pairs.Array(tmp_path, whole=True).cases, tmp_path, on_ranks))


def check_all(runs: list[Trained]) -> None:
    """Fails with all cases that differ."""
    problems = []
    for run in runs:
        try:
            check(run)
        except AssertionError as error:
            changed = {option: pairs.value_of(run.case, option) for option in run.case}
            problems.append(f"{run.folder.name} {changed}:\n{error}")
    assert not problems, "\n\n".join([f"{len(problems)} of {len(runs)} runs", *problems])


def check(run: Trained) -> None:
    for leg, why in zip(run.legs, run.refused, strict=True):
        assert leg.refused in why and bool(leg.refused) == bool(why), why
    legs = [leg for leg in run.legs if not leg.refused]
    configs = [make_config(**leg.sections) for leg in legs]
    with pairs.larger_weights():
        plain_run = plain.Run(configs[0])
    loss_means: dict[int, float] = {}  # by the step of the row
    saved: set[int] = set()
    for number, (leg, cfg) in enumerate(zip(legs, configs)):
        last = cfg.train.steps
        if number + 1 < len(legs):  # what the next launch goes back behind is dropped
            last = legs[number + 1].begins_after
        plain_run.train(cfg, leg.begins_after + 1, last)
        loss_means |= means(plain_run, cfg, leg.begins_after + 1, last)
        if cfg.checkpoint:
            saved = {step for step in saved if step <= leg.begins_after}
            saved = kept_of(saved | saved_by(cfg, leg.begins_after), cfg)
    tolerance = near(configs[0])
    check_rows(rows(run.folder), plain_run, loss_means, tolerance)
    check_evaluations(rows(run.folder, "eval"), plain_run, tolerance)
    assert (run.folder / "tensorboard").exists() == configs[0].log.tensorboard
    folders = sorted((run.folder / "checkpoints").glob("step-????????"))
    assert [int(path.name[5:]) for path in folders] == sorted(saved)
    if saved and tolerance.loss == EXACT:
        stored = weights(run.folder, pairs.STEPS)
        trained = [name for name in plain_run.weights if not configs[0].lora or "lora_" in name]
        for name in trained:
            ours = stored[f"model.{name}"].double()
            theirs = plain_run.weights[name]
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm(), name


def means(run: plain.Run, cfg: config.Config, first: int, last: int) -> dict[int, float]:
    """The mean loss over the targets since the row before, by the step of each row of a launch."""
    found = {}
    since = []
    for step in range(first, last + 1):
        since.append(run.rows[step])
        if step in (1, cfg.train.steps) or step % cfg.log.every_steps == 0:
            targets = sum(row["targets"] for row in since)
            found[step] = sum(row["loss"] * row["targets"] for row in since) / targets
            since = []
    return found


def check_rows(
    found: list[dict], plain_run: plain.Run, loss_means: dict[int, float], tolerance: Near
) -> None:
    assert [row["step"] for row in found] == [*loss_means]
    for ours in found:
        step = ours["step"]
        theirs = plain_run.rows[step]
        assert ours["batch_digest"] == theirs["batch_digest"], step
        assert ours["tokens"] == sum(plain_run.rows[s]["tokens"] for s in range(1, step + 1))
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-9)
        loss = tolerance.first_loss if step == 1 else tolerance.loss
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=loss), step
        assert ours["loss_mean"] == pytest.approx(loss_means[step], rel=loss), step
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance.grad_norm)


def check_evaluations(found: list[dict], plain_run: plain.Run, tolerance: Near) -> None:
    assert [row["step"] for row in found] == [*plain_run.evaluations]
    for ours, theirs in zip(found, plain_run.evaluations.values()):
        for key, value in theirs.items():
            its = [*ours[key].values()] if key.endswith("_by_source") else ours[key]
            assert its == pytest.approx(value, rel=tolerance.loss), key


def saved_by(cfg: config.Config, begins_after: int) -> set[int]:
    """The steps after which a launch saves."""
    steps = range(begins_after + 1, cfg.train.steps + 1)
    every = cfg.checkpoint.save_every_steps
    return {step for step in steps if step == cfg.train.steps or (every and step % every == 0)}


def kept_of(saved: set[int], cfg: config.Config) -> set[int]:
    """The newest keep_last, and milestones."""
    c = cfg.checkpoint
    newest = sorted(saved)[-(c.keep_last or len(saved)) :]
    return {
        step
        for step in saved
        if step in newest or (c.keep_every_steps and step % c.keep_every_steps == 0)
    }
