"""Conversations whose prompts are longer than a window, mixed in by 0, 10 and 100 %: against a plain
loop over the conversations one by one, on any mesh, with adapters, Muon and accumulation."""

import json
import math
import pathlib
import random
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import config
from checkpoint.catalog import read_state
from data.dataset import PreparedDataset
from extras.chat.packing import Packed
from optim import learning_rate
from parallel.mesh import World
from tests.conftest import has_extra, launch, make_config, rows, saved_tensors, train_run, words
from tests.distributed import run_on_ranks
from tests.reference import fresh_model
from tests.tools.prepare.chat.conftest import prepare_here, sections_of, talk

pytestmark = pytest.mark.slow

STEPS = 16
SEQ_LEN = 256
SHARES = {"none": 0.0, "a tenth": 0.1, "all": 1.0}  # of the prompts, longer than a window
# Of the tenth, on two ranks: the same losses
MESHES: dict[str, dict] = {
    "reduced once": {"parallel": {"sync_every_micro_batch": False}},
    "tp": {"parallel": {"tp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "skip": {"train": {"skip_nonfinite": 1}},
}
# Each with losses of its own, equal on one rank and on two
OTHERS: dict[str, dict] = {
    "optimizers": {"optim": {"name": "muon"}},
    "lora": {"lora": {"rank": 4, "base_dtype": "float32"}},
}
OTHERS = {name: changes for name, changes in OTHERS.items() if has_extra(name)}


def talks(share: float) -> list[list[dict]]:
    draw = random.Random(3)
    rows = []
    for number in range(120):
        is_long = number % 10 < 10 * share
        question = words(number, 300 if is_long else draw.randint(1, 6))
        rows.append(talk(question, words(number + 1, draw.randint(1, 6))))
    return rows


@pytest.fixture(scope="module")
def sections(tokenizer, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """By share, those of a run on conversations that are prepared."""
    by_share = {}
    for name, share in SHARES.items():
        folder = tmp_path_factory.mktemp("talks")
        by_share[name] = sections_of(
            tokenizer, folder, talks(share), data={"validation": None}, eval={}, checkpoint={}
        )
        by_share[name]["train"] |= {"steps": STEPS, "seq_len": SEQ_LEN}
        prepare_here(make_config(**by_share[name]))
    return by_share


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """Weights for adapters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("base") / "hf"
    torch.manual_seed(0)
    m = make_config().model
    settings = transformers.LlamaConfig(
        hidden_size=m.dim,
        num_hidden_layers=m.n_layers,
        num_attention_heads=m.n_heads,
        num_key_value_heads=m.n_kv_heads,
        intermediate_size=m.ffn_dim,
        vocab_size=m.vocab_size,
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(folder)
    return str(folder)


def train_all(world: World, runs: dict[str, dict], folder: pathlib.Path) -> dict[str, list[dict]]:
    trained = {}
    for name, changed in runs.items():
        run = {"name": name.replace(" ", "-"), "output_dir": str(folder)}
        trained[name] = train_run(make_config(**changed, run=run), world)
    return trained


@pytest.fixture(scope="module")
def trained(sections, base, tmp_path_factory) -> tuple[dict[int, dict], pathlib.Path]:
    """(the rows of all runs, by ranks and name; the folder of the runs, by ranks)."""

    def changed(changes: dict) -> dict:
        merged = dict(sections["a tenth"])
        for name, keys in changes.items():
            merged[name] = {**merged.get(name, {}), **keys}
        if "lora" in changes:
            sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
            merged["model"] = {**dict.fromkeys(sizes), "init_from": base}
        return merged

    others = {name: changed(changes) for name, changes in OTHERS.items()}
    meshes = {name: changed(changes) for name, changes in MESHES.items()}
    of_ranks = {
        1: {**sections, **others},
        2: {**sections, **others, **meshes},
        4: {"mesh": changed({"parallel": {"dp_replicate": 2, "tp": 2}})},
    }
    folder = tmp_path_factory.mktemp("runs")
    all_rows = {}
    for ranks, runs in of_ranks.items():
        all_rows[ranks] = run_on_ranks(ranks, train_all, runs, folder / str(ranks))[0]
    return all_rows, folder


def plain_losses(cfg: config.Config) -> list[float | None]:
    """Of a loop over the conversations one by one. A step without a target is skipped."""
    o = cfg.optim
    model = fresh_model(cfg)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": o.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=o.betas, eps=o.eps)
    dataset = PreparedDataset(cfg)
    packed = dataset.sources[0].stream
    limit = cfg.train.max_grad_norm
    assert isinstance(packed, Packed) and limit != "off"
    means: list[float | None] = []
    for step in range(1, STEPS + 1):
        losses = []
        for number in range(4 * (step - 1), 4 * step):
            for _, begin, end in packed.conversations(dataset.position(number).window):
                stored = torch.tensor(packed.stream.read(begin, end), dtype=torch.int64)
                ids = torch.where(stored >= 0, stored, ~stored)
                each = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
                losses.append(each[stored[1:] >= 0])
        with_loss = torch.cat(losses)
        if not len(with_loss):
            means.append(None)
            continue
        with_loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, STEPS, step)
        optimizer.step()
        optimizer.zero_grad()
        means.append(with_loss.mean().item())
    return means


def empty_steps(of_run: list[dict]) -> list[int]:
    return [row["step"] for row in of_run if row["loss"] is None]


@pytest.mark.parametrize("share", SHARES)
def test_losses_are_those_of_a_plain_loop_on_any_ranks(trained, sections, share):
    expected = plain_losses(make_config(**sections[share]))
    all_rows, _ = trained
    for ranks in (1, 2):
        for row, loss in zip(all_rows[ranks][share], expected, strict=True):
            assert math.isfinite(row["grad_norm"])
            if loss is None:
                assert (row["loss"], row["loss_mean"], row["grad_norm"]) == (None, None, 0.0)
            else:
                assert row["loss"] == pytest.approx(loss, rel=1e-5)
    empty = expected.count(None)
    assert {"none": empty == 0, "a tenth": 0 < empty < STEPS, "all": empty == STEPS}[share]


@pytest.mark.parametrize("name", ["mesh", *MESHES, *OTHERS])
def test_other_ways_to_train_leave_out_the_same_steps(trained, name):
    all_rows, _ = trained
    of_run = all_rows[4 if name == "mesh" else 2][name]
    expected = all_rows[1][name if name in OTHERS else "a tenth"]
    assert empty_steps(of_run) == empty_steps(expected) != []
    for row, one in zip(of_run, expected, strict=True):
        assert row["batch_digest"] == one["batch_digest"]
        assert row["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        if one["loss"] is not None:
            assert row["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_steps_without_a_target_are_counted_and_update_nothing(trained):
    """state.json counts them, and the optimizers count their updates."""
    all_rows, folder = trained
    for ranks, runs in all_rows.items():
        for name, of_run in runs.items():
            run = folder / str(ranks) / name.replace(" ", "-")
            empty = len(empty_steps(of_run))
            assert read_state(run / f"checkpoints/step-{STEPS:08d}")["targetless_steps"] == empty
            tensors = saved_tensors(run, STEPS)
            updates = {key: value for key, value in tensors.items() if key.endswith(".step")}
            assert {value.item() for value in updates.values()} == {STEPS - empty}, (ranks, name)


def test_a_validation_loss_is_finite_or_none_and_equal_on_any_ranks(trained):
    _, folder = trained
    for share in SHARES:
        losses = []
        for ranks in (1, 2):
            (row,) = rows(folder / f"{ranks}/{share.replace(' ', '-')}", "eval")
            assert row["bits_per_byte"] is None
            losses.append(row["loss"])
        if share == "all":
            assert losses == [None, None]
        else:
            assert losses[0] == pytest.approx(losses[1], rel=1e-5) and 3 < losses[0] < 7


def test_a_source_of_which_nothing_is_learned_is_named(tokenizer, write_config, tmp_path):
    """In a mixture the other source has targets in every step."""
    sources = []
    for name, share in (("long", 1.0), ("short", 0.0)):
        lines = [json.dumps({"messages": row}) + "\n" for row in talks(share)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        sources.append({"source": str(tmp_path / f"{name}.jsonl")})
    data = {"tokenizer": str(tokenizer), "messages_field": "messages", "sources": sources}
    path = write_config(
        "mixed",
        data={**data, "path": str(tmp_path / "prepared")},
        train={"steps": 2, "seq_len": SEQ_LEN},
        eval={},
    )
    done = launch(path)
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "outputs/mixed", "eval")
    by_source = {pathlib.Path(name).stem: loss for name, loss in row["loss_by_source"].items()}
    assert by_source["long"] is None and by_source["short"] == pytest.approx(row["loss"])
    (note,) = [line for line in done.stdout.splitlines() if "cut before any answer" in line]
    (cut,) = re.findall(r"; (\d+) cut at a window's end;", note)
    assert note.endswith(f"; {cut} cut before any answer: raise train.seq_len")


def test_a_hundred_steps_in_a_row_without_a_target_end_the_run(tokenizer, tmp_path, write_config):
    """The steps of two launches count; train.skip_nonfinite = 0 does not."""
    too_long = [talk(words(i, 30), "yes") for i in range(500)]
    sections = sections_of(tokenizer, tmp_path, too_long, data={"validation": None})
    sections["train"] |= {"steps": 120, "seq_len": 32, "micro_batch_size": 2}
    path = write_config(
        "cut", **sections, log={"every_steps": 50}, checkpoint={}, eval={"batches": 1}
    )
    begun = launch(path, "--train.steps=60", "--optim.schedule_steps=120", nproc=2)
    assert begun.returncode == 0, begun.stderr
    assert "step 50/60  loss    none  grad  0.00" in begun.stdout
    no_loss = "no validation loss: no token of the validation text has a loss"
    assert f"step 60  {no_loss}" in begun.stdout
    evaluated = launch(path, "--eval-only")
    assert evaluated.returncode == 0 and evaluated.stderr.splitlines()[-1] == no_loss
    assert json.loads(evaluated.stdout.splitlines()[-1])["loss"] is None
    done = launch(path, nproc=2)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step 100: no token of the last 100 steps has a loss" in done.stderr.splitlines()[-1]
