"""Whole runs: equal losses for any number of ranks and any split, against a plain loop; exact resume; launching."""

import fnmatch
import json
import platform
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import config
import train
from checkpoint.catalog import read_state
from config import IGNORE, ConfigError
from data.dataset import open_dataset
from data.folder import manifest_of
from model.llama import Llama, add_terms
from optim import build_optimizer, learning_rate
from parallel import mesh
from parallel.materialize import materialize
from run.rank import distributed
from tests import cases, forks
from tests.conftest import (
    launch,
    loader_of,
    make_config,
    needs_extra,
    prepare_one,
    rows,
    saved_tensors,
)

pytestmark = [pytest.mark.early, pytest.mark.slow]

# 4 ranks divide neither 50 nor 75 nor 323
UNEVEN = {"dim": 50, "n_heads": 5, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 323}


@pytest.fixture(scope="module")
def folders(corpus, prepared, tmp_path_factory) -> dict:
    """The corpus as token files, by the size of the vocabulary: each has a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("uneven") / "words"
    uneven = make_config(model=UNEVEN, data={"source": str(corpus), "path": str(folder)})
    return {320: prepared, UNEVEN["vocab_size"]: prepare_one(uneven)}


def with_data(sections: dict, corpus, folders) -> dict:
    folder = folders[sections.get("model", {}).get("vocab_size", 320)]
    return {
        **sections,
        "data": {"source": str(corpus), "path": str(folder), **sections.get("data", {})},
    }


def plain_loop(cfg: config.Config, weights: dict | None = None, optimizer_of=None) -> list[dict]:
    """The run as a textbook has it: one process, the whole batch at once, mean cross entropy, torch's AdamW, or what
    optimizer_of makes for the model; under a document mask each piece of a document by itself. The last step's weights
    go into `weights`. With the blocks' own terms of the loss (tests/forks.py), each by its name."""
    m = cfg.model
    t = cfg.train
    o = cfg.optim
    model = Llama(m)
    materialize(model, cfg.run.seed, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatch(name, pattern) for pattern in m.freeze))
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in model.parameters() if p.ndim > 1 and p.requires_grad],
                "weight_decay": o.weight_decay,
            },
            {
                "params": [p for p in model.parameters() if p.ndim == 1 and p.requires_grad],
                "weight_decay": 0.0,
            },
        ],
        betas=o.betas,
        eps=o.eps,
        foreach=False,
    )
    if optimizer_of:
        optimizer = optimizer_of(model)
    of_blocks: list[dict] = []  # terms, of each block's forward
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, args, out: of_blocks.extend(out[1:] if type(out) is tuple else ())
        )
    loader = loader_of(cfg)
    found = []
    for step in range(1, t.steps + 1):
        batch = next(loader)
        if not batch.valid_tokens:
            found.append({"loss": None, "grad_norm": 0.0, "batch_digest": batch.digest})
            continue
        inputs, targets, *rest = (torch.cat(part) for part in zip(*batch.micro_batches))
        if rest:
            documents = rest[1]
            pieces = []
            for row, row_targets, numbers in zip(inputs, targets, documents):
                for number in numbers.unique():
                    inside = numbers == number
                    pieces.append((row[inside], row_targets[inside]))
            logits, targets = (
                torch.cat([model(i[None])[0] for i, _ in pieces]),
                torch.cat([t for _, t in pieces]),
            )
            # a piece's last target is another document's, unless the window ends there
            assert sum((t[:-1] == IGNORE).sum() for _, t in pieces) == 0
            assert (targets != IGNORE).sum() == batch.valid_tokens
        else:
            logits = model(inputs).flatten(0, 1)
        terms = {
            name: sum(t[name] for t in of_blocks) / batch.valid_tokens
            for name in (of_blocks or [{}])[0]
        }
        of_blocks.clear()
        loss = F.cross_entropy(logits, targets.flatten()) + sum(terms.values())
        loss.backward()
        limit = float("inf") if t.max_grad_norm == "off" else t.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, t.steps, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            {
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "batch_digest": batch.digest,
                **{name: term.item() for name, term in terms.items()},
            }
        )
    loader.close()
    if weights is not None:
        weights |= {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    return found


# Of a fork whose blocks have terms of the loss (tests/forks.py). Sizes that four ranks do not divide.
ROUTED = {"dim": 46, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "ffn_dim": 76}
TERMS = [  # ranks, their meshes
    (1, {"compiled": {"compile": True, "recompute": "elementwise"}}),
    (2, {"tp": {"tp": 2, "recompute": "full"}, "cp": {"cp": 2}}),
    (
        4,
        {
            "hybrid": {"dp_replicate": 2, "sync_every_micro_batch": False},
            "tp and dp": {"tp": 2, "recompute": "selective"},
            "cp and tp": {"cp": 2, "tp": 2, "recompute": 2},
        },
    ),
]


@pytest.mark.parametrize("ranks, meshes", TERMS)
def test_terms_of_a_block_are_exact_on_any_mesh(
    on_ranks, corpus, prepared, folders, tmp_path, ranks, meshes
):
    """In the loss, in its row and in the weights after four steps; the validation loss is without them."""
    plain = with_data({"model": ROUTED, "train": {"micro_batch_size": 1}}, corpus, folders)
    last: dict[str, torch.Tensor] = {}
    with forks.routed():
        expected = plain_loop(make_config(**plain), last)
        model = Llama(make_config(**plain).model)
        model.load_state_dict({name.removeprefix("model."): p for name, p in last.items()})
        stream = open_dataset(make_config(**plain)).sources[0].validation
        ids = torch.from_numpy(stream.read(0, 8 * 32 + 1))
        with torch.no_grad():
            logits = model(ids[:-1].view(8, 32)).flatten(0, 1)
    validation_loss = F.cross_entropy(logits, ids[1:]).item()
    runs = {}
    for name, parallel in meshes.items():
        runs[name] = {**plain, "parallel": parallel, "eval": {"batches": 1}, "checkpoint": {}}
    found = on_ranks(ranks, cases.train_forked, "routed", runs, str(tmp_path))[0]
    for name, ours in found.items():
        for key in ("loss", "balance", "router_z", "grad_norm"):
            theirs = [row[key] for row in expected]
            assert [row[key] for row in ours] == pytest.approx(theirs, rel=1e-5), (name, key)
        folder = tmp_path / f"{ranks}/{name.replace(' ', '-')}"
        (evaluated,) = rows(folder, "eval")
        assert evaluated["loss"] == pytest.approx(validation_loss, rel=1e-5), name
        saved = saved_tensors(folder, 4)
        for key, tensor in last.items():
            assert (saved[key] - tensor).norm() < 1e-5 * tensor.norm(), (name, key)


@pytest.mark.parametrize(
    "value, name",
    [
        (torch.zeros((), dtype=torch.bfloat16), "balance"),
        (torch.zeros(2), "balance"),
        (torch.zeros(()), "loss"),
    ],
)
def test_a_term_that_would_lose_precision_is_refused(value, name):
    with pytest.raises(ConfigError, match=rf"blocks.3 returns {name} of torch.*float32 scalar"):
        add_terms({}, (torch.zeros(1), {name: value}), "blocks.3")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_a_target_changes_neither_weights_nor_optimizer(
    on_ranks, prepared, corpus, tmp_path, ranks
):
    sections = {
        "data": targetless_data(corpus, prepared, tmp_path, 1.0),
        "checkpoint": {},
        "train": {"steps": 2, "micro_batch_size": 2},
    }
    found = on_ranks(ranks, cases.train_all, {"none": sections}, str(tmp_path))[0]["none"]
    assert [(row["loss"], row["loss_mean"], row["grad_norm"]) for row in found] == [
        (None, None, 0.0)
    ] * 2
    assert all(row["lr"] > 0 for row in found)
    fresh, trained = Llama(make_config().model), saved_tensors(tmp_path / f"{ranks}/none", 2)
    materialize(fresh, 0, torch.device("cpu"))
    for name, parameter in fresh.named_parameters():
        assert torch.equal(trained.pop(f"model.{name}"), parameter)
    assert trained and not any(tensor.any() for tensor in trained.values())


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=needs_extra("optimizers"))])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_without_a_target_are_as_if_left_out(
    on_ranks, prepared, corpus, tmp_path, ranks, name
):
    """Of the optimizer: the schedule and the data go on. Saved and resumed between two such steps."""
    sections = {
        "data": targetless_data(corpus, prepared, tmp_path, 0.7),
        "checkpoint": {},
        "train": {"steps": 20, "global_batch_size": 2, "micro_batch_size": 1},
        "optim": {"name": name, "schedule_steps": 20},
    }
    cfg, expected_weights = make_config(**sections), {}
    adamw = None if name == "adamw" else lambda model: build_optimizer(model, cfg.optim)
    expected = plain_loop(cfg, expected_weights, adamw)
    empty = [row["loss"] is None for row in expected]
    begun = next(step for step in range(5, 20) if empty[step - 1] and empty[step])
    first = {**sections, "train": {**sections["train"], "steps": begun}}
    on_ranks(ranks, cases.train_all, {"run": first}, str(tmp_path))
    found = on_ranks(ranks, cases.train_all, {"run": sections}, str(tmp_path))[0]["run"]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs["loss"] is None:
            assert ours["loss"] is None
        else:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["batch_digest"] == theirs["batch_digest"]
    folder = tmp_path / f"{ranks}/run"
    trained = saved_tensors(folder, 20)
    for parameter, tensor in expected_weights.items():
        assert (trained[parameter] - tensor).norm() <= 1e-5 * tensor.norm(), parameter
    updates = [tensor.item() for key, tensor in trained.items() if key.endswith(".step")]
    assert updates and {*updates} == {20 - sum(empty)}
    states = [read_state(folder / f"checkpoints/step-{step:08d}") for step in (begun, 20)]
    assert [state["targetless_steps"] for state in states] == [sum(empty[:begun]), sum(empty)]


