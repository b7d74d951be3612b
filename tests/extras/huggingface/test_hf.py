"""Hugging Face folders: against transformers, on 1, 2 and 4 ranks; training from them; memory; and what is refused."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

import config
from config import ConfigError
from extras.huggingface import config as hf_config
from extras.huggingface import weights as hf_weights
from extras.huggingface.weights import StoredTensor, Weights, hf_name, weights_to_read
from model.llama import Llama, named_parameters
from optim import learning_rate
from tests import cases
from tests.conftest import (
    REPO,
    TINY,
    launch,
    loader_of,
    make_config,
    run_tool,
    tables,
)
from tests.extras.huggingface import hf_cases
from tests.extras.huggingface.hf_cases import config_from, configuration, make_folder
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
MODELS = {  # of sizes that 4 ranks do not divide; TINY's sizes unless given
    "single": {},
    "sharded": {"rope_parameters": LLAMA3},
    "tied": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "uneven": {
        "hidden_size": 50,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "intermediate_size": 75,
        "vocab_size": 323,
        "head_dim": 20,
    },
    "old": {"rope_parameters": LLAMA3},
    "qwen3": {"kind": Qwen3Config, "head_dim": 20, "bos_token_id": 1, "eos_token_id": 2},
    "qwen3-tied": {
        "kind": Qwen3Config,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
}
OVER_TP = "dp 2 x tp 2"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These models are too small for several, which wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(kind: type = LlamaConfig, **changes) -> PreTrainedModel:
    m = TINY["model"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        kind(
            **{
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
                **changes,
            }
        ),
        dtype=torch.float32,
    )
    for weight in (p for p in model.parameters() if p.ndim == 1):
        # which tell one norm from another
        torch.nn.init.normal_(weight, 1.0, 0.2)
    return model


def edit(path: pathlib.Path, **changes) -> None:
    """Changes a JSON object's keys; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, prepared) -> dict[str, pathlib.Path]:
    """As transformers saves them; "old" as its version 3 did. Not to be changed."""
    root = tmp_path_factory.mktemp("hf")
    for name, changes in MODELS.items():
        model = reference(**changes)
        model.save_pretrained(
            root / name, max_shard_size="30KB" if name in ("sharded", "uneven") else "1GB"
        )
        shutil.copy(prepared / "tokenizer.model", root / name)
    assert len(list((root / "sharded").glob("*.safetensors"))) > 3
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    edit(
        root / "old/config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "llama3", **old},
        head_dim=None,
        dtype=None,
        torch_dtype="float32",
        attention_bias=None,
        mlp_bias=None,
        hidden_act=None,  # its default is silu
    )
    tensors = load_file(root / "old/model.safetensors")
    constants = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6).double() for i in range(2)
    }
    save_file({**tensors, **constants}, root / "old/model.safetensors")
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module")
def read(on_ranks, folders, tmp_path_factory) -> dict[int, tuple[pathlib.Path, dict]]:
    """(where the checkpoints lie, what each rank found) by number of ranks, or mesh."""
    sources, found = {name: str(folder) for name, folder in folders.items()}, {}
    for mesh in (1, 2, 4, OVER_TP):
        output, ranks = tmp_path_factory.mktemp("read"), 4 if mesh == OVER_TP else mesh
        # five heads
        chosen = {name: sources[name] for name in MODELS if mesh != OVER_TP or name != "uneven"}
        over = {"tp": 2} if mesh == OVER_TP else {}
        found[mesh] = output, on_ranks(ranks, hf_cases.read_and_save, chosen, str(output), over)
    return found


def error_of(folder: pathlib.Path) -> str:
    """What refuses a run that starts from a folder; "" if nothing does."""
    try:
        config.together(
            lambda: hf_config.read(folder / "config.json"), lambda: hf_weights.scan(folder)
        )
        weights_to_read(config_from(str(folder)), 0)
    except ConfigError as error:
        return str(error)
    return ""


