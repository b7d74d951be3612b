"""Conversations whose prompts are longer than a window, so that a step may have no target: against a plain loop over
the conversations one by one, on any mesh."""

import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import config
from checkpoint.catalog import read_state
from data.dataset import PreparedDataset
from evaluate import evaluate_newest
from extras.chat.packing import Packed
from metrics import NO_TARGETS
from optim import learning_rate
from tests.conftest import has_extra, make_config, mesh_for, rows, train_run, words
from tests.distributed import distributed
from tests.extras.lora.conftest import base, bases
from tests.reference import fresh_model
from tests.tools.prepare.chat.conftest import prepare_here, sections_of, talk

__all__ = ["base", "bases"]
STEPS = 16


@pytest.fixture(scope="module")
def sections(tokenizer, tmp_path_factory) -> dict[int, dict[str, Any]]:
    """Of runs in which each tenth prompt, or each, is longer than a window."""
    by_every = {}
    for every in (10, 1):
        draw = random.Random(3)
        talks = []
        for i in range(120):
            question = words(i, 300 if i % every == 0 else draw.randint(1, 6))
            talks.append(talk(question, words(i + 1, draw.randint(1, 6))))
        more = {"data": {"validation": None}, "eval": {}, "checkpoint": {}}
        made = sections_of(tokenizer, tmp_path_factory.mktemp("talks"), talks, **more)
        made["train"] |= {"steps": STEPS, "seq_len": 256}
        prepare_here(make_config(**made))
        by_every[every] = made
    return by_every


@pytest.fixture(scope="module")
def losses(sections) -> list[float | None]:
    """Of a plain loop. A step without a target is left out."""
    cfg = make_config(**sections[10])
    model = fresh_model(cfg)
    decay = [cfg.optim.weight_decay if p.ndim > 1 else 0.0 for p in model.parameters()]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(model.parameters(), decay)]
    optimizer = torch.optim.AdamW(groups, betas=cfg.optim.betas, eps=cfg.optim.eps)
    dataset = PreparedDataset(cfg)
    packed = dataset.sources[0].stream
    assert isinstance(packed, Packed)
    means: list[float | None] = []
    for step in range(1, STEPS + 1):
        found = []
        for number in range(4 * (step - 1), 4 * step):
            for _, begin, end in packed.conversations(dataset.position(number).window):
                stored = torch.tensor(packed.stream.read(begin, end), dtype=torch.int64)
                ids = torch.where(stored >= 0, stored, ~stored)
                each = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
                found.append(each[stored[1:] >= 0])
        loss = torch.cat(found).mean()
        means.append(None if loss.isnan() else loss.item())
        if means[-1] is not None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(cfg.train.max_grad_norm))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(cfg.optim, STEPS, step)
            optimizer.step()
            optimizer.zero_grad()
    return means


MESHES: list[tuple[int, dict]] = [
    *((ranks, {}) for ranks in (1, 2)),
    *((2, {"parallel": {key: 2}}) for key in ("tp", "cp")),
    (2, {"parallel": {"sync_every_micro_batch": False}, "train": {"skip_nonfinite": 1}}),
    (4, {"parallel": {"dp_replicate": 2, "tp": 2}}),
    *([(2, {"lora": {"rank": 4, "base_dtype": "float32"}})] if has_extra("lora") else []),
]


@pytest.mark.parametrize("ranks, changes", MESHES, ids=str)
@distributed()
def test_losses_are_those_of_a_plain_loop_on_any_mesh(
    world, ranks, changes, sections, losses, base, tmp_path
):
    """Adapters, of another model, leave out the same steps."""
    merged = {name: {**sections[10].get(name, {}), **keys} for name, keys in changes.items()}
    if "lora" in changes:
        sizes = dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"))
        merged["model"] = {**sizes, "init_from": str(base)}
    run = {"name": "r", "output_dir": str(tmp_path)}
    trained = train_run(make_config(**{**sections[10], **merged, "run": run}), world)
    for row, loss in zip(trained, losses, strict=True):
        assert math.isfinite(row["grad_norm"]) and (row["loss"] is None) == (loss is None)
        if loss is None:
            assert (row["loss_mean"], row["grad_norm"]) == (None, 0.0)
        elif "lora" not in changes:
            assert row["loss"] == pytest.approx(loss, rel=1e-5)
    state = read_state(tmp_path / f"r/checkpoints/step-{STEPS:08d}")
    assert 0 < losses.count(None) == state["targetless_steps"] < STEPS
    (evaluation,) = rows(tmp_path / "r", "eval")
    assert 3 < evaluation["loss"] < 7 and evaluation["bits_per_byte"] is None


@distributed(ranks=2)
def test_a_text_without_a_target_has_no_loss(world, sections, tmp_path):
    run = {"name": "r", "output_dir": str(tmp_path)}
    cfg = make_config(**{**sections[1], "run": run})
    assert {(row["loss"], row["grad_norm"]) for row in train_run(cfg, world)} == {(None, 0.0)}
    (evaluation,) = rows(tmp_path / "r", "eval")
    assert (evaluation["loss"], evaluation["bits_per_byte"]) == (None, None)
    saved = config.load(str(tmp_path / "r/config.toml"))
    with mock.patch("evaluate.print_error") as printed:
        evaluate_newest(saved, mesh_for(cfg, world), mock.MagicMock(stops=False))
    assert world.rank or printed.call_args.args == (NO_TARGETS,)
