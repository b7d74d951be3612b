"""A first use: what somebody forgets, mistypes, or does again."""

import json
from pathlib import Path

import pytest

from tests.conftest import launch, words
from tests.field.situation import DONE, Situation

SAVES = "--checkpoint.save_every_steps=1 --data.source=mine.txt"
TEXT: dict = {"mine.txt": words(1, 4000)}


def run(folder: Path, command: str) -> None:
    """What was done before the situation."""
    ended = launch(*command.split(" "), cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def trained(path: Path) -> None:
    """A finished run of two steps."""
    run(path.parent, f"base.toml {SAVES}")


def exported(path: Path) -> None:
    """The export of such a run, whose tokenizer has 300 entries."""
    options = "--run.name=first --model.vocab_size=300 --data.path=first"
    run(path.parent, f"base.toml {SAVES} {options}")
    run(path.parent, f"-m huggingface export outputs/first {path.name}")


def has_epochs(folder: Path) -> None:
    """Two steps of eight samples of 32 tokens; a little of the text is held out."""
    last = json.loads((folder / "outputs/field/metrics.jsonl").read_text().splitlines()[-1])
    tokens = json.loads((folder / "prepared/manifest.json").read_text())["tokens"]["train"]
    assert last["epochs"] == pytest.approx(2 * 8 * 32 / tokens, rel=0.03)


def has_tokenizer_of_the_weights(folder: Path) -> None:
    tokenizers = [folder / name / "tokenizer.model" for name in ("hf", "prepared", "outputs/field")]
    assert len({path.read_bytes() for path in tokenizers}) == 1


def keeps_earlier_options(folder: Path) -> None:
    first_line, *_ = (folder / "outputs/field/config.toml").read_text().splitlines()
    assert first_line == "# until step 2: optim.lr = 0.003, train.steps = 2"


SITUATIONS = [
    Situation(
        "a configuration without [checkpoint]",
        "base.toml --data.source=mine.txt",
        (
            "nothing will be saved: this configuration has no [checkpoint];",
            "finished without [checkpoint]: nothing was saved",
            "epochs in 2 steps",
            DONE,
        ),
        TEXT,
        check=has_epochs,
    ),
    Situation(
        "a sweep that forgets --run.name, on a run that has steps left",
        f"base.toml {SAVES} --optim.lr=1e-3 --train.steps=3",
        (
            "changed since step 2: optim.lr 0.003 -> 0.001, train.steps 2 -> 3; another run: --run.name=NAME",
            "resuming after step 2",
            "step 3/3",
        ),
        {**TEXT, "outputs": trained},
        check=keeps_earlier_options,
    ),
    Situation(
        "a sweep that forgets --run.name, on a finished run",
        f"base.toml {SAVES} --optim.lr=1e-3",
        (
            "finished at step 2; train.steps = 2 asks for no more",
            "changed since step 2: optim.lr 0.003 -> 0.001; another run: --run.name=NAME",
        ),
        {**TEXT, "outputs": trained},
    ),
    Situation(
        "a run that went back to a step, and the command that it prints for more",
        f"base.toml {SAVES} --checkpoint.resume=1",
        ("--checkpoint.resume=auto --train.steps=4", DONE),
        {**TEXT, "outputs": trained},
        never=("--checkpoint.resume=1",),
        needs=("reports",),
    ),
    Situation(
        "weights with a tokenizer, which data.tokenizer doesn't name",
        "base.toml --data.source=mine.txt --model.vocab_size=300 --model.init_from=hf "
        "--model.norm_eps=1e-5",
        ("from the weights of hf", DONE),
        {**TEXT, "hf": exported},
        never=("training a tokenizer", "another tokenizer"),
        check=has_tokenizer_of_the_weights,
        needs=("huggingface",),
    ),
    Situation(
        "an export that was not made yet",
        "base.toml --data.source=mine.txt --model.init_from=outputs/tiny-hf",
        (
            "or run the export first: ./run_train.sh -m huggingface export outputs/tiny outputs/tiny-hf",
        ),
        TEXT,
        exit_code=2,
        needs=("huggingface",),
    ),
    Situation(
        "a vocabulary that is too large for the text",
        "base.toml --data.source=mine.txt --model.vocab_size=4096",
        ("the largest that works: --model.vocab_size=",),
        TEXT,
        exit_code=2,
    ),
    Situation(
        "options as other trainers spell them",
        "base.toml --optim.learning_rate=1e-3 --train.batch_size=8 --max_steps=10",
        (
            "did you mean optim.lr?",
            "did you mean train.global_batch_size?",
            "did you mean train.steps?",
        ),
        exit_code=2,
        needs=("migrate",),
    ),
    Situation(
        "help on one section",
        "--help optim",
        ("[optim]", "warmup_steps = 0"),
        never=("[train]", "sbatch"),
    ),
    Situation(
        "help on a section that doesn't exist",
        "--help optimizer",
        ("--help optimizer: no such section or option; did you mean optim",),
        exit_code=2,
    ),
]