def targetless_data(corpus, prepared, tmp_path, share: float) -> dict:
    """The section of data whose first `share` of tokens are documents of one token each, which no other token predicts,
    but for two in a later step's window. The others are one document."""
    data = shutil.copytree(prepared, tmp_path / "data")
    tokens = manifest_of(data)["token_files"]["train"][0][2]
    single = torch.arange(2, int(share * tokens) + 1)
    ends = single if share == 1 else torch.cat([single, torch.tensor([tokens])])
    ends.numpy().tofile(data / "train-0.ends.bin")
    return {"source": str(corpus), "path": str(data), "document_mask": True}


def test_auto_precision_is_decided_by_all_ranks(on_ranks, prepared, corpus, tmp_path):
    """float32 where one rank's device has no bfloat16 units. A resume that decides otherwise logs it."""
    sections = {
        "data": {"source": str(corpus), "path": str(prepared)},
        "parallel": {"param_dtype": "auto"},
        "train": {"global_batch_size": 4, "micro_batch_size": None},
        "optim": {"warmup_steps": 0},
        "checkpoint": {},
    }
    wrote = []
    for steps, units in (1, [True, False]), (2, [True, True]):
        computed = on_ranks(2, cases.train_with_units, steps, sections, str(tmp_path), units)
        cfg = config.load(str(tmp_path / "r/config.toml"))
        saved = read_state(tmp_path / f"r/checkpoints/step-0000000{steps}")["config"]
        wrote.append((*computed, cfg.parallel.param_dtype, saved["parallel"]["param_dtype"]))
    assert wrote == [("float32",) * 4, ("bfloat16",) * 4]
    log = (tmp_path / "r/logs/rank-0.log").read_text()
    assert "parallel.param_dtype float32 -> bfloat16" in log


