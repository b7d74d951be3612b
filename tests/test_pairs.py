"""Options in pairs: real runs, in which each option has each of its values and any two that touch the same code are
together, against tests/plain.py, which knows nothing of ranks. What is combined is in tests/pairs.py."""

import contextlib
import shutil
from typing import NamedTuple
from unittest import mock

import pytest

import config
from data.prepare import prepare
from tests import cases, pairs, plain
from tests.conftest import make_config, rows
from tests.test_training import weights

pytestmark = [pytest.mark.first, pytest.mark.slow]

# What a run that is allowed to goes on with.
CHANGED = {"train.seq_len": 16, "train.global_batch_size": 4}


class Leg(NamedTuple):
    """A launch, which begins after a step, 0 or that of a checkpoint."""

    sections: dict
    begins_after: int
    refused: str = ""  # part of why it is


class Trained(NamedTuple):
    case: pairs.Case
    name: str  # of its folder
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
    again = {**sections, "train": {**sections["train"]}}
    for name in checkpoint["allow_changed"]:
        again["train"][name.removeprefix("train.")] = CHANGED[name]
    before = pairs.FIRST_LEG if checkpoint["resume"] == "auto" else checkpoint["resume"]
    return [Leg(begun, 0), Leg(again, before)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepared):
    found = tmp_path_factory.mktemp("pairs")
    pairs.materials(found)
    (found / "tokenizer").mkdir()
    for copy in ("tokenizer.model", "tokenizer/tokenizer.model"):
        shutil.copy(prepared / "tokenizer.model", found / copy)
    return found


@pytest.fixture(scope="module")
def trained(folder, on_ranks) -> list[Trained]:
    return train(pairs.Array(folder).cases[: pairs.QUICK], folder, on_ranks)


def train(array: list[pairs.Case], folder, on_ranks) -> list[Trained]:
    found: dict[int, list[Trained]] = {}
    data: dict[str, str] = {}
    for number, case in enumerate(array):
        sections = pairs.sections_of(case, folder)
        sections["data"]["path"] = prepared_once(sections, folder, data)
        sections["run"] |= {"name": f"case-{number}", "output_dir": str(folder / "runs")}
        run = Trained(case, f"case-{number}", legs_of(sections), [])
        found.setdefault(pairs.ranks_of(case), []).append(run)
    import os  # TEMP
    found = {r: v for r, v in found.items() if str(r) in os.environ.get("PR", "1,2,4")}  # TEMP
    for ranks, runs in sorted(found.items()):
        launches = []
        for run in runs:
            launches += [(run, leg) for leg in run.legs]
        sections = [leg.sections for _, leg in launches]
        refused = on_ranks(ranks, cases.train_in_turn, sections, timeout=500)[0]
        for (run, _), why in zip(launches, refused):
            run.refused.append(why)
    return sum(found.values(), [])


def prepared_once(sections: dict, folder, made: dict[str, str]) -> str:
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
        return Near(1e-2, 1e-2, 0.2)
    if p.param_dtype != "float32" or p.output_dtype == "bfloat16":
        return Near(2**-8, 2**-8, 2**-4)
    if p.reduce_dtype != "float32" or cfg.optim.state_dtype != "float32":
        return Near(1e-5, 2**-8, 2**-6)
    return Near(1e-5, 1e-5, 1e-4)


def test_it(trained, folder):
    bad = []
    import time
    t = time.time()
    for run in trained:
        try:
            check(run, folder)
        except Exception as error:
            bad.append((run.name, {o: pairs.value_of(run.case, o) for o in run.case if run.case[o]}, f"{type(error)} {error}"[:900]))
    print("check", time.time() - t)
    for b in bad:
        print(*b, sep="\n   ")
    assert not bad, len(bad)


def check(run: Trained, folder) -> None:
    output = folder / "runs" / run.name
    for leg, why in zip(run.legs, run.refused, strict=True):
        assert leg.refused in why and bool(leg.refused) == bool(why), why
    legs = [leg for leg in run.legs if not leg.refused]
    configs = [make_config(**leg.sections) for leg in legs]
    wanted = plain.Run(configs[0])
    reported: dict[int, float] = {}  # the mean loss since the row before, by step
    saved: set[int] = set()
    for i, (leg, cfg) in enumerate(zip(legs, configs)):
        last = cfg.train.steps
        if i + 1 < len(legs):
            last = min(last, legs[i + 1].begins_after)
        wanted.train(cfg, leg.begins_after + 1, last)
        since = []
        for step in range(leg.begins_after + 1, last + 1):
            row = wanted.rows[step]
            since.append(row)
            if step in (1, cfg.train.steps) or step % cfg.log.every_steps == 0:
                targets = sum(row["targets"] for row in since)
                reported[step] = sum(row["loss"] * row["targets"] for row in since) / targets
                since = []
        if cfg.checkpoint:
            saved = {step for step in saved if step <= leg.begins_after}
            saved |= saved_by(cfg, leg.begins_after)
            saved = kept_of(saved, cfg)
    tolerance = near(configs[0])
    found = rows(output)
    assert [row["step"] for row in found] == [*reported]
    tokens = 0
    by_step = {row["step"]: row for row in found}
    for step, row in wanted.rows.items():
        tokens += row["tokens"]
        if step not in by_step:
            continue
        ours = by_step[step]
        assert ours["batch_digest"] == row["batch_digest"], step
        assert ours["tokens"] == tokens
        assert ours["lr"] == pytest.approx(row["lr"], rel=1e-9)
        loss_near = tolerance.first_loss if step == 1 else tolerance.loss
        assert ours["loss"] == pytest.approx(row["loss"], rel=loss_near), step
        assert ours["loss_mean"] == pytest.approx(reported[step], rel=loss_near), step
        assert ours["grad_norm"] == pytest.approx(row["grad_norm"], rel=tolerance.grad_norm), step
    evaluations = rows(output, "eval")
    assert [row["step"] for row in evaluations] == [*wanted.evaluations]
    for ours, theirs in zip(evaluations, wanted.evaluations.values()):
        for key, value in theirs.items():
            its = [*ours[key].values()] if key.endswith("_by_source") else ours[key]
            assert its == pytest.approx(value, rel=tolerance.loss), key
    folders = sorted((output / "checkpoints").glob("step-????????"))
    assert [int(path.name[5:]) for path in folders] == sorted(saved)
    if saved and tolerance.loss == 1e-5:
        stored = weights(output, pairs.STEPS)
        for name, weight in wanted.weights.items():
            if f"model.{name}" in stored or not configs[0].lora:
                ours = stored[f"model.{name}"].double()
                assert (ours - weight).norm() <= 1e-4 * weight.norm(), name
    assert (output / "tensorboard").exists() == configs[0].log.tensorboard


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
