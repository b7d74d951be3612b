"""The plan against real sharded models, and what --dry-run prints."""

import json

import pytest
import torch

import config
from model.llama import meta_model
from optim import build_optimizer
from parallel import plan as plan_module
from parallel.plan import plan
from tests import cases
from tests.conftest import REPO, launch, make_config
from tests.test_training import UNEVEN

CONFIGS = REPO / "configs"


@pytest.mark.parametrize("ranks, options", [
    (1, [{}]), (2, [{}, {"dp_replicate": "auto", "dp_shard": 1}]), (3, [{}]),
    (4, [{}, {"dp_replicate": 2}, {"cp": 2}, {"cp": 4}])])
def test_bytes_equal_those_of_real_tensors(on_ranks, ranks, options):
    frozen = {"tie_embeddings": True, "freeze": ["blocks.0.*"]}
    every = [{"model": model, "parallel": parallel, "train": {"global_batch_size": 12, "micro_batch_size": 1}}
             for model in (UNEVEN, frozen) for parallel in options]
    every.append({**every[-1], "parallel": {"unsharded": ["blocks.0.*"], "param_dtype": "bfloat16"}})
    every.append({"optim": {"state_dtype": "bfloat16"}, "train": {"global_batch_size": 12, "micro_batch_size": 1}})
    even = {"dim": 46, "head_dim": 6, "ffn_dim": 76, "tie_embeddings": True}  # what tp leaves of its rows is uneven
    meshes = {2: [{"tp": 2}], 4: [{"tp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}]}
    every += [{"model": even, "parallel": mesh, "train": {"global_batch_size": 12, "micro_batch_size": 1}}
              for mesh in meshes.get(ranks, ())]
    real = on_ranks(ranks, cases.live_bytes, every)
    for i, sections in enumerate(every):
        cfg = make_config(**sections)
        planned = plan(cfg, meta_model(cfg.model), ranks, None)
        for what in ("parameter", "gradient", "optimizer"):
            assert max(rank[i][what] for rank in real) == planned[f"{what}_bytes_per_rank"], sections


def dry_run(capsys, *words: object) -> tuple[bool, str, str]:
    """(does it fit, stdout, stderr) of `--dry-run` in this process."""
    args = config.parse_arguments([*map(str, words), "--dry-run"])
    fits = plan_module.dry_run(config.load(args.config, args.overrides), args, None)
    return fits, *capsys.readouterr()


def test_json_has_what_the_contract_names(capsys):
    row = json.loads(dry_run(capsys, CONFIGS / "llama8b.toml", "--world-size", 8, "--json")[1])
    assert row["parameters"] == 8_030_261_248 and row["world_size"] == 8
    assert row["parameter_bytes_per_rank"] == row["gradient_bytes_per_rank"] == 4 * 8_030_261_248 // 8
    assert row["optimizer_bytes_per_rank"] == 8 * 8_030_261_248 // 8 + 4 * 291
    assert row["accumulation_steps"] == 16 and row["tokens_per_step"] == 128 * 8192 and row["steps_per_epoch"] is None
    several = json.loads(dry_run(capsys, CONFIGS / "llama8b.toml", "--world-size=8,32", "--json")[1])
    assert [row["world_size"] for row in several] == [8, 32]


def test_table_shows_the_resolved_configuration(prepared, write_config):
    done = launch(write_config(), "--dry-run", "--train.steps=77")
    assert done.returncode == 0 and "steps = 77" in done.stdout and "steps per epoch  95." in done.stdout, done.stdout


def test_what_does_not_fit_is_exit_3(capsys):
    # 16 bytes for each parameter: 70e9 * 16 / 8 is 131 GiB a rank, and no batch size helps
    done = launch("configs/llama70b.toml", "--dry-run", "--world-size", "8", "--gpu-memory-gib", "80", "--json")
    assert done.returncode == 3 and json.loads(done.stdout) and "does not fit" in done.stderr
    fits, out, _ = dry_run(capsys, CONFIGS / "llama70b.toml", "--world-size", 64, "--gpu-memory-gib", 80)
    assert fits and "70,553,706,496" in out
    assert not dry_run(capsys, CONFIGS / "llama70b.toml", "--world-size=8,64", "--gpu-memory-gib", 80)[0]


@pytest.mark.parametrize("options, ranks", [((), 1), (("--parallel.tp=2",), 2),
                                            (("--parallel.tp=2", "--parallel.cp=2", "--parallel.dp_replicate=2"), 8)])
def test_without_a_number_of_ranks_it_is_the_fewest(capsys, options, ranks):
    assert json.loads(dry_run(capsys, CONFIGS / "tiny.toml", *options, "--json")[1])["world_size"] == ranks


def test_what_fits_counts_gradients_too(capsys):
    """tiny.toml: 16 bytes for each of 5,048,576 parameters, and 4 for each of 39 tensors' step counts."""
    needed = (16 * 5_048_576 + 4 * 39) / 2**30
    for memory, fits in ((needed * 1.0001, True), (needed * 0.9999, False)):
        assert dry_run(capsys, CONFIGS / "tiny.toml", "--gpu-memory-gib", memory)[0] is fits


def test_an_optimizer_is_planned_as_it_is(monkeypatch, capsys):
    """Half the bytes where its moments are in bfloat16; what it sends, or keeps later, is not passed over."""
    def halved(model, o):
        optimizer = build_optimizer(model, o)
        for state in optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].bfloat16(), state["exp_avg_sq"].bfloat16()
        return optimizer

    def muon(model, o):
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])

    def planned(ranks: int = 1) -> dict:
        return json.loads(dry_run(capsys, CONFIGS / "tiny.toml", f"--world-size={ranks}", "--json")[1])

    usual = planned(2)
    assert usual["not_counted"] == []
    monkeypatch.setattr(plan_module, "build_optimizer", halved)
    assert planned()["optimizer_bytes_per_rank"] == 4 * 5_048_576 + 4 * 39
    monkeypatch.setattr(plan_module, "build_optimizer", muon)
    state = "the state of Muon, which optim.build_optimizer does not make"
    assert planned()["not_counted"] == [state] and planned(2)["not_counted"] == [state, "what Muon sends in its step"]
    assert "not counted" in dry_run(capsys, CONFIGS / "tiny.toml")[1]


def test_wrong_number_of_ranks_is_exit_2(capsys):
    done = launch("configs/llama8b.toml", "--dry-run", "--world-size", "8,3")
    assert done.returncode == 2 and "--world-size 3" in done.stderr and "multiple of" in done.stderr
    for wrong in ("0", "x", "-1"):
        with pytest.raises(SystemExit, match="2"):
            dry_run(capsys, CONFIGS / "llama8b.toml", f"--world-size={wrong}")


def test_dry_run_makes_nothing(tmp_path):
    assert launch(CONFIGS / "tiny.toml", "--dry-run", cwd=tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_configuration_has_a_plan(path, capsys):
    fits, out, _ = dry_run(capsys, path, "--json")
    assert fits and json.loads(out)["accumulation_steps"] >= 1
