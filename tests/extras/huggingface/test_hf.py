"""Hugging Face folders: against transformers, on 1, 2 and 4 ranks; training from them; and what is refused."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, Qwen3Config

import config
from config import ConfigError
from extras.huggingface import config as hf_config
from extras.huggingface import weights as hf_weights
from extras.huggingface.weights import StoredTensor, Weights, hf_name, weights_to_read
from model.llama import named_parameters
from parallel.materialize import open_pretrained
from tests.conftest import (
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
from tests.extras.huggingface.conftest import in_transformers, write_folder
from tests.model.test_llama import SCALING

pytestmark = pytest.mark.early

# sizes that 4 ranks do not divide
UNEVEN = dict(dim=50, n_heads=5, n_kv_heads=1, ffn_dim=75, vocab_size=323, head_dim=20)
MODELS: dict[str, dict] = {  # TINY's sizes unless given
    "single": {"norm_eps": 1e-6, "rope_theta": 1e4},
    "sharded": {"rope_scaling": SCALING},
    "tied": {"rope_scaling": SCALING, "tie_embeddings": True},
    "uneven": UNEVEN,
    "old": {"rope_scaling": SCALING, "rope_theta": 1e4},
    "qwen3": {"qk_norm": True, "head_dim": 20},
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def edit(path: pathlib.Path, **changes: Any) -> None:
    """Changes a JSON object's keys; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def weights(change: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:
    """A change of a folder's tensors."""

    def spoil(folder: pathlib.Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE)

    return spoil


def make_old(folder: pathlib.Path) -> None:
    """As version 3 of transformers saved it."""
    dropped = "rope_parameters head_dim dtype attention_bias mlp_bias hidden_act"
    edit(folder / "config.json", **dict.fromkeys(dropped.split()), torch_dtype="float32")
    scaling = {"type": "llama3", **SCALING}
    edit(folder / "config.json", rope_theta=1e4, rope_scaling=scaling)
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6).double()}
    weights(lambda t: t.update(constant))(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, prepared) -> dict[str, pathlib.Path]:
    """As transformers saves them. Not to be changed."""
    root = tmp_path_factory.mktemp("hf")
    for name, changes in MODELS.items():
        shards = "30KB" if name in ("sharded", "uneven") else "1GB"
        write_folder(root / name, prepared, shards, **changes)
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
    stored = weights_to_read(config_from(folder), 0)
    assert stored
    return stored


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


@pytest.mark.quick
@distributed(ranks=2)
def test_training_begins_with_its_loss_and_resumes_when_the_folder_is_gone(
    world, copy_of, prepared, tmp_path
):
    folder = tmp_path / "hf"
    if world.rank == 0:
        copy_of("sharded")
    dist.barrier()
    run = {"name": "r", "output_dir": str(tmp_path)}
    cfg = config_from(folder, run=run, data={"source": str(prepared)}, checkpoint={})
    loader = loader_of(cfg)
    inputs, targets = (torch.cat(tensors) for tensors in zip(*next(loader).micro_batches))
    loader.close()
    with torch.no_grad():
        logits = in_transformers(folder)(inputs).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert train_run(cfg, world)[0]["loss"] == pytest.approx(expected, rel=1e-5)
    dist.barrier()
    if world.rank == 0:
        folder.rename(tmp_path / "gone")
    dist.barrier()
    options = ["--train.steps=6", "--optim.schedule_steps=4"]
    resumed = train_run(config.load(f"{tmp_path}/r/config.toml", options), world)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]


@distributed(ranks=2)
def test_a_weight_that_is_not_finite_is_named_on_all_ranks(world, folders, tmp_path):
    folder = shutil.copytree(folders["single"], tmp_path / f"{world.rank}")
    weights(lambda t: t[NORM][-1].fill_(float("nan")))(folder)  # the second rank's
    with refuses(r"blocks.0.attention_norm.weight: holds values that are not"):
        build(config_from(folder), world, stored_in(folder).read_into)