def in_transformers(folder: pathlib.Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")


def test_an_index_need_not_list_the_constants_of_old_folders(folders, tmp_path):
    folder = shutil.copytree(folders["sharded"], tmp_path / "old")
    shard = next(folder.glob("model-00001*"))
    save_file(
        {**load_file(shard), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}, shard
    )
    assert (
        weights_to_read(config_from(str(folder)), 0).stored.keys()
        == weights_to_read(config_from(str(folders["sharded"])), 0).stored.keys()
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_weights_are_those_of_transformers(read, folders, name):
    theirs = in_transformers(folders[name])
    with torch.no_grad():
        expected = theirs(hf_cases.tokens(theirs.config.vocab_size)).logits
    hashes = cases.digests({name: p.detach() for name, p in theirs.named_parameters()})
    for _, ranks in read.values():
        for found, logits in (rank[name] for rank in ranks if name in rank):
            assert torch.allclose(torch.tensor(logits), expected, atol=1e-5, rtol=1e-5)
            assert {hf_name(key): value for key, value in found.items()} == hashes


def plain_loop(theirs: PreTrainedModel, cfg: config.Config, steps: int) -> list[dict]:
    """Training as a textbook has it: transformers' model, torch's AdamW, the whole batch at once."""
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in theirs.parameters() if p.ndim > 1],
                "weight_decay": cfg.optim.weight_decay,
            },
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=cfg.optim.betas,
        eps=cfg.optim.eps,
        foreach=False,
    )
    loader = loader_of(cfg)
    found = []
    for step in range(1, steps + 1):
        inputs, targets = (torch.cat(part) for part in zip(*next(loader).micro_batches))
        loss = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), cfg.train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg.optim, config.schedule_steps(cfg), step)
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.item(), "grad_norm": norm.item()})
    loader.close()
    return found


@pytest.mark.quick
def test_training_from_it_is_transformers_training(on_ranks, folders, corpus, prepared, tmp_path):
    """... and resumes from its checkpoint when the folder is gone, but not its tokenizer."""
    source = shutil.copytree(folders["sharded"], tmp_path / "hf")
    data = {"source": str(corpus), "path": str(prepared), "tokenizer": str(prepared)}
    cfg = config_from(str(source), optim={"schedule_steps": 6}, data=data)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=6))
    expected = plain_loop(in_transformers(source), cfg, 6)
    found = on_ranks(2, hf_cases.train_and_resume, str(source), str(tmp_path / "outputs"), data)[0]
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for ours, theirs, tolerance in zip(found, expected, [1e-5, *[1e-4] * 5]):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
    log = (tmp_path / "outputs/r/logs/rank-0.log").read_text()
    assert "the weights of" in log
    assert "prepared with another" not in log


def test_what_one_rank_finds_wrong_is_raised_on_all(on_ranks, folders, tmp_path):
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    weights(lambda t: t[NORM][-1].fill_(float("nan")))(folder)  # of a row that the second rank owns
    for lost, nan in on_ranks(2, hf_cases.refused_on_one_rank, str(folder)):
        assert (
            "lost: is not there" in lost
            and "blocks.0.attention_norm.weight: holds values that are not" in nan
        )


def test_a_node_may_have_its_own_copy_of_the_weights_but_not_others(on_ranks, folders, tmp_path):
    copies = [shutil.copytree(folders["single"], tmp_path / name) for name in "ab"]
    assert on_ranks(2, hf_cases.with_another_copy, [*map(str, copies)]) == ["True", "True"]
    weights(lambda t: t[NORM].mul_(3))(copies[1])
    for told in on_ranks(2, hf_cases.with_another_copy, [*map(str, copies)]):
        assert told.startswith("rank 1 has model.safetensors = ") and told.endswith(
            "all nodes need the same weights"
        )


def test_copies_that_differ_in_any_sixteenth_are_told_apart(tmp_path):
    """Also where a file is larger than what is read of it: as of two fine-tunings with the same embedding in front."""
    path, size = tmp_path / "model.safetensors", 2**22

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        return Weights({"head.weight": StoredTensor(path, HEAD, "F32", [])}).file_digests()[
            path.name
        ]

    first, part = bytes(size), size // 16
    found = {digest(first[: i * part] + b"\1" * part + first[(i + 1) * part :]) for i in range(16)}
    assert len(found | {digest(first), digest(first + b"\0")}) == 18 and digest(first) == digest(
        first
    )