@pytest.mark.parametrize(
    "states", ["float32", pytest.param("bfloat16", marks=needs_extra("optimizers"))]
)
def test_a_step_reads_nothing_from_the_device(on_ranks, prepared, corpus, tmp_path, states):
    """The host runs ahead: loss, norm and the finite flag stay on the device until a row is due."""
    sections = {
        "data": {"source": str(corpus), "path": str(prepared)},
        "log": {"every_steps": 10},
        "train": {"skip_nonfinite": 1},
        "optim": {"state_dtype": states},
    }
    for reads, control in on_ranks(2, cases.host_reads, sections, str(tmp_path)):
        assert reads == [[]] * 4 and len(control) == 1


@pytest.mark.parametrize(
    "found, units",
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": False}, False),
        ({}, False),
    ],
)
def test_a_cpu_has_units_for_bfloat16_by_either_name(monkeypatch, found, units):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found)
    assert mesh.has_native_bfloat16(torch.device("cpu")) is units


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_waits_for_nothing(prepared, corpus, tmp_path):
    """torch raises an error where the host would wait, for a value or a copy from memory that is not pinned."""

    def strict(*arguments):
        if len(done):  # the first sets FSDP2 up
            torch.cuda.set_sync_debug_mode("error")
        done.append(training_step(*arguments))
        torch.cuda.set_sync_debug_mode("default")
        return done[-1]

    done, training_step = [], train.training_step
    cfg = make_config(
        data={"source": str(corpus), "path": str(prepared)},
        log={"every_steps": 10},
        run={"device": "cuda", "name": "gpu", "output_dir": str(tmp_path)},
    )
    with distributed(cfg) as world, mock.patch("train.training_step", strict):
        cases.run_training(cfg, world)
    assert len(done) == cfg.train.steps


