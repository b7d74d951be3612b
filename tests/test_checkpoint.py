"""What counts as a checkpoint, what is kept, and what going on from one requires."""

import json
import os
import shutil

import pytest
import torch

import checkpoint
import config
from config import ConfigError
from model.llama import Llama
from optim import build_optimizer
from tests import cases
from tests.conftest import launch, make_config, rows


def configured(tmp_path, **keys):
    return make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint=keys)


def fake(cfg, step, **state):
    folder = checkpoint.path_of(cfg, step)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    (folder / "state.json").write_text(json.dumps({"config": config.to_dict(cfg), **state}))
    return folder


def test_only_whole_checkpoints_count(tmp_path):
    cfg = configured(tmp_path)
    root = checkpoint.root(cfg)
    assert checkpoint.saved_steps(root) == [] and checkpoint.choose(cfg) == 0
    for step in (9, 10, 123456789):
        fake(cfg, step)
    for name in ("step-00000099", "step-abc", "step-00000100.bak", "step-00000011.superseded", "step-00000012.corrupt",
                 ".step-00000013.tmp"):
        (root / name).mkdir()
    (root / "step-00000200").write_text("a file")
    (root / "step-00000300").symlink_to(root / "step-00000010")
    half = fake(cfg, 400)
    (half / "state.json").unlink()
    assert checkpoint.saved_steps(root) == [9, 10, 123456789]
    assert checkpoint.choose(cfg) == 123456789
    assert checkpoint.find(config.run_folder(cfg)).name == "step-123456789"


def test_purge_keeps_the_last_and_the_milestones(tmp_path):
    cfg = configured(tmp_path, keep_last=2, keep_every_steps=100)
    for step in (50, 100, 150, 200, 250):
        fake(cfg, step)
    (checkpoint.root(cfg) / ".step-00000300.tmp").mkdir()
    (checkpoint.root(cfg) / "step-00000001.superseded").mkdir()
    checkpoint.purge(cfg)
    assert checkpoint.saved_steps(checkpoint.root(cfg)) == [100, 200, 250]
    assert sorted(p.name for p in checkpoint.root(cfg).iterdir())[0] == "step-00000001.superseded"


def test_resume_settings(tmp_path):
    fake(configured(tmp_path), 10), fake(configured(tmp_path), 20)
    assert checkpoint.choose(configured(tmp_path, resume=10)) == 10
    with pytest.raises(ConfigError, match="resume = 7.*it has 10, 20"):
        checkpoint.choose(configured(tmp_path, resume=7))
    with pytest.raises(ConfigError, match='resume = "never"'):
        checkpoint.choose(configured(tmp_path, resume="never"))
    assert checkpoint.choose(make_config(run={"name": "r", "output_dir": str(tmp_path)})) == 0


def test_what_is_not_whole_is_set_aside(tmp_path):
    cfg = configured(tmp_path)
    fake(cfg, 10)
    (fake(cfg, 5) / "state.json").unlink()
    checkpoint.set_aside(cfg, 10)
    assert sorted(p.name for p in checkpoint.root(cfg).iterdir()) == ["step-00000005.corrupt", "step-00000010"]


def test_other_data_is_refused(tmp_path):
    cfg = configured(tmp_path)
    fake(cfg, 10, data={"identity": 1, "sha256": 2})
    checkpoint.check_same_data(cfg, 10, {"identity": 1, "sha256": 2})
    checkpoint.check_same_data(cfg, 0, {"identity": 3})
    with pytest.raises(ConfigError, match="was trained on other data .its sha256 differ"):
        checkpoint.check_same_data(cfg, 10, {"identity": 1, "sha256": 3})
    checkpoint.check_same_data(configured(tmp_path, allow_changed=["data.source"]), 10, {"identity": 1, "sha256": 3})


def test_later_checkpoints_are_set_aside(tmp_path):
    cfg = configured(tmp_path)
    for step in (10, 20, 30):
        fake(cfg, step)
    checkpoint.set_aside(cfg, 10)
    fake(cfg, 20)
    checkpoint.set_aside(cfg, 10)
    assert sorted(p.name for p in checkpoint.root(cfg).iterdir()) == [
        "step-00000010", "step-00000020.1.superseded", "step-00000020.superseded", "step-00000030.superseded"]


@pytest.mark.parametrize("section, key, value", [
    ("model", "dim", 64), ("train", "seq_len", 16), ("train", "global_batch_size", 16), ("run", "seed", 1),
    ("data", "source", "other.jsonl")])
def test_another_run_is_refused_by_name(tmp_path, section, key, value):
    fake(configured(tmp_path), 10)

    def changed(**keys):
        raw = config.to_dict(configured(tmp_path, **keys))
        raw[section][key] = value
        return config.from_dict(raw, "changed.toml")

    with pytest.raises(ConfigError, match=f"{section}.{key} = {value}.*was trained with"):
        checkpoint.choose(changed())
    assert checkpoint.choose(changed(allow_changed=[f"{section}.{key}"])) == 10


