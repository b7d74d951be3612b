"""The same run on any mesh: tensor and context parallelism, and their products with FSDP2 and replicas, against a plain
loop that knows nothing of ranks. Losses, gradient norms, data and final weights of whole runs."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import config
from data.tokens import open_stream
from model.llama import Llama
from tests import cases
from tests.conftest import REPO, available, make_config, needs_extra
from tests.conftest import rows as metrics_rows
from tests.test_training import plain_loop, weights, with_data

pytestmark = [pytest.mark.first, pytest.mark.slow]

STEPS = 3
MESHES = {  # by the number of ranks
    2: {"tp 2": {"tp": 2}, "cp 2": {"cp": 2}},
    4: {
        "tp 4": {"tp": 4},
        "cp 4": {"cp": 4},
        "dp 2 x tp 2": {"tp": 2},
        "dp 2 x cp 2": {"cp": 2},
        "cp 2 x tp 2": {"cp": 2, "tp": 2},
        "replicate 2 x tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        "replicate 2 x cp 2": {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
    },
    8: {"dp 2 x cp 2 x tp 2": {"cp": 2, "tp": 2}},
}
# 4 divides neither 46 nor 38
MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 4, "head_dim": 6, "ffn_dim": 76}
VARIANTS = {
    "plain": {},
    "documents": {"data": {"document_mask": True}},
    "documents, full": {"data": {"document_mask": True}, "parallel": {"recompute": "full"}},
    "selective, grouped": {"model": {"n_kv_heads": 2}, "parallel": {"recompute": "selective"}},
    "tied, two micro-batches": {
        "model": {"tie_embeddings": True},
        "train": {"micro_batch_size": 2},
    },
    "deferred": {"train": {"micro_batch_size": 2}, "parallel": {"sync_every_micro_batch": False}},
    "kept after forward": {"parallel": {"reshard_after_forward": False}},
    "bfloat16 states, offloaded": {
        "optim": {"state_dtype": "bfloat16"},
        "parallel": {"cpu_offload": True},
    },
    # AdamW divides a gradient's size out again, but for one that is small against its eps
    "qk norm": {
        "model": {"qk_norm": True, "n_kv_heads": 2},
        "parallel": {"recompute": "selective"},
        "optim": {"eps": 1e-3},
    },
    "compiled": {
        "model": {"qk_norm": True},
        "parallel": {"compile": True, "recompute": "selective"},
    },
    "bfloat16": {"parallel": {"param_dtype": "bfloat16", "keep_fp32": ["blocks.0"]}},
}
VARIANTS = available(VARIANTS)
RUNS = {
    "plain": [mesh for meshes in MESHES.values() for mesh in meshes],
    "documents": ["cp 2", "dp 2 x cp 2", "replicate 2 x cp 2", "dp 2 x cp 2 x tp 2"],
    "documents, full": ["cp 4", "cp 2 x tp 2"],
    "selective, grouped": ["cp 2", "dp 2 x tp 2", "cp 2 x tp 2"],
    "tied, two micro-batches": ["tp 2", "cp 2", "dp 2 x cp 2", "dp 2 x tp 2"],
    "deferred": ["dp 2 x tp 2", "replicate 2 x tp 2"],
    "kept after forward": ["dp 2 x tp 2"],
    "bfloat16 states, offloaded": ["dp 2 x tp 2"],
    "qk norm": ["tp 2", "cp 2", "dp 2 x tp 2", "cp 2 x tp 2"],
    "compiled": ["tp 2"],
    "bfloat16": ["tp 2", "cp 2", "cp 2 x tp 2"],
}
RUNS = {variant: meshes for variant, meshes in RUNS.items() if variant in VARIANTS}


WEIGHTS = ("plain", "qk norm")  # compared, too


def sections(variant: str, mesh: dict) -> dict:
    changes = VARIANTS[variant]
    saved = {"checkpoint": {}} if variant in WEIGHTS else {}
    saved |= {"eval": {"batches": 1}} if variant == "plain" else {}
    return {
        **changes,
        **saved,
        "model": {**MODEL, **changes.get("model", {})},
        "train": {"steps": STEPS, "micro_batch_size": None, **changes.get("train", {})},
        "parallel": {**changes.get("parallel", {}), **mesh},
    }


def of_ranks(ranks: int) -> dict[str, dict]:
    found = {}
    for variant, meshes in RUNS.items():
        for mesh in meshes:
            if mesh in MESHES[ranks]:
                found[f"{variant}, {mesh}"] = sections(variant, MESHES[ranks][mesh])
    return found


@pytest.fixture(scope="module")
def trained(on_ranks, corpus, prepared, tmp_path_factory):
    """(rows by variant and mesh, the folder of runs below their number of ranks)."""
    output, found = tmp_path_factory.mktemp("meshes"), {}
    for ranks in filter(MESHES.get, MESHES):
        runs = {
            name: with_data(run, corpus, {320: prepared}) for name, run in of_ranks(ranks).items()
        }
        found |= on_ranks(ranks, cases.train_all, runs, str(output), True, timeout=500)[0]
    return found, output


@pytest.fixture(scope="module")
def expected(corpus, prepared):
    """By variant: (the plain loop's rows, its last weights); in float32, for bfloat16 too."""
    found = {}
    for variant in VARIANTS:
        alone, last = {**sections(variant, {}), "parallel": {}}, {}
        found[variant] = (
            plain_loop(make_config(**with_data(alone, corpus, {320: prepared})), last),
            last,
        )
    return found


@pytest.fixture(scope="module")
def heldout_loss(expected, prepared):
    """Of the plain loop's last weights, on the first eight windows held out."""
    model = Llama(make_config(model=MODEL).model)
    model.load_state_dict(
        {name.removeprefix("model."): p for name, p in expected["plain"][1].items()}, strict=False
    )
    ids = open_stream(prepared, "validation", 320).read(0, 8 * 32 + 1)[1]
    with torch.no_grad():
        return F.cross_entropy(model(ids[:-1].view(8, 32)).flatten(0, 1), ids[1:]).item()


@pytest.mark.parametrize(
    "ranks, mesh", [(ranks, mesh) for ranks, meshes in MESHES.items() for mesh in meshes]
)
def test_a_run_does_not_depend_on_the_mesh(trained, expected, heldout_loss, ranks, mesh):
    for variant in [variant for variant, meshes in RUNS.items() if mesh in meshes]:
        rows, (wanted, _) = trained[0][f"{variant}, {mesh}"], expected[variant]
        near = 2**-8 if variant == "bfloat16" else 1e-5
        for step, row in enumerate(rows, 1):  # 8 sequences of 32
            slowest = row["slowest_rank"]
            together = row["tokens_per_second_per_device"] * ranks * slowest["step_seconds"]
            assert (
                together == pytest.approx(8 * 32)
                and row["tokens"] == step * 8 * 32
                and row["mfu"] is None
            )
            assert all(slowest[key] >= row[key] > 0 for key in slowest)
        assert [row["batch_digest"] for row in rows] == [row["batch_digest"] for row in wanted]
        for key in ("loss", "grad_norm") if variant != "bfloat16" else ("loss",):
            assert [row[key] for row in rows] == pytest.approx(
                [row[key] for row in wanted], rel=near
            ), (variant, key)
        folder = trained[1] / str(ranks) / f"{variant}-{mesh}".replace(" ", "-")
        found = weights(folder, STEPS) if variant in WEIGHTS else {}
        for name, tensor in (expected[variant][1] if found else {}).items():
            assert (found[name] - tensor).norm() < 1e-5 * tensor.norm(), (variant, name)
    folder = trained[1] / str(ranks) / f"plain-{mesh}".replace(" ", "-")
    assert [row["loss"] for row in metrics_rows(folder, "eval")] == pytest.approx(
        [heldout_loss], rel=1e-5
    )


def test_bfloat16_is_not_float32(trained):
    assert trained[0]["bfloat16, tp 2"][0]["loss"] != trained[0]["plain, tp 2"][0]["loss"]


def test_compiled_blocks_share_a_sequence(on_ranks):
    """Traced and partitioned, but for the kernels."""
    cases_ = [sections("compiled", {"cp": 2, "compile": compiled}) for compiled in (False, True)]
    (loss, norms), expected = on_ranks(2, cases.same_batch_traced, cases_)[0][::-1]
    assert loss == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(
        expected[1], rel=1e-5
    )


def test_a_checkpoint_of_one_mesh_goes_on_on_any_other(
    on_ranks, corpus, prepared, tmp_path, capsys
):
    """From dp 2 x tp 2 to one process, to tp 4, to cp 2, and from there back: data and losses of a run without a break.
    Its export is the checkpoint's own tensors."""
    data = with_data(
        {**sections("plain", {}), "optim": {"schedule_steps": 6}, "eval": None},
        corpus,
        {320: prepared},
    )
    last: dict = {}
    wanted = plain_loop(make_config(**{**data, "train": {**data["train"], "steps": 6}}), last)

    def go_on(ranks: int, folder: str, steps: int, mesh: dict) -> list[dict]:
        return on_ranks(
            ranks, cases.train_to, steps, {**data, "parallel": mesh}, str(tmp_path / folder)
        )[0]

    go_on(4, "first", 2, {"tp": 2})
    for folder in ("alone", "tp 4", "back"):
        shutil.copytree(tmp_path / "first", tmp_path / folder)
    found = {"alone": go_on(1, "alone", 6, {}), "tp 4": go_on(4, "tp 4", 6, {"tp": 4})}
    go_on(2, "back", 4, {"cp": 2})
    found["back"] = go_on(4, "back", 6, {"tp": 2})
    for name, rows in found.items():
        assert [row["batch_digest"] for row in rows] == [row["batch_digest"] for row in wanted], (
            name
        )
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in rows] == pytest.approx(
                [row[key] for row in wanted], rel=1e-5
            ), name
    stored = weights(tmp_path / "back/r", 6)
    if not config.has_extra("huggingface"):
        return
    from extras.huggingface import convert as hf
    from extras.huggingface.weights import hf_name

    assert hf.main(["export", str(tmp_path / "back/r"), str(tmp_path / "out")]) == 0, (
        capsys.readouterr().err
    )
    exported = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in last.items():
        ours = exported[hf_name(name.removeprefix("model."))]
        assert ours.equal(stored[name]) and (ours - tensor).norm() < 1e-5 * tensor.norm()