# Through run_train.sh

LONG = {
    "train": {"steps": 20},
    "optim": {"schedule_steps": 20},
    "checkpoint": {"save_every_steps": 6},
    "eval": {},
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus, prepared):
    """20 steps in one go."""
    folder = tmp_path_factory.mktemp("straight")
    path = folder / "long.toml"
    sections = {**LONG, "data": {"source": str(corpus), "path": str(prepared)}}
    path.write_text(
        config.to_toml(make_config(**sections, run={"name": "straight", "output_dir": str(folder)}))
    )
    done = launch(path)
    assert done.returncode == 0, done.stderr
    return folder / "straight", done


@pytest.mark.quick
def test_a_run_leaves_what_the_contract_names(straight):
    folder, done = straight
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 20 and status["launch"]
    for name in (
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "logs/rank-0.log",
        "tokenizer.model",
        "checkpoints/step-00000020/tokenizer.model",
    ):
        assert (folder / name).stat().st_size
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (6, 12, 18, 20)
    ]
    assert {
        *("kind", "step", "steps", "loss", "loss_mean", "grad_norm", "lr", "tokens", "mfu"),
        *("epochs", "tokens_per_second_per_device", "step_seconds", "data_seconds"),
        *("peak_memory_gib", "batch_digest"),
    } == rows(folder)[-1].keys()
    assert "step 20/20" in done.stdout
    assert config.load(str(folder / "config.toml")).train.steps == 20
    environment = json.loads((folder / "environment.json").read_text())
    assert {"commit", "uncommitted", "torch", "command"} <= environment.keys()
    assert environment["hosts"] == [platform.node()] and environment["ranks"] == 1


@pytest.mark.quick
@needs_extra("optimizers")
def test_bfloat16_states_resume_bitwise(on_ranks, corpus, prepared, tmp_path):
    """Moments and the random bits of their rounding go on as if the run had not been cut."""
    sections = {
        "data": {"source": str(corpus), "path": str(prepared)},
        "checkpoint": {},
        "train": {},
        "optim": {"state_dtype": "bfloat16", "schedule_steps": 6, "warmup_steps": 2},
    }
    for name, cuts in {"straight": (6,), "cut": (3, 6)}.items():
        for steps in cuts:
            found = on_ranks(1, cases.train_to, steps, sections, str(tmp_path / name))[0]
    assert len(found) == 6
    whole, again = (saved_tensors(tmp_path / name / "r", 6) for name in ("straight", "cut"))
    assert whole.keys() == again.keys() and all(
        torch.equal(whole[name], again[name]) for name in whole
    )
    assert any(t.dtype == torch.bfloat16 for t in whole.values())


def test_eval_only_prints_a_row_and_writes_nothing(straight):
    folder, _ = straight
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    found = []
    for ranks in (1, 2):
        done = launch(folder / "config.toml", "--run.name=straight", "--eval-only", nproc=ranks)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [found[0]] == rows(folder, "eval")
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