def test_weights_are_hashed_and_read_in_blocks_of_rows_of_any_size(folders, monkeypatch):
    """Of shards whose rows are more than a block has, also of one row and of less: the same values and one hash."""
    all_stored = weights_to_read(config_from(str(folders["uneven"])), 0).stored
    stored = {name: all_stored[name] for name in all_stored if name.startswith("blocks.0.")}
    whole = {name: Weights(stored).read(name) for name in stored}
    hashes = set()
    for block, rows in ((2**20, 999), (7 * 50, 31), (50, 8), (1, 5)):
        monkeypatch.setattr(hf_weights, "HASHED_AT_ONCE", block)
        sums: dict[tuple, int] = {}
        for name, values in whole.items():
            for begin in range(0, len(values), rows):  # a rank's
                part = torch.empty_like(values[begin : begin + rows])
                offsets = (begin, *[0] * (values.ndim - 1))
                assert Weights(stored, sums).read_into(name, offsets, part)
                assert part.equal(values[begin : begin + rows]), (name, block)
        hashes.add(hf_weights.fingerprint([sums]))
    expected = {}
    for name, values in whole.items():
        expected[name, 0] = hf_weights.weighted_sum(name, (0, 0), [*values.shape], values)
    assert hashes == {hf_weights.fingerprint([expected])}


# The configuration


def test_what_a_folder_leaves_out_is_transformers_default(folders, tmp_path):
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    edit(
        folder / "config.json",
        rms_norm_eps=None,
        num_key_value_heads=None,
        tie_word_embeddings=None,
        rope_parameters=None,
    )
    cfg, theirs = config_from(str(folder)), LlamaConfig.from_pretrained(folder)
    assert (
        cfg.model.rope_theta == theirs.rope_parameters["rope_theta"]
        and cfg.model.rope_scaling is None
    )
    assert (cfg.model.norm_eps, cfg.model.n_kv_heads) == (
        theirs.rms_norm_eps,
        theirs.num_key_value_heads,
    )
    assert cfg.model.tie_embeddings == theirs.tie_word_embeddings


def test_sizes_come_from_the_folder_and_read_back(folders, tmp_path):
    for name, folder in folders.items():
        cfg = config_from(str(folder))
        theirs = in_transformers(folder).config
        assert (cfg.model.dim, cfg.model.ffn_dim) == (
            theirs.hidden_size,
            theirs.intermediate_size,
        ), name
        assert (
            cfg.model.width_per_head == theirs.head_dim
            and cfg.model.norm_eps == theirs.rms_norm_eps
        )
        assert cfg.model.rope_theta == theirs.rope_parameters["rope_theta"]
        assert (cfg.model.rope_scaling is not None) == (
            theirs.rope_parameters["rope_type"] == "llama3"
        )
        (tmp_path / "test.toml").write_text(config.to_toml(cfg))
        assert config.load(str(tmp_path / "test.toml")) == cfg


def test_every_key_of_config_json_is_what_transformers_makes_of_the_model(folders):
    """All that its configuration class has, in the spelling of transformers 5 and in that of older versions."""
    apart = {"transformers_version", "_name_or_path", "initializer_range", "dtype"}
    for name, folder in folders.items():
        theirs = AutoConfig.from_pretrained(folder)
        m = config_from(str(folder)).model
        ids = {"bos_token_id": theirs.bos_token_id, "eos_token_id": theirs.eos_token_id}
        rendered = hf_config.render(m, 64, "bfloat16", ids)
        assert rendered["dtype"] == rendered["torch_dtype"] == "bfloat16"
        older = ("rope_theta", "rope_scaling")
        for left_out in (("rope_parameters",), older):
            spelled = {key: value for key, value in rendered.items() if key not in left_out}
            ours = type(theirs).from_dict(spelled)
            found = {key: value for key, value in ours.to_dict().items() if key not in apart}
            expected = {key: value for key, value in theirs.to_dict().items() if key not in apart}
            for values in (found, expected):
                values["rope_parameters"].pop("type", None)  # of older versions, beside rope_type
            assert found == expected, (name, left_out)
    # of a model of our own, whose heads are as wide as its sizes say, and not as Qwen3's smallest
    fresh = hf_config.render(make_config(model={"qk_norm": True}).model, 64, "float32", {})
    assert Qwen3Config.from_dict(fresh).head_dim == 48 // 4


