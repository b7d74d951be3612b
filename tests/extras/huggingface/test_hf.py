"""Hugging Face folders: against transformers, on 1, 2 and 4 ranks; training from them; memory; and what is refused."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

import config
from config import ConfigError
from extras.huggingface import config as hf_config
from extras.huggingface import weights as hf_weights
from extras.huggingface.weights import StoredTensor, Weights, hf_name, weights_to_read
from model.build import meta_model
from model.llama import named_parameters
from optim import learning_rate
from parallel.materialize import local_tensors, materialize, open_pretrained
from parallel.parallelize import parallelize
from tests.conftest import (
    REPO,
    TINY,
    build,
    hashes,
    launch,
    loader_of,
    make_config,
    mesh_for,
    refuses,
    run_tool,
    tables,
    token_ids,
    train_run,
)
from tests.distributed import distributed
from tests.model.test_llama import SCALING

pytestmark = pytest.mark.early

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# TINY's sizes unless given
MODELS: dict[str, dict] = {
    "single": {},
    "sharded": {"rope_parameters": LLAMA3},
    "tied": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "uneven": {  # sizes that 4 ranks do not divide
        "hidden_size": 50,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "intermediate_size": 75,
        "vocab_size": 323,
        "head_dim": 20,
    },
    "old": {"rope_parameters": LLAMA3},
    "qwen3": {"kind": Qwen3Config, "head_dim": 20, "bos_token_id": 1, "eos_token_id": 2},
    "qwen3-tied": {"kind": Qwen3Config, "head_dim": 12, "tie_word_embeddings": True},
}
NORM = "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def reference(kind: type = LlamaConfig, **changes: Any) -> PreTrainedModel:
    m = TINY["model"]
    settings = {
        "vocab_size": m["vocab_size"],
        "hidden_size": m["dim"],
        "intermediate_size": m["ffn_dim"],
        "num_hidden_layers": m["n_layers"],
        "num_attention_heads": m["n_heads"],
        "num_key_value_heads": m["n_kv_heads"],
        "rope_parameters": ROPE,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**settings, **changes}), dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim == 1:  # so that norms differ
            torch.nn.init.normal_(weight, 1.0, 0.2)
    return model


def edit(path: pathlib.Path, **changes: Any) -> None:
    """Changes a JSON object's keys; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def make_old(folder: pathlib.Path) -> None:
    """As version 3 of transformers saved it."""
    scaling = {key: value for key, value in LLAMA3.items() if not key.startswith("rope_")}
    edit(
        folder / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "llama3", **scaling},
        head_dim=None,
        dtype=None,
        torch_dtype="float32",
        attention_bias=None,
        mlp_bias=None,
        hidden_act=None,  # its default is silu
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6).double()
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, prepared) -> dict[str, pathlib.Path]:
    """As transformers saves them. Not to be changed."""
    root = tmp_path_factory.mktemp("hf")
    for name, changes in MODELS.items():
        size = "30KB" if name in ("sharded", "uneven") else "1GB"
        reference(**changes).save_pretrained(root / name, max_shard_size=size)
        shutil.copy(prepared / "tokenizer.model", root / name)
    assert len(list((root / "sharded").glob("*.safetensors"))) > 3
    make_old(root / "old")
    return {name: root / name for name in MODELS}


@pytest.fixture
def copy_of(folders, tmp_path) -> Callable[..., pathlib.Path]:
    """A function: a model's name -> a folder of it that may be changed."""
    return lambda name, to="hf": shutil.copytree(folders[name], tmp_path / to)


def config_from(folder: object, **sections: dict) -> config.Config:
    """TINY, but for the model: that comes from the folder."""
    given = {**tables(**sections), "model": {"init_from": str(folder)}}
    return config.from_dict(given, "test.toml")


def stored_in(folder: pathlib.Path) -> Weights:
    weights = weights_to_read(config_from(folder), 0)
    assert weights
    return weights