@pytest.mark.parametrize("factor", [1, 3])
@distributed(ranks=2)
def test_each_node_may_have_its_own_copy_of_the_same_weights(world, folders, tmp_path, factor):
    folder = shutil.copytree(folders["single"], tmp_path / f"{world.rank}")
    weights(lambda t: t[NORM].mul_(factor**world.rank))(folder)
    differs = refuses("rank 1 has model.safetensors = ", "all nodes need the same weights")
    with differs if factor != 1 else contextlib.nullcontext():
        opened = open_pretrained(config_from(folder), 0)
        assert {stored.path.parent for stored in opened.stored.values()} == {folder}


def test_copies_that_differ_in_any_sixteenth_are_told_apart(tmp_path):
    """Also where a file is larger than what is read of it: two fine-tunings may begin with the same embedding."""
    path = tmp_path / SINGLE
    stored = Weights({"head.weight": StoredTensor(path, HEAD, "F32", [])})
    size = 2**18
    contents = [bytes(16 * size), bytes(16 * size + 1)]
    contents += [bytes(size * i) + b"\1" * size + bytes(size * (15 - i)) for i in range(16)]
    digests = set()
    for content in contents:
        path.write_bytes(content)
        digests.add(stored.file_digests()[path.name])
    assert len(digests) == 18