def test_sizes_that_disagree_are_all_named(folders, tmp_path):
    folder = str(folders["sharded"])
    given = {
        "init_from": folder,
        "dim": 64,
        "vocab_size": 400,
        "norm_eps": 1e-5,
        "head_dim": 12,
        "rope_scaling": {"factor": 4.0},
    }
    with pytest.raises(ConfigError) as caught:
        config.from_dict({**tables(), "model": given}, "test.toml", ["--model.tie_embeddings=true"])
    problems = caught.value.problems
    assert len(problems) == 5 and all("leave it out" in problem for problem in problems)
    for part in (
        "test.toml: [model] dim = 64",
        "hidden_size = 48",
        "vocab_size = 400",
        "its weights have no more rows",
        "norm_eps = 1e-05",
        "rms_norm_eps = 1e-06",
        "rope_scaling.factor = 4.0",
        "command line: [model] tie_embeddings = true",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="rope_scaling is off.*leave it out"):
        config.from_dict(
            {**tables(), "model": {"init_from": folder}}, "test.toml", ["--model.rope_scaling=off"]
        )
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError) as caught:
        config.from_dict(
            {**tables(), "model": {"init_from": str(tmp_path)}}, "test.toml", ["--train.steps=0"]
        )
    assert (
        "must be greater than 0" in caught.value.problems[0]
        and "JSON object" in caught.value.problems[1]
    )
    with pytest.raises(ConfigError, match="rope_scaling.factor = 4.0: .*absent"):
        config.from_dict(
            {**tables(), "model": {**given, "init_from": str(folders["single"])}}, "test.toml"
        )


def test_a_folder_that_is_not_there(folders, tmp_path):
    for name in ("a" * 999, str(folders["single"] / "config.json")):
        with pytest.raises(
            ConfigError, match="init_from = .*has no config.json.* or the id of a repository"
        ):
            config_from(name)
    command = "run the export first: ./run_train.sh -m huggingface export RUN outputs/tiny-hf"
    with pytest.raises(ConfigError, match=command):
        config_from("outputs/tiny-hf")
    # complete: it may go on from a checkpoint
    cfg = make_config(model={"init_from": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match="gone: has neither model.safetensors"):
        weights_to_read(cfg, 0)


def test_a_launch_refuses_it_before_it_makes_anything(folders, write_config, tmp_path):
    folder = shutil.copytree(folders["sharded"], tmp_path / "hf")
    path = write_config(model={"init_from": str(folder), "norm_eps": 1e-6, "rope_theta": 1e4})
    next(folder.glob("model-00002*")).unlink()
    done = launch(path)
    assert done.returncode == 2 and "model-00002-of-" in done.stderr
    assert "is not there" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "outputs/test").exists()


def test_an_import_is_evaluated_without_the_folder_that_it_is_of(
    folders, corpus, prepared, write_config, tmp_path, capsys
):
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    path = write_config(
        model={"init_from": str(folder), "norm_eps": 1e-6},
        data={"source": str(corpus), "path": str(prepared), "tokenizer": str(prepared)},
    )
    huggingface = pytest.importorskip("tools.huggingface")
    imported = tmp_path / "outputs/test/checkpoints/step-00000000"
    assert run_tool(huggingface.main, "import", folder, imported) == 0
    with_folder = launch(path, "--eval-only")
    shutil.rmtree(folder)
    without = launch(path, "--eval-only")
    assert without.returncode == 0 and without.stdout == with_folder.stdout, without.stderr
    assert json.loads(without.stdout)["step"] == 0


