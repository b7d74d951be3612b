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
from checkpoint.load import Reader, read_tensors
from data.dataset import open_dataset
from extras.chat.packing import Packed
from optim import learning_rate
from parallel.mesh import World
from tests.conftest import launch, make_config, needs_extra, rows, train_run, words
from tests.distributed import run_on_ranks
from tests.extras.chat.conftest import prepare_here, sections_of, talk
from tests.reference import fresh_model

pytestmark = pytest.mark.slow

STEPS = 16
SEQ_LEN = 256
MODEL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 128,
    "vocab_size": 320,
}
SHARES = {"none": 0.0, "a tenth": 0.1, "all": 1.0}  # of the prompts, longer than a window
# of the tenth, on two ranks
ON_TWO: dict[str, dict] = {
    "reduced once": {"parallel": {"sync_every_micro_batch": False}},
    "tp": {"parallel": {"tp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "skip": {"train": {"skip_nonfinite": 1}},
}
# each with a loss of its own, equal on one rank and on two
OTHERS: dict[str, dict] = {
    "muon": {"optim": {"name": "muon"}},
    "lora": {"lora": {"rank": 4, "base_dtype": "float32"}},
    "nf4": {"lora": {"rank": 4, "base_dtype": "nf4"}},
}
EXTRAS = {"muon": "optimizers", "lora": "lora", "nf4": "lora"}
OTHERS = {name: changes for name, changes in OTHERS.items() if config.has_extra(EXTRAS[name])}
Runs = dict[tuple[int, str], list[dict]]  # rows by (ranks, name)


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
    train = {"steps": STEPS, "seq_len": SEQ_LEN, "global_batch_size": 4, "micro_batch_size": 1}
    for name, share in SHARES.items():
        by_share[name] = sections_of(
            tokenizer,
            tmp_path_factory.mktemp("talks"),
            talks(share),
            data={"validation": None},
            model=MODEL,
            eval={},
            checkpoint={},
            optim={"schedule_steps": STEPS},
        )
        by_share[name]["train"] = train
        prepare_here(make_config(**by_share[name]))
    return by_share


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


def train_all(world: World, runs: dict[str, dict], folder: pathlib.Path) -> dict[str, list[dict]]:
    trained = {}
    for name, changed in runs.items():
        run = {"name": name.replace(" ", "-"), "output_dir": str(folder)}
        trained[name] = train_run(make_config(**changed, run=run), world)
    return trained


@pytest.fixture(scope="module")
def trained(sections, base, tmp_path_factory) -> tuple[Runs, pathlib.Path]:
    """(the rows of all runs, the folder of the runs by the number of ranks)."""
    folder = tmp_path_factory.mktemp("runs")

    def changed(changes: dict) -> dict:
        merged = {**sections["a tenth"]}
        for name, keys in changes.items():
            merged[name] = {**merged.get(name, {}), **keys}
        if "lora" in changes:
            merged["model"] = {**dict.fromkeys(MODEL), "vocab_size": 320, "init_from": str(base)}
        return merged

    others = {name: changed(changes) for name, changes in OTHERS.items()}
    runs = {
        1: {**sections, **others},
        2: {**sections, **others, **{name: changed(ON_TWO[name]) for name in ON_TWO}},
        4: {**sections, "mesh": changed({"parallel": {"dp_replicate": 2, "tp": 2}})},
    }
    all_rows: Runs = {}
    for ranks, of_ranks in runs.items():
        trained = run_on_ranks(ranks, train_all, of_ranks, folder / str(ranks))[0]
        all_rows |= {(ranks, name): of_run for name, of_run in trained.items()}
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
    dataset = open_dataset(cfg)
    packed = dataset.sources[0].stream
    limit = cfg.train.max_grad_norm
    assert isinstance(packed, Packed) and limit != "off"
    means: list[float | None] = []
    for step in range(1, STEPS + 1):
        losses = []
        for number in range(4 * (step - 1), 4 * step):
            for _, begin, end in packed.conversations(dataset.position(number).window):
                stored = torch.tensor(packed.file.read(begin, end), dtype=torch.int64)
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
    digests = [row["batch_digest"] for row in trained[0][1, share]]
    for ranks in (1, 2, 4):
        of_run = trained[0][ranks, share]
        assert [row["batch_digest"] for row in of_run] == digests
        for row, loss in zip(of_run, expected, strict=True):
            assert math.isfinite(row["grad_norm"])
            if loss is None:
                assert (row["loss"], row["loss_mean"], row["grad_norm"]) == (None, None, 0.0)
            else:
                assert row["loss"] == pytest.approx(loss, rel=1e-5)
    empty = expected.count(None)
    assert {"none": empty == 0, "a tenth": 0 < empty < STEPS, "all": empty == STEPS}[share]


@pytest.mark.parametrize("name", ["mesh", *ON_TWO, *OTHERS])
def test_other_ways_to_train_leave_out_the_same_steps(trained, name):
    of_run = trained[0][4 if name == "mesh" else 2, name]
    expected = trained[0][1, name if name in OTHERS else "a tenth"]
    assert empty_steps(of_run) == empty_steps(expected) != []
    for row, one in zip(of_run, expected, strict=True):
        assert row["batch_digest"] == one["batch_digest"]
        assert row["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        if one["loss"] is not None:
            assert row["loss"] == pytest.approx(one["loss"], rel=1e-5 if name != "nf4" else 1e-4)


def test_steps_without_a_target_are_counted_and_update_nothing(trained):
    """state.json counts them, and the optimizers count their updates."""
    all_rows, folder = trained
    for (ranks, name), of_run in all_rows.items():
        checkpoint = folder / f"{ranks}/{name.replace(' ', '-')}/checkpoints/step-{STEPS:08d}"
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
            assert row["bits_per_byte"] is None
            losses.append(row["loss"])
        if share == "all":
            assert losses == [None, None]
        else:
            assert losses[0] == pytest.approx(losses[1], rel=1e-5) and 3 < losses[0] < 7


@needs_extra("reports")
def test_a_source_of_which_nothing_is_learned_is_named(tokenizer, write_config, tmp_path):
    """In a mixture the other source has targets in every step."""
    sources = []
    for name, share in (("long", 1.0), ("short", 0.0)):
        lines = [json.dumps({"messages": row}) + "\n" for row in talks(share)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        sources.append({"source": str(tmp_path / f"{name}.jsonl")})
    path = write_config(
        "mixed",
        data={
            "tokenizer": str(tokenizer),
            "messages_field": "messages",
            "sources": sources,
            "path": str(tmp_path / "prepared"),
        },
        train={"steps": 2, "seq_len": SEQ_LEN},
        eval={},
        checkpoint={},
    )
    done = launch(path)
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "outputs/mixed", "eval")
    by_source = {pathlib.Path(name).stem: loss for name, loss in row["loss_by_source"].items()}
    assert by_source["long"] is None and by_source["short"] == pytest.approx(row["loss"])
    assert "no validation loss of " in done.stdout and "NaN" not in done.stdout
    (note,) = [line for line in done.stdout.splitlines() if "cut before any answer" in line]
    (cut,) = re.findall(r"; (\d+) cut at a window's end;", note)
    assert note.endswith(f"; {cut} cut before any answer: raise train.seq_len")


def test_a_hundred_steps_in_a_row_without_a_target_end_the_run(tokenizer, tmp_path, write_config):
    """The steps of two launches count; train.skip_nonfinite = 0 does not."""
    too_long = [talk(words(i, 30), "yes") for i in range(500)]
    sections = sections_of(tokenizer, tmp_path, too_long, data={"validation": None})
    sections["train"] = {
        "steps": 120,
        "seq_len": 32,
        "global_batch_size": 4,
        "micro_batch_size": 2,
    }
    path = write_config(
        "cut",
        **sections,
        optim={"schedule_steps": 120},
        log={"every_steps": 50},
        checkpoint={},
        eval={"batches": 1},
    )
    begun = launch(path, "--train.steps=60", nproc=2)
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