def change_weights(folder: pathlib.Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def in_transformers(folder: pathlib.Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")


# Reading and training


@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 1), (4, 1), (4, 2)])
@distributed()
def test_logits_and_weights_are_those_of_transformers(world, folders, ranks, tp):
    for name, folder in folders.items():
        if tp > 1 and name == "uneven":
            continue
        theirs = in_transformers(folder)
        cfg = config_from(folder, parallel={"tp": tp})
        model = build(cfg, mesh_for(cfg, world), stored_in(folder).read_into)
        tokens = token_ids(2, 40, vocab_size=cfg.model.vocab_size)
        # the first ids of each half, as tp cuts the vocabulary
        tokens[:, :2] = torch.tensor([0, cfg.model.vocab_size // 2])
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
        ours = {hf_name(key): value for key, value in hashes(dict(named_parameters(model))).items()}
        assert ours == hashes(dict(theirs.named_parameters()))


def plain_loop(theirs: PreTrainedModel, cfg: config.Config) -> list[dict]:
    """Training as a textbook has it: transformers' model, torch's AdamW, the whole batch at once."""
    o = cfg.optim
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    norms = [p for p in theirs.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=o.betas,
        eps=o.eps,
    )
    limit = cfg.train.max_grad_norm
    assert limit != "off"
    loader = loader_of(cfg)
    steps = []
    for step in range(1, cfg.train.steps + 1):
        inputs, targets = (torch.cat(tensors) for tensors in zip(*next(loader).micro_batches))
        loss = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, config.schedule_steps(cfg), step)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    loader.close()
    return steps


@pytest.mark.quick
@distributed(ranks=2)
def test_training_from_it_is_transformers_training(world, copy_of, prepared, tmp_path):
    """... and resumes from its checkpoint when the folder is gone."""
    folder = tmp_path / "hf"
    if world.rank == 0:
        copy_of("sharded")
    dist.barrier()
    data = {"source": str(prepared)}
    run = {"name": "r", "output_dir": str(tmp_path / "outputs")}
    cfg = config_from(folder, run=run, train={"steps": 6}, data=data, checkpoint={})
    expected = plain_loop(in_transformers(folder), cfg)
    begun = dataclasses.replace(
        cfg,
        train=dataclasses.replace(cfg.train, steps=5),
        optim=dataclasses.replace(cfg.optim, schedule_steps=6),
    )
    train_run(begun, world)
    dist.barrier()
    if world.rank == 0:
        folder.rename(tmp_path / "gone")
    dist.barrier()
    resumed = config.load(f"{tmp_path}/outputs/r/config.toml", ["--train.steps=6"])
    rows = train_run(resumed, world)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(rows, expected):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@distributed(ranks=2)
def test_an_error_of_one_rank_is_raised_on_all(world, folders):
    cfg = config_from(folders["single"])
    weights = stored_in(folders["single"])
    if world.rank == 1:
        stored = weights.stored["head.weight"]
        lost = dataclasses.replace(stored, path=stored.path.with_name("lost"))
        weights.stored["head.weight"] = lost
    with refuses("lost: is not there"):
        build(cfg, world, weights.read_into)


@distributed(ranks=2)
def test_a_weight_that_is_not_finite_is_named_on_all_ranks(world, folders, tmp_path):
    folder = shutil.copytree(folders["single"], tmp_path / f"{world.rank}")
    change_weights(folder, lambda t: t[NORM][-1].fill_(float("nan")))  # the second rank's
    with refuses(r"blocks.0.attention_norm.weight: holds values that are not"):
        build(config_from(folder), world, stored_in(folder).read_into)


@pytest.mark.parametrize("factor", [1, 3])
@distributed(ranks=2)
def test_each_node_may_have_its_own_copy_of_the_same_weights(world, folders, tmp_path, factor):
    folder = shutil.copytree(folders["single"], tmp_path / f"{world.rank}")
    change_weights(folder, lambda t: t[NORM].mul_(factor**world.rank))
    differs = refuses("rank 1 has model.safetensors = ", "all nodes need the same weights")
    with differs if factor != 1 else contextlib.nullcontext():
        opened = open_pretrained(config_from(folder), 0)
        assert {stored.path.parent for stored in opened.stored.values()} == {folder}


def test_copies_that_differ_in_any_sixteenth_are_told_apart(tmp_path):
    """Also where a file is larger than what is read of it: two fine-tunings may begin with the same embedding."""
    path = tmp_path / "model.safetensors"
    weights = Weights({"head.weight": StoredTensor(path, HEAD, "F32", [])})
    zeros = bytes(2**22)
    size = len(zeros) // 16
    contents = [zeros, zeros + b"\0"]
    for i in range(16):
        contents.append(zeros[: i * size] + b"\1" * size + zeros[(i + 1) * size :])
    digests = set()
    for content in contents:
        path.write_bytes(content)
        digests.add(weights.file_digests()[path.name])
    assert len(digests) == len(contents)


def test_weights_are_hashed_in_blocks_of_rows_of_any_size(folders, monkeypatch):
    """Of shards whose rows are more than a block has, also of one row and of less: the same values and one hash."""
    all_stored = stored_in(folders["uneven"]).stored
    stored = {name: all_stored[name] for name in all_stored if name.startswith("blocks.0.")}
    full = {name: Weights(stored).read(name) for name in stored}
    fingerprints = set()
    for block, rows in ((2**20, 999), (7 * 50, 31), (50, 8), (1, 5)):
        monkeypatch.setattr(hf_weights, "HASHED_AT_ONCE", block)
        sums: dict[tuple, int] = {}
        for name, values in full.items():
            for begin in range(0, len(values), rows):  # a rank's
                shard = torch.empty_like(values[begin : begin + rows])
                offsets = (begin, *[0] * (values.ndim - 1))
                assert Weights(stored, sums).read_into(name, offsets, shard)
                assert shard.equal(values[begin : begin + rows]), (name, block)
        fingerprints.add(hf_weights.fingerprint([sums]))
    at_once = {}
    for name, values in full.items():
        at_once[name, 0] = hf_weights.weighted_sum(name, (0, 0), [*values.shape], values)
    assert fingerprints == {hf_weights.fingerprint([at_once])}


@pytest.mark.quick
def test_any_rectangle_is_read(folders):
    weights = stored_in(folders["uneven"])
    for name, offsets, shape in (
        ("head.weight", (0, 0), (323, 50)),
        ("head.weight", (162, 25), (161, 25)),
        ("embedding.weight", (100, 7), (1, 43)),
        ("head.norm.weight", (49,), (1,)),
        ("head.weight", (323, 0), (0, 50)),
        ("head.norm.weight", (50,), (0,)),
    ):
        full = weights.read(name)
        for dtype in (torch.float32, torch.bfloat16):
            wider = torch.full((shape[0], *(2 * n for n in shape[1:])), 9.0, dtype=dtype)
            out = wider[tuple(slice(n) for n in shape)]  # not contiguous
            weights.read_into(name, offsets, out)
            index = tuple(slice(first, first + n) for first, n in zip(offsets, shape))
            assert torch.equal(out, full[index].to(dtype)), (name, offsets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_read_exactly(copy_of, dtype):
    folder = copy_of("single")
    change_weights(folder, lambda t: t.update({name: t[name].to(dtype) for name in t}))
    weights = stored_in(folder)
    theirs = load_file(folder / "model.safetensors")
    for name in weights.stored:
        assert torch.equal(weights.read(name), theirs[hf_name(name)].float())


WRAPPED = "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: name.replace(".self_attn.", WRAPPED),
    ],
    ids=["DDP", "compiled", "FSDP1"],
)
def test_names_of_wrapping_modules_are_left_out(copy_of, folders, rename):
    folder = copy_of("single")
    expected = stored_in(folders["single"])
    tensors = load_file(folder / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    weights = stored_in(folder)
    for name in expected.stored:
        assert torch.equal(weights.read(name), expected.read(name))
    both = {name: tensor.clone() for name, tensor in (renamed | tensors).items()}
    save_file(both, folder / "model.safetensors")
    with refuses("model.safetensors: ", " and ", "; keep one"):
        stored_in(folder)


def test_a_tied_head_of_equal_values_in_another_dtype_is_read(copy_of):
    folder = copy_of("tied")
    change_weights(folder, lambda t: t.update({EMBEDDING: t[EMBEDDING].bfloat16()}))
    change_weights(folder, lambda t: t.update({HEAD: t[EMBEDDING].float()}))
    assert "head.weight" not in stored_in(folder).stored


def resident_mib(field: str) -> float:
    """VmRSS: now; VmHWM: the most since it was last reset."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


@distributed(ranks=2)
def test_reading_takes_no_memory_beside_the_shards(world, tmp_path):
    sizes = {"dim": 768, "n_layers": 8, "n_heads": 12, "n_kv_heads": 12, "ffn_dim": 2112}
    cfg = make_config(model={**sizes, "vocab_size": 12288, "init_from": str(tmp_path)})
    if world.rank == 0:
        tensors = {hf_name(name): torch.ones(s) for name, s in hf_weights.shapes(cfg.model).items()}
        save_file(tensors, tmp_path / "model.safetensors")
    dist.barrier()
    model = meta_model(cfg.model, None)
    parallelize(model, cfg, world)
    weights = weights_to_read(cfg, 0)
    assert weights
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_mib("VmRSS")
    materialize(model, 0, world.device, weights.read_into)
    shard = sum(tensor.nbytes for _, tensor in local_tensors(model)) / 2**20
    assert shard > 140 and resident_mib("VmHWM") - before < shard + 80


# config.json


def test_what_a_folder_leaves_out_is_transformers_default(copy_of):
    folder = copy_of("single")
    absent = ("rms_norm_eps", "num_key_value_heads", "tie_word_embeddings", "rope_parameters")
    edit(folder / "config.json", **dict.fromkeys(absent))
    m = config_from(folder).model
    theirs = LlamaConfig.from_pretrained(folder)
    assert theirs.rope_parameters and m.rope_scaling is None
    assert m.rope_theta == theirs.rope_parameters["rope_theta"]
    assert m.norm_eps == theirs.rms_norm_eps and m.n_kv_heads == theirs.num_key_value_heads
    assert m.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("name", MODELS)
def test_sizes_come_from_the_folder_and_read_back(folders, tmp_path, name):
    cfg = config_from(folders[name])
    m = cfg.model
    theirs = in_transformers(folders[name]).config
    assert (m.dim, m.ffn_dim) == (theirs.hidden_size, theirs.intermediate_size)
    assert m.width_per_head == theirs.head_dim and m.norm_eps == theirs.rms_norm_eps
    assert m.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (m.rope_scaling is not None) == (theirs.rope_parameters["rope_type"] == "llama3")
    (tmp_path / "test.toml").write_text(config.to_toml(cfg))
    assert config.load(str(tmp_path / "test.toml")) == cfg


@pytest.mark.parametrize("name", MODELS)
def test_every_key_of_config_json_is_what_transformers_makes_of_the_model(folders, name):
    """All that its configuration class has, in the spelling of transformers 5 and in that of older versions."""
    apart = {"transformers_version", "_name_or_path", "initializer_range", "dtype"}
    theirs = AutoConfig.from_pretrained(folders[name])
    ids = {"bos_token_id": theirs.bos_token_id, "eos_token_id": theirs.eos_token_id}
    rendered = hf_config.render(config_from(folders[name]).model, 64, "bfloat16", ids)
    assert rendered["dtype"] == rendered["torch_dtype"] == "bfloat16"
    for left_out in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        spelled = {key: value for key, value in rendered.items() if key not in left_out}
        both = []
        for each in (type(theirs).from_dict(spelled), theirs):
            values = {key: value for key, value in each.to_dict().items() if key not in apart}
            values["rope_parameters"].pop("type", None)  # of older versions, beside rope_type
            both.append(values)
        assert both[0] == both[1], left_out


def test_heads_of_a_fresh_model_are_as_wide_as_its_sizes_say():
    """And not as Qwen3's smallest."""
    fresh = hf_config.render(make_config(model={"qk_norm": True}).model, 64, "float32", {})
    assert Qwen3Config.from_dict(fresh).head_dim == 48 // 4


def test_an_export_says_how_far_its_rotary_table_reaches():
    """As far as it is stretched, where the training was no longer than what it was stretched from."""
    for scaling, seq_len, expected in (
        (SCALING, 8, 256),
        (SCALING, 32, 256),
        (SCALING, 33, 33),
        (SCALING, 999, 999),
        (None, 32, 32),
    ):
        m = make_config(model={"rope_scaling": scaling}).model
        rendered = hf_config.render(m, seq_len, "float32", {})
        assert rendered["max_position_embeddings"] == expected


def test_a_parameter_without_a_hugging_face_name_is_refused():
    assert hf_name("blocks.12.feed_forward.up_proj.weight") == "model.layers.12.mlp.up_proj.weight"
    for name in ("blocks.0.attention.gate.weight", "scale", "head.bias"):
        with refuses(f"{name}: has no name in a Hugging Face folder.*NAMES"):
            hf_name(name)


def test_torch_is_not_needed_for_config_json(folders):
    code = (
        "import sys, config; tables = {'model': {'init_from': sys.argv[1]}, 'train': {'steps': 1}}; "
        "cfg = config.from_dict(tables, 'test.toml'); assert cfg.model.dim == 48 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, folders["tied"]], cwd=REPO, check=True)


# What is refused


def test_sizes_that_disagree_are_all_named(folders):
    given = {
        "init_from": str(folders["sharded"]),
        "dim": 64,
        "vocab_size": 400,
        "norm_eps": 1e-5,
        "head_dim": 12,
        "rope_scaling": {"factor": 4.0},
    }
    with refuses("leave it out") as refused:
        config.from_dict({**tables(), "model": given}, "test.toml", ["--model.tie_embeddings=true"])
    assert len(refused.value.problems) == 5
    for words in (
        "test.toml: [model] dim = 64",
        "hidden_size = 48",
        "vocab_size = 400",
        "its weights have no more rows",
        "rms_norm_eps = 1e-06",
        "rope_scaling.factor = 4.0",
        "command line: [model] tie_embeddings = true",
    ):
        assert words in str(refused.value)
    with refuses("rope_scaling.factor = 4.0: .*absent"):
        config.from_dict(
            {**tables(), "model": {**given, "init_from": str(folders["single"])}}, "test.toml"
        )
    with refuses("rope_scaling is off.*leave it out"):
        model = {"init_from": str(folders["sharded"])}
        config.from_dict({**tables(), "model": model}, "test.toml", ["--model.rope_scaling=off"])


def test_a_folder_that_is_not_there(folders, tmp_path):
    for name in ("a" * 999, folders["single"] / "config.json"):
        with refuses("init_from = .*has no config.json.* or the id of a repository"):
            config_from(name)
    with refuses("run the export first: ./run_train.sh -m huggingface export RUN outputs/tiny-hf"):
        config_from("outputs/tiny-hf")
    # complete: it may resume from a checkpoint
    cfg = make_config(model={"init_from": str(tmp_path / "gone")})
    with refuses("gone: has neither model.safetensors"):
        weights_to_read(cfg, 0)


def test_a_launch_refuses_it_before_it_makes_anything(copy_of, prepared, write_config, tmp_path):
    folder = copy_of("sharded")
    path = write_config(
        model={"init_from": str(folder), "norm_eps": 1e-6, "rope_theta": 1e4},
        data={"source": str(prepared), "path": None},
    )
    next(folder.glob("model-00002*")).unlink()
    done = launch(path)
    assert done.returncode == 2 and "model-00002-of-" in done.stderr
    assert "is not there" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "outputs/test").exists()


def test_an_import_is_evaluated_without_the_folder_that_it_is_of(
    copy_of, prepared, write_config, tmp_path
):
    folder = copy_of("single")
    path = write_config(
        model={"init_from": str(folder), "norm_eps": 1e-6},
        data={"source": str(prepared), "path": None},
    )
    huggingface = pytest.importorskip("tools.huggingface")
    imported = tmp_path / "outputs/test/checkpoints/step-00000000"
    assert run_tool(huggingface.main, "import", folder, imported) == 0
    with_folder = launch(path, "--eval-only")
    shutil.rmtree(folder)
    without = launch(path, "--eval-only")
    assert without.returncode == 0 and without.stdout == with_folder.stdout, without.stderr
    assert json.loads(without.stdout)["step"] == 0


def settings(**changes: Any) -> Callable[[pathlib.Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def weights(change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:
    return lambda folder: change_weights(folder, change)


def index(change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return spoil


def cut(name: str, size: int) -> Callable[[pathlib.Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def only_pickled(folder: pathlib.Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def a_pipe(folder: pathlib.Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def lfs_pointers(pattern: str) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        for path in folder.glob(pattern):
            path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 98\n")

    return spoil


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = "is a git-lfs pointer, not the file itself; fetch what its folder points to: git -C "
CUT = "is no safetensors file, or cut short"
OF_TIED = f"{HEAD} differs from {EMBEDDING}"
MUST_BE = "must be F32 or BF16 or F16 of shape [48]"


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, spoil, problems",
    [
        (
            "single",
            settings(architectures=["MistralForCausalLM"]),
            ['["MistralForCausalLM"]: only'],
        ),
        ("single", settings(model_type="mistral"), ['model_type = "mistral"']),
        (
            "single",
            settings(attention_bias=True, mlp_bias=True),
            ["attention_bias = ", "mlp_bias = "],
        ),
        ("single", settings(hidden_act="gelu"), ['hidden_act = "gelu"']),
        ("single", settings(quantization_config={"bits": 4}), ["quantization_config"]),
        ("single", settings(partial_rotary_factor=0.5), ["partial_rotary_factor = 0.5"]),
        ("single", settings(attention_dropout=0.1), ["attention_dropout = 0.1: is not read here"]),
        ("single", settings(auto_map={"AutoModel": "m.M"}), ["auto_map = {", "is not read"]),
        ("single", settings(num_key_value_heads=3), ["n_kv_heads = 3: must divide"]),
        (
            "single",
            settings(hidden_size="48", num_hidden_layers=0, rms_norm_eps=-1, vocab_size=None),
            [
                'hidden_size = "48": must be an integer',
                "num_hidden_layers = 0: must be greater",
                "rms_norm_eps = -1",
                "vocab_size is missing",
            ],
        ),
        (
            "single",
            settings(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
            ['rope_parameters.rope_type = "yarn"'],
        ),
        (
            "single",
            settings(rope_scaling={**LLAMA3, "factor": "8", "low_freq_factor": None}),
            [
                'rope_scaling.factor = "8": must be a number',
                "rope_scaling.low_freq_factor is missing",
            ],
        ),
        (
            "single",
            settings(
                rope_parameters={**ROPE, "partial_rotary_factor": 0.5, "attention_factor": 0.5}
            ),
            ["partial_rotary_factor = 0.5", "rope_parameters.attention_factor = 0.5: is not read"],
        ),
        ("single", settings(rope_scaling=[8]), ["rope_scaling = [8]"]),
        (
            "qwen3",
            settings(architectures=["LlamaForCausalLM"]),
            ['only ["Qwen3ForCausalLM"] can be'],
        ),
        (
            "qwen3",
            settings(architectures=["LlamaForCausalLM"], model_type="llama"),
            ["has model.layers.0.self_attn.q_norm.weight, which this model does not"],
        ),
        (
            "qwen3",
            settings(use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
            ["use_sliding_window = true", 'layer_types = "sliding_attention"'],
        ),
        (
            "qwen3",
            settings(head_dim=None, num_key_value_heads=None),
            ["head_dim is missing", "num_key_value_heads is missing"],
        ),
        ("single", cut("config.json", 40), ["config.json: cannot be read"]),
        ("single", lfs_pointers("config.json"), [f"config.json: {POINTER}"]),
        ("single", lfs_pointers(SINGLE), [f"{SINGLE}: {POINTER}"]),
        ("sharded", lfs_pointers("model-*"), [f".safetensors: {POINTER}"]),
        (
            "single",
            weights(lambda t: t.update(other=t.pop(NORM))),
            [f"has no {NORM}", "has other, which this model does not"],
        ),
        ("single", settings(num_hidden_layers=4), ["hf: 8 more tensors do not fit the model"]),
        ("tied", weights(lambda t: t.update({HEAD: t[EMBEDDING] + 1e-3})), [OF_TIED]),
        (
            "single",
            weights(lambda t: t.update({NORM: torch.ones(47)})),
            [f"is F32 [47]; {MUST_BE}"],
        ),
        (
            "single",
            weights(lambda t: t.update({NORM: t[NORM].double()})),
            [f"{NORM} is F64 [48]; {MUST_BE}"],
        ),
        (
            "single",
            weights(lambda t: [t.update({f"net.{name}": t.pop(name)}) for name in [*t]]),
            ["as no Llama or Qwen3 model of transformers does, net.lm_head.weight for example"],
        ),
        ("single", only_pickled, ["has neither model.safetensors nor"]),
        ("single", cut(SINGLE, 100_000), [CUT]),
        ("single", cut(SINGLE, 300), [CUT]),
        ("single", lambda f: (f / SINGLE).open("ab").write(b"more"), [CUT]),
        ("single", a_pipe, [f"{SINGLE}: is no regular file"]),
        (
            "sharded",
            lambda f: [next(f.glob(f"model-0000{i}*")).unlink() for i in (1, 3)],
            ["model-00001-of", "model-00003-of", "is not there"],
        ),
        ("sharded", index(lambda files: files.clear()), ["needs weight_map"]),
        ("sharded", index(lambda files: files.update({NORM: "../x"})), ["needs weight_map"]),
        (
            "sharded",
            index(lambda files: files.update({NORM: files[HEAD]})),
            [f"has no {NORM}, which {INDEX} lists"],
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(copy_of, name, spoil, problems):
    folder = copy_of(name)
    spoil(folder)
    with pytest.raises(ConfigError) as refused:
        stored_in(folder)
    error = str(refused.value)
    assert all(problem in error for problem in problems), error
    assert all(str(folder) in line for line in error.splitlines())