def test_steps_and_intervals_may_change(tmp_path):
    fake(configured(tmp_path), 10)
    raw = config.to_dict(configured(tmp_path, save_every_steps=5))
    raw["train"]["steps"], raw["log"]["every_steps"], raw["train"]["micro_batch_size"] = 99, 7, 1
    raw["optim"]["lr"], raw["parallel"]["recompute"], raw["data"]["path"] = 1.0, "full", "elsewhere"
    assert checkpoint.choose(config.from_dict(raw, "changed.toml")) == 10


@pytest.mark.parametrize("saved, loaded", [(1, 4), (4, 1), (2, 3)])
def test_any_number_of_ranks_reads_any(on_ranks, tmp_path, saved, loaded):
    """Weights and optimizer state, tensor by tensor."""
    wrote = on_ranks(saved, cases.save_trained, str(tmp_path))[0]
    read = on_ranks(loaded, cases.load_trained, str(tmp_path))[0]
    assert wrote == read and len({digest for name, digest in wrote.items() if "norm" not in name}) > 20


def test_a_plain_model_reads_it_and_differences_are_named(on_ranks, tmp_path):
    wrote = on_ranks(2, cases.save_trained, str(tmp_path))[0]
    cfg = make_config()
    folder = tmp_path / "r/checkpoints/step-00000003"
    model = Llama(cfg.model)
    optimizer = build_optimizer(model, cfg.optim)
    checkpoint.restore(folder, model, optimizer)
    assert cases.digests(checkpoint.tensors_of(model, optimizer)) == wrote
    deeper = Llama(make_config(model={"n_layers": 3}).model)
    with pytest.raises(ConfigError, match=r"has no model\.blocks\.2"):
        checkpoint.restore(folder, deeper, None)
    flatter = Llama(make_config(model={"n_layers": 1}).model)
    with pytest.raises(ConfigError, match=r"has model\.blocks\.1.*which this model does not"):
        checkpoint.restore(folder, flatter, build_optimizer(flatter, cfg.optim))
    wider = Llama(make_config(model={"ffn_dim": 96}).model)
    with pytest.raises(ConfigError, match=r"gate_proj.weight has shape .*80, 48.*this model's is .*96, 48"):
        checkpoint.restore(folder, wider, None)
    with pytest.raises(ConfigError, match="embedding.weight has type torch.float32, this model's is torch.bfloat16"):
        checkpoint.restore(folder, Llama(cfg.model).to(torch.bfloat16), None)
    shutil.rmtree(folder / ".metadata", ignore_errors=True)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint.restore(folder, model, None)


def test_a_run_keeps_what_it_should_and_says_no(write_config, tmp_path):
    path = write_config("kept", train={"steps": 7}, optim={"schedule_steps": 20},
                        checkpoint={"save_every_steps": 2, "keep_last": 2}, eval={"every_steps": 4})
    assert launch(path).returncode == 0
    folder = tmp_path / "outputs/kept"
    assert checkpoint.saved_steps(folder / "checkpoints") == [6, 7]
    assert [row["step"] for row in rows(folder, "eval")] == [4, 7]
    # back to step 6: rows after it go, step 7 is set aside
    assert launch(path, "--checkpoint.resume=6", "--train.steps=8").returncode == 0
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in rows(folder, "eval")] == [4, 8]
    assert (folder / "checkpoints/step-00000007.superseded").is_dir()
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in [(["--checkpoint.resume=5"], "resume = 5"), (["--checkpoint.resume=never"], "never"),
                               (["--train.seq_len=16"], "train.seq_len = 16"),
                               ([f"--run.output_dir={path}"], "is a file")]:
        done = launch(path, *arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_two_runs_in_one_folder(write_config, tmp_path):
    import lifecycle
    path = write_config("locked")
    folder = tmp_path / "outputs/locked"
    folder.mkdir(parents=True)
    held = lifecycle.lock(folder)
    done = launch(path)
    os.close(held)
    assert done.returncode == 2 and "another run works here" in done.stderr
    assert [p.name for p in folder.iterdir()] == [".lock"]
    assert launch(path).returncode == 0


def test_what_was_left_undone_is_done(write_config, tmp_path):
    """Killed after the last save: evaluation, purge and status are made up for, without a step."""
    path = write_config("undone", checkpoint={"keep_last": 1}, eval={})
    assert launch(path).returncode == 0
    folder = tmp_path / "outputs/undone"
    kept = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    (folder / "checkpoints/.step-00000009.tmp").mkdir()
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert launch(path).returncode == 0
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4] and [r["step"] for r in rows(folder, "eval")] == [4]
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000004"]


def test_an_offloaded_run_saves_and_goes_on(write_config, tmp_path):
    path = write_config("offloaded", train={"steps": 6}, optim={"schedule_steps": 6}, checkpoint={},
                        parallel={"cpu_offload": True, "dp_replicate": 2})
    assert launch(path, "--train.steps=3", nproc=2).returncode == 0
    done = launch(path, "--parallel.cpu_offload=false", "--parallel.dp_replicate=1")
    assert done.returncode == 0 and "going on after step 3" in done.stdout, done.stdout + done.stderr
    assert [row["step"] for row in rows(tmp_path / "outputs/offloaded")] == [1, 2, 3, 4, 5, 6]