def test_torch_is_not_needed_for_it(folders):
    code = (
        "import sys, config; tables = {'model': {'init_from': sys.argv[1]}, 'train': {'steps': 1}}; "
        "cfg = config.from_dict(tables, 'test.toml'); assert cfg.model.dim == 48 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, folders["tied"]], cwd=REPO, check=True)


# A fork's options


# The tokenizer


# What is wrong


def settings(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


def weights(change):
    def spoil(folder: pathlib.Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def index(change):
    def spoil(folder: pathlib.Path) -> None:
        content = json.loads((folder / "model.safetensors.index.json").read_text())
        change(content)
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return spoil


def cut(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def only_pickled(folder: pathlib.Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 988097824\n"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
WRONG = {  # what is done to the folder "single", or another that the name begins with, and what the error names
    "architecture": (
        settings(architectures=["MistralForCausalLM"], model_type="mistral"),
        ['architectures = ["MistralForCausalLM"]', 'model_type = "mistral"'],
    ),
    "no model_type": (settings(model_type=None), ["model_type = null"]),
    "bias": (
        settings(attention_bias=True, mlp_bias=True),
        ["attention_bias = true", "mlp_bias = true"],
    ),
    "qwen3: of Llama": (
        settings(architectures=["LlamaForCausalLM"]),
        ['architectures = ["LlamaForCausalLM"]: only ["Qwen3ForCausalLM"] can be read'],
    ),
    "qwen3: as Llama": (
        settings(architectures=["LlamaForCausalLM"], model_type="llama"),
        ["has model.layers.0.self_attn.q_norm.weight, which this model does not"],
    ),
    "qwen3: window": (
        settings(use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
        ["use_sliding_window = true", 'layer_types = "sliding_attention"'],
    ),
    "qwen3: layers": (settings(layer_types=3), ["layer_types = 3"]),
    "qwen3: sizes": (
        settings(head_dim=None, num_key_value_heads=None),
        ["head_dim is missing", "num_key_value_heads is missing"],
    ),
    "qwen3: stretched": (
        settings(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        ['rope_type = "yarn"'],
    ),
    "activation": (settings(hidden_act="gelu"), ['hidden_act = "gelu"']),
    "quantized": (settings(quantization_config={"bits": 4}), ["quantization_config"]),
    "values": (
        settings(hidden_size="48", num_hidden_layers=0, rms_norm_eps=-1, vocab_size=None),
        [
            'hidden_size = "48": must be an integer',
            "num_hidden_layers = 0: must be greater",
            "rms_norm_eps = -1",
            "vocab_size is missing",
        ],
    ),
    "heads": (settings(num_key_value_heads=3), ["n_kv_heads = 3: must divide"]),
    "rope kind": (
        settings(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
        ['rope_parameters.rope_type = "yarn"'],
    ),
    "rope values": (
        settings(rope_scaling={**LLAMA3, "factor": "8", "low_freq_factor": None}),
        ['rope_scaling.factor = "8": must be a number', "rope_scaling.low_freq_factor is missing"],
    ),
    "rope in part": (
        settings(rope_parameters={**ROPE, "partial_rotary_factor": 0.5}),
        ["partial_rotary_factor = 0.5"],
    ),
    "rope in part, as before": (
        settings(partial_rotary_factor=0.5),
        ["partial_rotary_factor = 0.5"],
    ),
    "dropout": (settings(attention_dropout=0.1), ["attention_dropout = 0.1: is not read here"]),
    "code of its own": (settings(auto_map={"AutoModel": "m.M"}), ["auto_map = {", "is not read"]),
    "rope of its own": (
        settings(rope_parameters={**ROPE, "attention_factor": 0.5}),
        ["rope_parameters.attention_factor = 0.5: is not read here"],
    ),
    "rope no object": (settings(rope_scaling=[8]), ["rope_scaling = [8]"]),
    "config cut": (cut("config.json", 40), ["config.json: cannot be read"]),
    "config and weights": (
        lambda f: (settings(hidden_act="relu")(f), cut("model.safetensors", 5)(f)),
        ['hidden_act = "relu"', "header too small"],
    ),
    "config no object": (
        lambda f: (f / "config.json").write_text("[]"),
        ["config.json: must hold a JSON object"],
    ),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        ["config.json: cannot be read: No such file"],
    ),
    "missing and extra": (
        weights(lambda t: t.update(other=t.pop(NORM))),
        [f"has no {NORM}", "has other, which this model does not"],
    ),
    "too few blocks": (
        settings(num_hidden_layers=4),
        ["has no model.layers.2.input_layernorm.weight", "hf: 8 more tensors do not fit the model"],
    ),
    "no head": (weights(lambda t: t.pop(HEAD)), ["has no lm_head.weight"]),
    "tied: another head": (
        weights(lambda t: t.update({HEAD: t[EMBEDDING] + 1e-3})),
        [f"{HEAD} differs from {EMBEDDING}"],
    ),
    "tied: a head of another type": (
        weights(lambda t: t.update({HEAD: t[EMBEDDING].bfloat16()})),
        [f"{HEAD} differs from {EMBEDDING}"],
    ),
    "shape": (
        weights(lambda t: t.update({NORM: torch.ones(47)})),
        ["is F32 [47]; must be F32 or BF16 or F16 of shape [48]"],
    ),
    "dtype": (
        weights(lambda t: t.update({NORM: torch.ones(48).double()})),
        [f"{NORM} is F64 [48]; must be F32 or BF16 or F16 of shape [48]"],
    ),
    "no name of transformers": (
        weights(lambda t: [t.update({f"net.{name}": t.pop(name)}) for name in [*t]]),
        [
            "names its tensors as no Llama or Qwen3 model of transformers does, net.lm_head.weight "
            "for example, and has no lm_head.weight; load it with what wrote it"
        ],
    ),
    "a git-lfs pointer": (
        lambda f: (f / "model.safetensors").write_text(POINTER),
        ["model.safetensors: is a git-lfs pointer, not the file itself; fetch", "/hf lfs pull"],
    ),
    "a git-lfs pointer for config.json": (
        lambda f: (f / "config.json").write_text(POINTER),
        ["config.json: is a git-lfs pointer, not the file itself"],
    ),
    "pickled": (only_pickled, ["pytorch_model.bin: pickled files can run code and are not read"]),
    "pickled under its name": (
        lambda f: torch.save({}, f / "model.safetensors"),
        ["is no safetensors file"],
    ),
    "empty": (
        lambda f: [p.unlink() for p in f.iterdir()],
        ["config.json: cannot be read", "has neither"],
    ),
    "weights cut": (cut("model.safetensors", 100_000), ["cut short"]),
    "header cut": (cut("model.safetensors", 300), ["is no safetensors file, or cut short"]),
    "header no JSON": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{no JSON"),
        ["is no safetensors file, or cut short"],
    ),
    "longer": (
        lambda f: (f / "model.safetensors").open("ab").write(b"more"),
        ["is no safetensors file, or cut short"],
    ),
    "a pipe": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        ["model.safetensors: is no regular file"],
    ),
    "sharded: files missing": (
        lambda f: [next(f.glob(f"model-0000{i}*")).unlink() for i in (1, 3)],
        ["model-00001-of", "model-00003-of", "is not there"],
    ),
    "sharded: index cut": (cut("model.safetensors.index.json", 50), ["index.json: cannot be read"]),
    "sharded: index without map": (index(lambda c: c.pop("weight_map")), ["needs weight_map"]),
    "sharded: index leads out": (
        index(lambda c: c["weight_map"].update({NORM: "../x"})),
        ["needs weight_map"],
    ),
    "sharded: index elsewhere": (
        index(lambda c: c["weight_map"].update({NORM: c["weight_map"][HEAD]})),
        [f"has no {NORM}, which", f"has {NORM}, which {INDEX} does not list"],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_name(folders, tmp_path, case):
    spoil, expected = WRONG[case]
    folder = shutil.copytree(
        folders[case.partition(":")[0] if ":" in case else "single"], tmp_path / "hf"
    )
    spoil(folder)
    error = error_of(folder)
    assert all(words in error for words in expected), error
    assert all(line.startswith(str(tmp_path)) for line in error.splitlines())


def test_a_clone_without_git_lfs_is_one_line(folders, tmp_path):
    folder = shutil.copytree(folders["sharded"], tmp_path / "hf")
    for path in folder.glob("model-*"):
        path.write_text(POINTER)
    error = error_of(folder)
    assert error.count("\n") == 0 and "model-00001-of" in error
    assert (
        f"is a git-lfs pointer, not the file itself; fetch what its folder points to: git -C {folder} lfs pull"
        in error
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_of_equal_values_is_taken(folders, tmp_path, dtype):
    """Of another dtype, too."""
    folder = shutil.copytree(folders["tied"], tmp_path / "hf")
    weights(lambda t: t.update({EMBEDDING: t[EMBEDDING].to(dtype)}))(folder)
    weights(lambda t: t.update({HEAD: t[EMBEDDING].float().clone()}))(folder)
    assert error_of(folder) == ""


def test_names_of_wrapping_modules_are_left_out(folders, tmp_path):
    """As DDP and torch.compile add them in front, FSDP1 and its checkpointing in the middle."""
    whole = weights_to_read(config_from(str(folders["single"])), 0)
    renamed = {
        "ddp": lambda name: f"module.{name}",
        "compiled": lambda name: f"_orig_mod.module.{name}",
        "fsdp1": lambda name: name.replace(
            ".self_attn.", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."
        ),
    }
    for kind, rename in renamed.items():
        folder = shutil.copytree(folders["single"], tmp_path / kind)
        tensors = load_file(folder / "model.safetensors")
        named = {rename(name): value for name, value in tensors.items()}
        save_file(named, folder / "model.safetensors")
        found = weights_to_read(config_from(str(folder)), 0)
        for name in whole.stored:
            assert torch.equal(found.read(name), whole.read(name))
    both = {name: value.clone() for name, value in (named | tensors).items()}
    save_file(both, folder / "model.safetensors")
    error = error_of(folder)
    assert error.count("\n") == 0 and "; keep one" in error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_read_exactly(folders, tmp_path, dtype):
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    weights(lambda t: t.update({name: value.to(dtype) for name, value in t.items()}))(folder)
    found, expected = (
        weights_to_read(config_from(str(folder)), 0),
        load_file(folder / "model.safetensors"),
    )
    assert all(
        torch.equal(found.read(name), expected[hf_name(name)].float()) for name in found.stored
    )


@pytest.mark.quick
def test_any_rectangle_is_read(folders):
    found = weights_to_read(config_from(str(folders["uneven"])), 0)
    for name, offsets, shape in (
        ("head.weight", (0, 0), (323, 50)),
        ("head.weight", (162, 25), (161, 25)),
        ("embedding.weight", (100, 7), (1, 43)),
        ("head.norm.weight", (49,), (1,)),
        ("head.weight", (323, 0), (0, 50)),
        ("head.norm.weight", (50,), (0,)),
    ):
        whole = found.read(name)
        for dtype in (torch.float32, torch.bfloat16):
            part = torch.full((shape[0], *(2 * n for n in shape[1:])), 9.0, dtype=dtype)
            out = part[tuple(slice(n) for n in shape)]  # not contiguous
            found.read_into(name, offsets, out)
            index = tuple(slice(first, first + n) for first, n in zip(offsets, shape))
            assert torch.equal(out, whole[index].to(dtype)), (name, offsets)


# Memory


def test_memory_is_bounded(on_ranks, folders, tmp_path):
    cfg = configuration(300)
    make_folder(tmp_path / "hf", cfg)
    with torch.device("meta"):
        sizes = [p.nbytes / 2**20 for _, p in named_parameters(Llama(cfg.model))]
    assert sum(sizes) > 280
    for peak, shard in on_ranks(2, hf_cases.read_peak, str(tmp_path / "hf")):
        assert shard == pytest.approx(sum(sizes) / 2, rel=0.01) and peak < shard + 80, peak


def test_an_export_says_how_far_its_rotary_table_reaches():
    """As far as it is stretched, where the training was no longer than what it was stretched from."""
    from extras.huggingface import config as hf_config

    m = make_config(model={"rope_scaling": SCALING}).model
    said = {
        n: hf_config.render(m, n, "float32", {})["max_position_embeddings"]
        for n in (8, 32, 33, 999)
    }
    assert said == {8: 256, 32: 256, 33: 33, 999: 999}
    assert hf_config.render(make_config().model, 32, "float32", {})["max_position_embeddings"] == 32


def test_a_parameter_without_a_hugging_face_name_is_refused():
    from extras.huggingface.weights import hf_name

    assert hf_name("blocks.12.feed_forward.up_proj.weight") == "model.layers.12.mlp.up_proj.weight"
    for name in ("blocks.0.attention.gate.weight", "scale", "head.bias"):
        with pytest.raises(
            ConfigError, match=f"{name}: has no name in a Hugging Face folder.*NAMES"
        ):
            hf_name(name)