TABLE = re.findall(
    r"^\| .+ \| `NPROC=(\d) ./run_train.sh (\S+) (.+?)`", (REPO / "docs/fsdp2.md").read_text(), re.M
)


@needs_extra("float8", "huggingface", "lora", "optimizers", "reports")
def test_the_commands_of_the_documented_table_train(on_ranks, corpus, prepared, tmp_path):
    """With their options, on a smaller model and in this folder."""
    small = [
        f"--model.{key}={value}"
        for key, value in {**MODEL, "n_layers": 1, "vocab_size": 320}.items()
    ]
    small += [
        f"--data.source={corpus}",
        f"--data.path={prepared}",
        f"--run.output_dir={tmp_path}",
        "--run.device=cpu",
        "--train.steps=1",
        "--train.seq_len=32",
        "--optim.warmup_steps=1",
    ]
    runs: dict[int, list[list[str]]] = {}
    for number, (ranks, _, options) in enumerate(TABLE):
        off = [] if "tensorboard" in options else ["--log.tensorboard=false"]
        off += ["--eval.batches=1"] if "eval" in options else ["--eval=off"]
        # sides that 16 divides
        wide = ["--model.dim=48", "--model.ffn_dim=80"] if "float8" in options else []
        command = [*small, *wide, f"--run.name=r{number}", *off, *options.split()]
        if "compile" in options:  # half a minute each: so is a run above
            assert config.load(str(REPO / "configs/tiny.toml"), command).parallel.compile
        else:
            runs.setdefault(int(ranks), []).append(command)
    assert len(TABLE) >= 18 and {path for _, path, _ in TABLE} == {"configs/tiny.toml"}
    for ranks, commands in runs.items():
        assert on_ranks(ranks, cases.train_files, str(REPO / "configs/tiny.toml"), commands)[0] == [
            1
        ] * len(commands)
    assert (
        list((tmp_path / "r0").glob("*"))
        and config.load(str(tmp_path / "r3/config.toml")).parallel.tp == 2
    )
