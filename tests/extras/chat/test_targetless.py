"""Conversations whose prompts are longer than a window, mixed in by 0, 10 and 100 %: against a plain loop over the
conversations one by one; on any mesh, with adapters, Muon and accumulation; in training and in evaluation."""

import json
import math
import pathlib
import random
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import config
from checkpoint.catalog import read_state
from checkpoint.load import Reader, read_tensors
from data.dataset import open_dataset
from data.order import make_order
from data.prepare import prepare
from model.llama import Llama
from optim import learning_rate
from parallel.materialize import materialize
from tests import cases
from tests.conftest import launch, make_config, needs_extra, rows, words
from tests.extras.chat.test_chat import sections_of, talk, tokenizer  # noqa: F401

pytestmark = [pytest.mark.early, pytest.mark.slow]

STEPS = 16
SEQ_LEN = 256
SIZES = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 128,
    "vocab_size": 320,
}
SHARES = {"none": 0.0, "a tenth": 0.1, "all": 1.0}  # of the prompts, longer than a window
ON_TWO = {
    "accumulated": {"train": {"micro_batch_size": 1}},
    "reduced once": {
        "train": {"micro_batch_size": 1},
        "parallel": {"sync_every_micro_batch": False},
    },
    "tp": {"parallel": {"tp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "skip": {"train": {"skip_nonfinite": 1}},
}
# each of its own loss, equal on one rank and on two
OF_ITS_OWN = {
    "muon": {"optim": {"name": "muon"}},
    "lora": {"lora": {"rank": 4, "base_dtype": "float32"}},
    "nf4": {"lora": {"rank": 4, "base_dtype": "nf4"}},
}
NEEDS = {"muon": "optimizers", "lora": "lora", "nf4": "lora"}
OF_ITS_OWN = {name: run for name, run in OF_ITS_OWN.items() if config.has_extra(NEEDS[name])}


def talks(share: float, count: int = 120) -> list[list[dict]]:
    draw = random.Random(3)
    found = []
    for number in range(count):
        is_long = number % 10 < 10 * share
        question = words(number, 300 if is_long else draw.randint(1, 6))
        found.append(talk(question, words(number + 1, draw.randint(1, 6))))
    return found


def by_hash(text: str) -> bool:
    """One in eight is held out."""
    return sum(text.encode()) % 8 == 0


@pytest.fixture(scope="module")
def sections(tokenizer, tmp_path_factory) -> dict[str, dict]:  # noqa: F811
    """By share, those of a run on conversations that are prepared."""
    found = {}
    for name, share in SHARES.items():
        folder = tmp_path_factory.mktemp("talks")
        found[name] = sections_of(
            tokenizer,
            folder,
            talks(share),
            model=SIZES,
            eval={},
            checkpoint={},
            optim={"schedule_steps": STEPS},
        )
        found[name]["train"] = {
            "steps": STEPS,
            "seq_len": SEQ_LEN,
            "global_batch_size": 2,
            "micro_batch_size": None,
        }
        with (
            mock.patch("data.prepare.worker_count", lambda: 0),
            mock.patch("extras.chat.conversations.is_validation", by_hash),
        ):
            prepare(make_config(**found[name]))
    return found


def changed(sections: dict, changes: dict, base: pathlib.Path | None = None) -> dict:
    merged = {name: {**sections.get(name, {}), **keys} for name, keys in changes.items()}
    if "lora" in changes:
        merged["model"] = {**dict.fromkeys(SIZES), "vocab_size": 320, "init_from": str(base)}
    return {**sections, **merged}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> pathlib.Path:
    """Weights for adapters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("base") / "hf"
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=320,
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(on_ranks, sections, base, tmp_path_factory) -> tuple[dict, pathlib.Path]:
    """({(ranks, name): rows}, the folder of the runs, by the number of ranks)."""
    folder = tmp_path_factory.mktemp("runs")
    tenth = sections["a tenth"]
    own = {name: changed(tenth, changes, base) for name, changes in OF_ITS_OWN.items()}
    of_four = with_batch_of_four(tenth)
    of_two = {name: changed(of_four, changes) for name, changes in ON_TWO.items()}
    mesh = changed(of_four, {"parallel": {"dp_replicate": 2, "tp": 2}})
    runs = {
        1: {**sections, **own},
        2: {**sections, **own, **of_two},
        4: {**{name: with_batch_of_four(of) for name, of in sections.items()}, "mesh": mesh},
    }
    # four data ranks need four windows a step
    runs[1] |= {f"{name}, four": with_batch_of_four(of) for name, of in sections.items()}
    found = {}
    for ranks, of_ranks in runs.items():
        for name, of_run in on_ranks(ranks, cases.train_all, of_ranks, str(folder))[0].items():
            found[ranks, name] = of_run
    return found, folder


def with_batch_of_four(sections: dict) -> dict:
    return {**sections, "train": {**sections["train"], "global_batch_size": 4}}


def plain_losses(cfg: config.Config) -> list[float | None]:
    """Of a loop over the conversations one by one; without a target it skips the step."""
    o = cfg.optim
    model = Llama(cfg.model)
    materialize(model, cfg.run.seed, torch.device("cpu"))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=o.betas,
        eps=o.eps,
    )
    (packed,) = open_dataset(cfg).train
    order = make_order(cfg, [packed])
    found = []
    for step in range(1, STEPS + 1):
        batch_size = cfg.train.global_batch_size
        losses = []
        for number in range((step - 1) * batch_size, step * batch_size):
            for _, begin, end in packed.conversations(order(number).window):
                stored = torch.tensor(packed.stored(begin, end).astype(np.int64))
                has_loss = stored[1:] >= 0
                ids = torch.where(stored >= 0, stored, ~stored)
                of_talk = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
                losses.append(of_talk[has_loss])
        losses = torch.cat(losses)
        if not len(losses):
            found.append(None)
            continue
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, STEPS, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses.mean().item())
    return found


def empty_steps(of_run: list[dict]) -> list[int]:
    return [row["step"] for row in of_run if row["loss"] is None]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_are_those_of_a_plain_loop_on_any_ranks(trained, sections, share, ranks):
    of_share = with_batch_of_four(sections[share]) if ranks == 4 else sections[share]
    expected = plain_losses(make_config(**of_share))
    found = trained[0][ranks, share]
    same = trained[0][1, f"{share}, four" if ranks == 4 else share]
    assert [row["loss"] is None for row in found] == [loss is None for loss in expected]
    for row, one, loss in zip(found, same, expected, strict=True):
        assert row["batch_digest"] == one["batch_digest"]
        assert math.isfinite(row["grad_norm"])
        if loss is None:
            assert (row["loss"], row["loss_mean"], row["grad_norm"]) == (None, None, 0.0)
        else:
            assert row["loss"] == pytest.approx(loss, rel=1e-5)
            assert row["loss"] == pytest.approx(one["loss"], rel=1e-5)
    empty = empty_steps(found)
    assert {"none": not empty, "a tenth": 0 < len(empty) < STEPS, "all": len(empty) == STEPS}[share]


@pytest.mark.parametrize("name", ["mesh", *ON_TWO, *OF_ITS_OWN])
def test_other_ways_to_train_leave_out_the_same_steps(trained, name):
    found = trained[0][4 if name == "mesh" else 2, name]
    expected = trained[0][1, name if name in OF_ITS_OWN else "a tenth, four"]
    assert empty_steps(found) == empty_steps(expected) != []
    for row, one in zip(found, expected, strict=True):
        assert row["batch_digest"] == one["batch_digest"]
        assert row["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        if one["loss"] is not None:
            assert row["loss"] == pytest.approx(one["loss"], rel=1e-5 if name != "nf4" else 1e-4)


def test_steps_without_a_target_are_counted_and_update_nothing(trained):
    """state.json counts them, and the optimizers count their updates."""
    found, folder = trained
    for (ranks, name), of_run in found.items():
        checkpoint = folder / f"{ranks}/{name.replace(' ', '-').replace(',', '')}"
        checkpoint /= f"checkpoints/step-{STEPS:08d}"
        empty = len(empty_steps(of_run))
        assert read_state(checkpoint)["targetless_steps"] == empty
        reader = Reader(checkpoint)
        names = [key for key in reader.metadata.state_dict_metadata if key.endswith(".step")]
        updates = {name: torch.empty(()) for name in names}
        read_tensors(reader, updates)
        assert {tensor.item() for tensor in updates.values()} == {STEPS - empty}, (ranks, name)


def test_a_validation_loss_is_finite_or_none_and_equal_on_any_ranks(trained):
    _, folder = trained
    for share in SHARES:
        losses = []
        for ranks in (1, 2):
            (row,) = rows(folder / f"{ranks}/{share.replace(' ', '-')}", "eval")
            losses.append(row["loss"])
        if share == "all":
            assert losses == [None, None]
        else:
            assert losses[0] == pytest.approx(losses[1], rel=1e-5) and 3 < losses[0] < 7


@needs_extra("reports")
def test_a_source_of_which_nothing_is_learned_is_named(tokenizer, write_config, tmp_path):  # noqa: F811
    """In a mixture the other source has targets in every step."""
    for name, share in (("long", 1.0), ("short", 0.0)):
        lines = [json.dumps({"messages": row}) + "\n" for row in talks(share)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    path = write_config(
        "mixed",
        data={
            "tokenizer": str(tokenizer),
            "messages_field": "messages",
            "sources": [{"source": str(tmp_path / f"{name}.jsonl")} for name in ("long", "short")],
        },
        train={"steps": 2, "seq_len": SEQ_LEN},
        eval={},
        checkpoint={},
    )
    done = launch(path, "--data.path=" + str(tmp_path / "prepared"))
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "outputs/mixed", "eval")
    by_source = {pathlib.Path(name).stem: loss for name, loss in row["loss_by_source"].items()}
    assert by_source["long"] is None and by_source["short"] == pytest.approx(row["loss"])
    assert "no validation loss of " in done.stdout and "NaN" not in done.stdout
    (note,) = [line for line in done.stdout.splitlines() if "cut before any answer" in line]
    (cut,) = re.findall(r"; (\d+) cut at a window's end;", note)
    assert note.endswith(f"; {cut} cut before any answer: raise train.seq_len")