def test_weights_are_hashed_in_blocks_of_rows_of_any_size(folders, monkeypatch):
    """Of shards whose rows are more than a block has, also of one row and of less: the same values and one hash."""
    all_stored = stored_in(folders["uneven"]).stored
    stored = {name: all_stored[name] for name in all_stored if name.startswith("blocks.0.")}
    full = {name: Weights(stored).read(name) for name in stored}
    at_once = {}
    for name, values in full.items():
        at_once[name, 0] = hf_weights.weighted_sum(name, (0, 0), [*values.shape], values)
    for block, rows in ((2**20, 999), (7 * 50, 31), (50, 8), (1, 5)):
        monkeypatch.setattr(hf_weights, "HASHED_AT_ONCE", block)
        sums: dict[tuple, int] = {}
        for name, values in full.items():
            for begin in range(0, len(values), rows):  # a rank's
                shard = torch.empty_like(values[begin : begin + rows])
                offsets = (begin, *[0] * (values.ndim - 1))
                assert Weights(stored, sums).read_into(name, offsets, shard)
                assert shard.equal(values[begin : begin + rows]), (name, block)
        assert hf_weights.fingerprint([sums]) == hf_weights.fingerprint([at_once])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_rectangle_is_read(folders, dtype):
    stored = stored_in(folders["uneven"])
    for name, offsets, shape in (
        ("head.weight", (162, 25), (161, 25)),
        ("embedding.weight", (100, 7), (1, 43)),
        ("head.norm.weight", (49,), (1,)),
        ("head.weight", (323, 0), (0, 50)),
    ):
        wider = torch.full((shape[0], *(2 * n for n in shape[1:])), 9.0, dtype=dtype)
        out = wider[tuple(slice(n) for n in shape)]  # not contiguous
        stored.read_into(name, offsets, out)
        index = tuple(slice(first, first + n) for first, n in zip(offsets, shape))
        assert torch.equal(out, stored.read(name)[index].to(dtype)), (name, offsets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_read_exactly(copy_of, dtype):
    folder = copy_of("single")
    weights(lambda t: t.update({name: t[name].to(dtype) for name in t}))(folder)
    stored = stored_in(folder)
    theirs = load_file(folder / SINGLE)
    for name in stored.stored:
        assert torch.equal(stored.read(name), theirs[hf_name(name)].float())


def test_names_of_wrapping_modules_are_left_out(copy_of, folders):
    """Of torch.compile and DDP around the model, and of FSDP1 and activation checkpointing around its attention."""
    wrapper = "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."
    folder = copy_of("single")
    expected = stored_in(folders["single"])
    plain = load_file(folder / SINGLE)
    wrapped = {}
    for name, tensor in plain.items():
        wrapped[f"_orig_mod.module.{name.replace('.self_attn.', wrapper)}"] = tensor
    save_file(wrapped, folder / SINGLE)
    stored = stored_in(folder)
    assert all(torch.equal(stored.read(name), expected.read(name)) for name in expected.stored)
    weights(lambda t: t.update(plain))(folder)
    with refuses("model.safetensors: ", " and ", "; keep one"):
        stored_in(folder)


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
    m = make_config(model=MODELS[name]).model
    head_dim = None if name == "old" else m.width_per_head
    assert vars(cfg.model) == {**vars(m), "init_from": str(folders[name]), "head_dim": head_dim}
    (tmp_path / "test.toml").write_text(config.to_toml(cfg))
    assert config.load(str(tmp_path / "test.toml")) == cfg


@pytest.mark.parametrize("name", MODELS)
def test_every_key_of_config_json_is_what_transformers_makes_of_the_model(folders, name):
    """All that its configuration class has, in the spelling of transformers 5 and in that of older versions."""
    apart = "transformers_version _name_or_path initializer_range dtype max_position_embeddings"
    theirs = AutoConfig.from_pretrained(folders[name])
    ids = {"bos_token_id": theirs.bos_token_id, "eos_token_id": theirs.eos_token_id}
    rendered = hf_config.render(config_from(folders[name]).model, 64, "bfloat16", ids)
    assert rendered["dtype"] == rendered["torch_dtype"] == "bfloat16"
    for left_out in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        spelled = {key: value for key, value in rendered.items() if key not in left_out}
        both = []
        for each in (type(theirs).from_dict(spelled), theirs):
            values = {key: v for key, v in each.to_dict().items() if key not in apart.split()}
            values["rope_parameters"].pop("type", None)  # of older versions, beside rope_type
            both.append(values)
        assert both[0] == both[1], left_out


def test_heads_of_a_fresh_model_are_as_wide_as_its_sizes_say():
    """And not as Qwen3's smallest."""
    fresh = hf_config.render(make_config(model={"qk_norm": True}).model, 64, "float32", {})
    assert Qwen3Config.from_dict(fresh).head_dim == 48 // 4


REACHES = [(SCALING, 8, 256), (SCALING, 32, 256), (SCALING, 33, 33), (None, 32, 32)]


@pytest.mark.parametrize("scaling, seq_len, expected", REACHES)
def test_an_export_says_how_far_its_rotary_table_reaches(scaling, seq_len, expected):
    """As far as it is stretched, where the training was no longer than what it was stretched from."""
    m = make_config(model={"rope_scaling": scaling}).model
    rendered = hf_config.render(m, seq_len, "float32", {})
    assert rendered["max_position_embeddings"] == expected


# What is refused


def test_sizes_that_disagree_are_all_named(folders):
    sizes = {"dim": 64, "vocab_size": 400, "norm_eps": 1e-4, "head_dim": 12}
    given = {**sizes, "rope_scaling": {"factor": 4.0}, "init_from": str(folders["sharded"])}
    with refuses("leave it out") as refused:
        config.from_dict({**tables(), "model": given}, "test.toml", ["--model.tie_embeddings=true"])
    assert len(refused.value.problems) == 5
    named = "dim = 64, vocab_size = 400, norm_eps = , rope_scaling.factor = 4.0, tie_embeddings ="
    for each in named.split(", "):
        assert f"[model] {each}" in str(refused.value)


@pytest.mark.parametrize(
    "name, options, problem",
    [
        ("single", ["--model.rope_scaling.factor=4.0"], "rope_scaling.factor = 4.0: .*absent"),
        ("sharded", ["--model.rope_scaling=off"], "rope_scaling is off.*leave it out"),
        ("outputs/tiny-hf", [], "run the export first: .* huggingface export RUN outputs/tiny-hf"),
    ],
)
def test_a_folder_that_does_not_fit_or_is_not_there_is_refused(folders, name, options, problem):
    folder = folders["single"].parent / name if name.partition("/")[0] in folders else name
    with refuses(problem):
        model = {"init_from": str(folder)}
        config.from_dict({**tables(), "model": model}, "test.toml", options)


def test_an_import_is_evaluated_without_the_folder_that_it_is_of(
    copy_of, prepared, write_config, tmp_path
):
    huggingface = pytest.importorskip("tools.huggingface")
    folder = copy_of("single")
    data = {"source": str(prepared), "path": None}
    path = write_config(model={**MODELS["single"], "init_from": str(folder)}, data=data)
    imported = tmp_path / "outputs/test/checkpoints/step-00000000"
    assert run_tool(huggingface.main, "import", folder, imported) == 0
    with_folder = launch(path, "--eval-only")
    shutil.rmtree(folder)
    without = launch(path, "--eval-only")
    assert without.returncode == 0 and without.stdout == with_folder.stdout, without.stderr
    assert json.loads(without.stdout)["step"] == 0


# The folder, what is changed in its config.json, and words of the problems; null removes a key.
SETTINGS = """
single {"architectures": ["MistralForCausalLM"]} => ["MistralForCausalLM"]: only
single {"attention_bias": true, "mlp_bias": true} => attention_bias = ; mlp_bias =
single {"hidden_act": "gelu"} => hidden_act = "gelu"
single {"quantization_config": {"bits": 4}} => quantization_config
single {"attention_dropout": 0.1} => attention_dropout = 0.1: is not read here
single {"num_key_value_heads": 3} => n_kv_heads = 3: must divide
single {"hidden_size": "48", "vocab_size": null} => hidden_size = "48": must be an integer; vocab_size is missing
single {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}} => rope_parameters.rope_type = "yarn"
single {"rope_parameters": {"partial_rotary_factor": 0.5}} => rope_parameters.partial_rotary_factor = 0.5
qwen3 {"architectures": null, "model_type": "llama"} => has model.layers.0.self_attn.q_norm.weight, which this
qwen3 {"use_sliding_window": true, "layer_types": ["sliding_attention"]} => use_sliding; = "sliding_attention"
qwen3 {"head_dim": null} => head_dim is missing
single {"num_hidden_layers": 4} => hf: 8 more tensors do not fit the model
""".strip().split("\n")


def settings(row: str) -> tuple[str, Callable, str]:
    where, _, problems = row.partition(" => ")
    name, _, changes = where.partition(" ")
    return name, lambda folder: edit(folder / "config.json", **json.loads(changes)), problems


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 98\n"
MUST_BE = "must be F32 or BF16 or F16 of shape [48]"
FILES: list[tuple[str, Callable, str]] = [
    ("single", lambda f: (f / SINGLE).write_text(LFS), f"{SINGLE}: is a git-lfs pointer"),
    ("single", weights(lambda t: t.update(x=t.pop(NORM))), f"has no {NORM}; has x, which this"),
    ("tied", weights(lambda t: t.update({HEAD: t[EMBEDDING] + 1e-3})), f"{HEAD} differs from"),
    ("single", weights(lambda t: t.update({NORM: torch.ones(47)})), f"is F32 [47]; {MUST_BE}"),
    ("single", weights(lambda t: t.update({NORM: t[NORM].double()})), f"is F64 [48]; {MUST_BE}"),
    ("single", lambda f: (f / SINGLE).rename(f / "x.bin"), "has neither model.safetensors nor"),
    ("single", lambda f: os.truncate(f / SINGLE, 100_000), "is no safetensors file, or cut short"),
    ("sharded", lambda f: [next(f.glob(f"*0{n}-of*")).unlink() for n in (1, 3)], "00001-; 00003-"),
    ("sharded", lambda f: edit(f / INDEX, weight_map={NORM: "../x"}), "needs weight_map"),
]


@pytest.mark.quick
@pytest.mark.parametrize("name, spoil, problems", [*FILES, *map(settings, SETTINGS)])
def test_what_is_wrong_is_refused_by_name(copy_of, name, spoil, problems):
    folder = copy_of(name)
    spoil(folder)
    with pytest.raises(ConfigError) as refused:
        stored_in(folder)
    error = str(refused.value)
    assert all(problem in error for problem in problems.split("; ")), error
    assert all(str(folder) in line for line in error.splitlines())
