"""Launches that go on from a checkpoint, and launches that may not. tests/checkpoint has the rules."""

import json

import pytest

import config
from tests.conftest import content, launch

pytestmark = [pytest.mark.early, pytest.mark.slow]


def test_tokens_of_another_tokenizer_are_told(write_config, corpus, tmp_path):
    """To who evaluates on them, as an error; to who allows to go on with them, as a warning."""
    path = write_config("words", checkpoint={})
    other = tmp_path / "other.jsonl"
    told = "is not the tokenizer that"
    lines = corpus.read_text().splitlines(keepends=True)
    other.write_text("".join(lines[: len(lines) * 3 // 4]))
    words = (f"--data.source={other}", f"--data.path={tmp_path / 'other'}")
    assert launch("-m", "data.prepare", path, *words).returncode == 0
    assert launch(path, nproc=2).returncode == 0
    done = launch(path, *words, "--eval-only", nproc=2)
    assert done.returncode == 2 and told in done.stderr, done.stdout + done.stderr
    for steps, data, times in ((5, (), 0), (6, words, 1)):
        done = launch(
            path,
            f"--train.steps={steps}",
            *data,
            '--checkpoint.allow_changed=["data.source"]',
            nproc=2,
        )
        assert done.returncode == 0 and done.stdout.count(told) == times, done.stdout + done.stderr


def test_a_launch_that_may_not_go_on_says_why_and_changes_nothing(write_config, tmp_path):
    path = write_config(
        "kept",
        train={"steps": 7},
        optim={"schedule_steps": 20},
        checkpoint={"save_every_steps": 2, "keep_last": 2},
        eval={"every_steps": 4},
    )
    assert launch(path).returncode == 0
    folder = tmp_path / "outputs/kept"
    before = content(folder)
    for arguments, message in [
        (["--checkpoint.resume=5"], "resume = 5"),
        (["--checkpoint.resume=never"], "never"),
        (["--train.seq_len=16"], "train.seq_len = 16"),
        ([f"--run.output_dir={path}"], "Not a directory"),
        (["--checkpoint=off"], "[checkpoint] is off"),
        (["--run.device=cuda", "--checkpoint.resume=3"], "resume = 3"),  # and of the device
        (
            [
                "--train.steps=9",
                "--model.ffn_dim=96",
                '--checkpoint.allow_changed=["model.ffn_dim"]',
            ],
            "this model's is torch.float32 [96",
        ),
        (["--eval-only", "--model.norm_eps=0.5"], "model.norm_eps = 0.5"),
        (
            ["--checkpoint.resume=6", "--optim.state_dtype=bfloat16"],
            "optim.state_dtype = " if config.has_extra("optimizers") else "needs extras/optimizers",
        ),
        (["--train.steps=9", '--model.freeze=["embedding.*"]'], "start another run"),
    ]:
        done = launch(path, *arguments, nproc=1 + ("--eval-only" in arguments))
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )
    done = launch(path, "--eval-only", "--checkpoint.resume=6")
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 6, done.stderr
    assert content(folder) == before
