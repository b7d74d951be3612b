"""Hugging Face folders: against transformers, on 1, 2 and 4 ranks; training from them; memory; and what is refused."""

import dataclasses
import io
import json
import os
import pathlib
import random
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
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

import config
from checkpoint import catalog
from checkpoint.__main__ import main as checkpoint_tool
from checkpoint.load import restore
from config import ConfigError
from data.tokenizer import Tokenizer
from extras.huggingface import config as hf_config
from extras.huggingface import convert as hf
from extras.huggingface import tokenizer as hf_tokenizer
from extras.huggingface import weights as hf_weights
from extras.huggingface.tokenizer import fast_tokenizer_files, read_sentencepiece
from extras.huggingface.weights import StoredTensor, Weights, hf_name, weights_to_read
from model.llama import Llama, named_parameters
from optim import build_optimizer, learning_rate
from system import files
from tests import cases
from tests.conftest import (
    REPO,
    TINY,
    launch,
    loader_of,
    make_config,
    run_tool,
    seal,
    sentencepiece_model,
    tables,
    words,
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


def run(capsys, *arguments: object) -> tuple[int, str]:
    """(exit code, stderr) of the tool."""
    capsys.readouterr()
    return run_tool(hf.main, *arguments), capsys.readouterr().err


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


NOT_QWEN3 = [name for name in MODELS if not name.startswith("qwen3")]


@pytest.mark.parametrize(
    "mesh, name",
    [
        *((1, name) for name in NOT_QWEN3),
        *((2, name) for name in MODELS),
        *((4, name) for name in NOT_QWEN3),
        *((OVER_TP, name) for name in ("sharded", "tied", "qwen3", "qwen3-tied")),
    ],
)
def test_the_export_loads_in_transformers_bit_for_bit(read, folders, tmp_path, capsys, mesh, name):
    run_folder, theirs = read[mesh][0] / name, in_transformers(folders[name])
    for out, *options in [
        ("one",),
        ("many", "--shard-gib", "0.00003"),
        ("short", "--dtype", "bfloat16"),
    ]:
        assert run(capsys, "export", run_folder, tmp_path / out, *options) == (0, "")
        ours = in_transformers(tmp_path / out)
        dtype = torch.bfloat16 if out == "short" else torch.float32
        expected = {key: value.to(dtype) for key, value in theirs.state_dict().items()}
        found = ours.state_dict()
        assert found.keys() == expected.keys()
        assert all(
            value.dtype == dtype and torch.equal(value, expected[key])
            for key, value in found.items()
        )
        assert type(ours) is type(theirs)
        for key in (
            "hidden_size",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "tie_word_embeddings",
        ):
            assert getattr(ours.config, key) == getattr(theirs.config, key)
        # "old" has both
        rope = {key: value for key, value in theirs.config.rope_parameters.items() if key != "type"}
        assert ours.config.rope_parameters == rope and ours.config.dtype == dtype
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(
        (tmp_path / "many" / file).stat().st_size < 0.00003 * 2**30 + 2000
        or len(load_file(tmp_path / "many" / file)) == 1
        for file in files
    )
    options = "--dtype", "bfloat16", "--shard-gib", "0.00003"
    assert run(capsys, "export", run_folder, tmp_path / "halves", *options) == (0, "")
    for out, width in (("many", 4), ("halves", 2)):
        found = json.loads((tmp_path / out / "model.safetensors.index.json").read_text())[
            "metadata"
        ]
        held = sum(p.numel() for p in theirs.parameters())
        assert found == {"total_parameters": held, "total_size": held * width}
    assert len([*(tmp_path / "halves").glob("*.safetensors")]) < len(files)
    largest = max(p.nbytes for p in theirs.parameters()) / 2**30
    two = held * 4 / 2**30 - largest / 2
    assert run(capsys, "export", run_folder, tmp_path / "two", "--shard-gib", str(two)) == (0, "")
    assert (
        len([*(tmp_path / "two").glob("*.safetensors")]) == 2
        and (tmp_path / "two" / INDEX).exists()
    )
    assert not list(tmp_path.glob(".*"))
    # who may read config.json may read weights
    assert len({path.stat().st_mode for path in tmp_path.glob("*/*")}) == 1
    again = weights_to_read(config_from(str(tmp_path / "many")), 0)  # and we read what we write
    assert torch.equal(
        again.read("embedding.weight"), theirs.state_dict()["model.embed_tokens.weight"]
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", ["sharded", "tied", "old", "qwen3"])
def test_an_imported_checkpoint(folders, tmp_path, capsys, name):
    assert run(capsys, "import", folders[name], tmp_path / "checkpoint") == (0, "")
    assert checkpoint_tool(["verify", str(tmp_path / "checkpoint")]) == 0
    import generate

    assert (
        generate.main([str(tmp_path / "checkpoint"), "--prompt", "the cat", "--tokens", "3"]) == 0
    )
    assert run(capsys, "export", tmp_path / "checkpoint", tmp_path / "out") == (0, "")
    theirs, ours = in_transformers(folders[name]), in_transformers(tmp_path / "out")
    assert all(
        torch.equal(value, ours.state_dict()[key]) for key, value in theirs.state_dict().items()
    )
    assert ours.config.max_position_embeddings == 64  # as it was
    assert (ours.generation_config.bos_token_id, ours.generation_config.eos_token_id) == (1, 2)
    # no run resumes from it, and the message has what to do instead
    cfg = catalog.read_config(tmp_path / "checkpoint")
    model = Llama(cfg.model)
    with pytest.raises(ConfigError, match="without the state of an optimizer.*model.init_from"):
        restore(tmp_path / "checkpoint", model, build_optimizer(model, cfg.optim))
    run_cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={})
    root = catalog.root_of(run_cfg)
    root.mkdir(parents=True)
    (tmp_path / "checkpoint").rename(catalog.path_of(root, 0))
    with pytest.raises(ConfigError, match="without the state of an optimizer.*model.init_from"):
        catalog.choose(root, [0], run_cfg.checkpoint, catalog.problems_of)


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
    assert run(capsys, "import", folder, tmp_path / "outputs/test/checkpoints/step-00000000") == (
        0,
        "",
    )
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


@dataclasses.dataclass(frozen=True)
class LongRope(config.RopeScaling):
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Windowed(config.Model):
    sliding_window: int | None = None
    rope_kind: LongRope | None = None


@dataclasses.dataclass(frozen=True)
class Stable(config.Lora):
    rank_stable: bool = False


def as_fork(monkeypatch, lora: config.Lora | None = None, stretch: float = 1.0, **changes) -> None:
    """Checkpoints are read as a fork's, whose [model] has two more options and whose [model.rope_scaling] has one."""

    def read_config(*args):
        cfg = as_read(*args)
        rope = cfg.model.rope_scaling and LongRope(
            **vars(cfg.model.rope_scaling), attention_factor=stretch
        )
        model = Windowed(**{**vars(cfg.model), "rope_scaling": rope, **changes})
        return dataclasses.replace(cfg, lora=lora, model=model)

    as_read = catalog.read_config
    monkeypatch.setattr(catalog, "read_config", read_config)


def test_options_that_config_json_does_not_have_are_exported_at_their_default_alone(
    read, tmp_path, capsys, monkeypatch
):
    source, out = read[1][0] / "sharded", tmp_path / "out"
    assert run(capsys, "export", source, tmp_path / "plain") == (0, "")
    with monkeypatch.context() as patched:
        # what is trained is not what is computed
        as_fork(patched, freeze=("embedding*",), init_from="elsewhere")
        patched.setattr("extras.huggingface.weights.weights_to_read", lambda *args, **kwargs: None)
        assert run(capsys, "export", source, tmp_path / "default") == (0, "")
        assert files_of(tmp_path / "default") == files_of(tmp_path / "plain")
    for changes, named in (
        (
            {"sliding_window": 8, "stretch": 2.0},
            ["[model] rope_scaling.attention_factor = 2.0:", "[model] sliding_window = 8:"],
        ),
        ({"rope_kind": LongRope(2.0)}, ["[model] rope_kind = {factor = 2.0, "]),
    ):
        for flags in (), ("--adapter",):
            with monkeypatch.context() as patched:
                as_fork(patched, config.Lora() if flags else None, **changes)
                code, error = run(capsys, "export", source, out, *flags)
            assert code == 2 and not out.exists() and error.count("\n") == len(named)
            assert all(
                line.startswith(name) and "is not written into config.json" in line
                for line, name in zip(error.splitlines(), named)
            )
    render = hf_config.render  # which a fork extends
    monkeypatch.setattr(
        hf_config,
        "render",
        lambda m, *rest: {**render(m, *rest), "sliding_window": m.sliding_window},
    )
    as_fork(monkeypatch, sliding_window=8)
    assert run(capsys, "export", source, out)[0] == 0
    assert json.loads((out / "config.json").read_text())["sliding_window"] == 8


def test_options_that_peft_s_file_does_not_have_are_refused(read, tmp_path, capsys, monkeypatch):
    as_fork(monkeypatch, Stable(rank_stable=True, base_dtype="nf4", init_from="elsewhere"))
    code, error = run(capsys, "export", read[1][0] / "single", tmp_path / "out", "--adapter")
    assert code == 2 and error.startswith(
        "[lora] rank_stable = true: is not written into adapter_config.json"
    )
    assert error.count("\n") == 1 and not [*tmp_path.iterdir()]


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The tokenizer


def test_transformers_gives_the_same_ids(read, prepared, tmp_path, capsys):
    checkpoint = shutil.copytree(
        read[1][0] / "single/checkpoints/step-00000001", tmp_path / "checkpoint"
    )
    (checkpoint / "manifest.json").unlink()
    shutil.copy(prepared / "tokenizer.model", checkpoint)
    seal(checkpoint)
    assert run(capsys, "export", checkpoint, tmp_path / "out") == (0, "")
    ours, theirs = (
        Tokenizer(prepared / "tokenizer.model"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    texts = [
        words(1, 500),
        "def f(x):\n    return [x]  # two\n\n\n\tdone",
        " leading",
        "  two",
        "",
        "\n",
        " " * 37,
        "I 'm , as it were . ",
        "häßlich \u2603 \U0001d518",
        "aaaaaaaaaaaaa",
        (REPO / "train.py").read_text(),
    ]
    for text in texts:
        assert theirs(text)["input_ids"] == ours.bos + ours.encode([text])[0]
        assert theirs.decode(ours.encode([text])[0]) == text
        # line ends are none
        assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    assert (
        [theirs.bos_token_id] == ours.bos
        and [theirs.eos_token_id] == ours.eos
        and len(theirs) == ours.vocab_size
    )
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert (made["bos_token_id"], made["eos_token_id"]) == (1, 2)
    # back again, the sentencepiece model is the tokenizer, and not what was made from it
    assert run(capsys, "import", tmp_path / "out", tmp_path / "again") == (0, "")
    assert [*Tokenizer(tmp_path / "again").files] == ["tokenizer.model"]


@pytest.mark.parametrize(
    "settings",
    [{"add_dummy_prefix": True}, {"bos_id": -1}, {"eos_id": -1, "add_dummy_prefix": True}],
    ids=str,
)
def test_transformers_gives_the_ids_of_others_sentencepiece_models(settings, tmp_path):
    """As Llama 2's, which adds a space in front of a text; and without BOS or EOS."""
    ours = sentencepiece_model(tmp_path / "tokenizer.model", **settings)
    (tmp_path / "out").mkdir()
    hf.write_tokenizer(tmp_path / "out", tmp_path)
    (tmp_path / "out/tokenizer.model").unlink()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the cat", " the cat", "  sat", "", "\n", "cat\ndog", "a  b", "é☃"):
        assert theirs(text)["input_ids"] == ours.bos + ours.encode([text])[0]
        assert theirs.decode(ours.encode([text])[0]) == text
    assert [
        i for i in (theirs.bos_token_id, theirs.eos_token_id) if i is not None
    ] == ours.bos + ours.eos


def test_several_eos_tokens_of_a_folder_are_kept(folders, prepared, tmp_path, capsys):
    """As Llama 3 Instruct has them, of which its tokenizer names one."""
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    shutil.copy(prepared / "tokenizer.model", folder)
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 7]}')
    assert run(capsys, "import", folder, tmp_path / "checkpoint") == (0, "")
    assert run(capsys, "export", tmp_path / "checkpoint", tmp_path / "out") == (0, "")
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [2, 7]


def test_a_tokenizer_json_that_stands_alone(folders, prepared, tmp_path, capsys):
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    for name in ("tokenizer.model", "generation_config.json"):
        (folder / name).unlink()
    made = fast_tokenizer_files(read_sentencepiece(prepared / "tokenizer.model"))
    (folder / "tokenizer.json").write_text(json.dumps(made["tokenizer.json"]))
    assert run(capsys, "import", folder, tmp_path / "checkpoint") == (0, "")
    assert run(capsys, "export", tmp_path / "checkpoint", tmp_path / "out") == (0, "")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        folder / "tokenizer.json"
    ).read_bytes()
    ours, theirs = (
        Tokenizer(prepared / "tokenizer.model"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    assert theirs(words(3, 99))["input_ids"] == ours.bos + ours.encode([words(3, 99)])[0]
    (tmp_path / "out/tokenizer.model").unlink(missing_ok=True)
    again = Tokenizer(tmp_path / "out")
    assert (again.bos, again.eos, again.encode([words(3, 99)])) == (
        ours.bos,
        ours.eos,
        ours.encode([words(3, 99)]),
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 2


def test_a_tokenizer_json_with_added_tokens_is_used_instead_of_the_model_next_to_it(
    prepared, tmp_path
):
    """As fine-tunes have them, which end their texts with a token of their own."""
    shutil.copy(prepared / "tokenizer.model", tmp_path)
    made = fast_tokenizer_files(read_sentencepiece(prepared / "tokenizer.model"))
    for name, content in made.items():
        hf.write_json(tmp_path / name, content)
    assert [*Tokenizer(tmp_path).files] == ["tokenizer.model"]
    size = len(made["tokenizer.json"]["model"]["vocab"])
    for i, special in enumerate((True, False)):
        made["tokenizer.json"]["added_tokens"].append(
            {
                **made["tokenizer.json"]["added_tokens"][0],
                "id": size + i,
                "content": f"<|{i}|>",
                "special": special,
            }
        )
    hf.write_json(tmp_path / "tokenizer.json", made["tokenizer.json"])
    hf.write_json(
        tmp_path / "tokenizer_config.json", {**made["tokenizer_config.json"], "eos_token": "<|0|>"}
    )
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == size + 2 and ours.eos == [theirs.eos_token_id] == [size]
    assert (
        ours.bos + ours.encode(["the cat<|1|> sat"])[0] == theirs("the cat<|1|> sat")["input_ids"]
    )
    for rows, name in ((size + 2, "tokenizer.json"), (size, "tokenizer.model")):
        # a padding token may have no row
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows}))
        assert name in Tokenizer(tmp_path).files
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("[]")
    assert [*Tokenizer(tmp_path).files] == ["tokenizer.model"]


def test_a_tokenizer_that_cannot_be_expressed_is_copied_and_reported(tmp_path, capsys):
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(words(i, 50) for i in range(50)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=60,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "out").mkdir()
    hf.write_tokenizer(tmp_path / "out", tmp_path)
    assert "tokenizer.model" in capsys.readouterr().err and os.listdir(tmp_path / "out") == [
        "tokenizer.model"
    ]
    assert hf.token_ids(tmp_path) == {"bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "tokenizer.model").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="is no sentencepiece model"):
        hf.write_tokenizer(tmp_path / "out", tmp_path)


@pytest.mark.parametrize(
    "settings", [{"user_defined_symbols": ["[X]"]}, {"treat_whitespace_as_suffix": True}], ids=str
)
def test_a_dummy_prefix_that_tokenizers_would_put_elsewhere_is_not_expressed(tmp_path, settings):
    path = tmp_path / "tokenizer.model"
    for prefix in (False, True):
        sentencepiece_model(path, add_dummy_prefix=prefix, **settings)
        assert bool(fast_tokenizer_files(read_sentencepiece(path))) != prefix


def unused(model) -> None:
    for entry in model.pieces:
        if entry.piece in ("ca", "at"):
            entry.type = model.SentencePiece.UNUSED


def equal_scores(model) -> None:
    for entry in model.pieces:
        entry.score = -1


def without_a_character(model) -> None:
    next(entry for entry in model.pieces if entry.piece == "c").piece = "\u4e00"


def changed_when_decoded(model) -> None:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat"] * 9),
        model_writer=made,
        vocab_size=20,
        normalization_rule_name="nfkc_cf",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    other = type(model)()
    other.ParseFromString(made.getvalue())
    model.denormalizer_spec.precompiled_charsmap = other.normalizer_spec.precompiled_charsmap


INEXPRESSIBLE = {  # what is named -> settings of its training, and what is changed afterwards
    "normalized text": ({"normalization_rule_name": "nmt_nfkc_cf"}, None),
    "remove_extra_whitespaces": ({"remove_extra_whitespaces": True}, None),
    "model_type UNIGRAM": ({"model_type": "unigram", "vocab_size": 280}, None),
    "user-defined symbols with spaces": ({"user_defined_symbols": ["  "]}, None),
    "add_dummy_prefix with user-defined symbols": (
        {"user_defined_symbols": ["[X]"], "add_dummy_prefix": True},
        None,
    ),
    "add_dummy_prefix with treat_whitespace_as_suffix": (
        {"treat_whitespace_as_suffix": True, "add_dummy_prefix": True},
        None,
    ),
    "escape_whitespaces = false": (
        {},
        lambda model: setattr(model.normalizer_spec, "escape_whitespaces", False),
    ),
    "entries of type UNUSED": ({}, unused),
    "entries with equal scores": ({}, equal_scores),
    "entries with characters that are no entries": ({}, without_a_character),
    "decoded text that is changed": ({}, changed_when_decoded),
}


def difference(path: pathlib.Path) -> bool:
    """Whether sentencepiece and tokenizers give other ids, or other text, of any of these texts."""
    import sentencepiece
    import tokenizers

    theirs = sentencepiece.SentencePieceProcessor(str(path))
    made = tokenizers.Tokenizer.from_str(
        json.dumps(fast_tokenizer_files(read_sentencepiece(path))["tokenizer.json"])
    )
    texts = [
        words(1, 99),
        "The  CAT",
        "cat[X]sat",
        " mat ",
        "\u24b6",
        "cacatatat",
        "a  b",
        *("".join(random.Random(i).choices("catherond ", k=20)) for i in range(200)),
    ]
    ids = [theirs.encode(text) for text in texts]
    return ids != [made.encode(text, add_special_tokens=False).ids for text in texts] or list(
        map(theirs.decode, ids)
    ) != list(map(made.decode, ids))


def edited(path: pathlib.Path, settings: dict, change) -> None:
    sentencepiece_model(path, **{"add_dummy_prefix": False, **settings})
    if change:
        model = read_sentencepiece(path)
        change(model)
        path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_what_tokenizer_json_cannot_express_is_named_and_would_differ(
    tmp_path, capsys, monkeypatch, name
):
    edited(tmp_path / "tokenizer.model", *INEXPRESSIBLE[name])
    (tmp_path / "out").mkdir()
    hf.write_tokenizer(tmp_path / "out", tmp_path)
    assert f"tokenizer.json cannot express {name}" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["tokenizer.model"]
    monkeypatch.setattr(hf_tokenizer, "inexpressible", lambda model: [])
    assert difference(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split_digits": True, "split_by_whitespace": False, "split_by_unicode_script": False},
        {"user_defined_symbols": ["ca", "cat", "[X]", "\n"]},
        {"treat_whitespace_as_suffix": True},
        {"control_symbols": ["<c>"], "pad_id": 3},
        {"bos_id": 5, "eos_id": 6},
    ],
    ids=str,
)
def test_what_shapes_the_vocabulary_alone_is_expressed(tmp_path, settings):
    edited(tmp_path / "tokenizer.model", settings, None)
    assert not difference(tmp_path / "tokenizer.model")


def test_bos_and_eos_are_those_that_sentencepiece_reports(tmp_path):
    """By their names: another program may have changed these, or the ids, alone."""

    def change(model) -> None:
        model.trainer_spec.bos_id, model.trainer_spec.eos_piece = 7, "cat"

    path = tmp_path / "tokenizer.model"
    edited(path, {}, change)
    ours, made = Tokenizer(path), fast_tokenizer_files(read_sentencepiece(path))
    assert (ours.bos, ours.eos) == ([1], [])
    assert (
        made["tokenizer_config.json"]["bos_token"],
        made["tokenizer_config.json"]["eos_token"],
    ) == ("<s>", None)
    assert made["tokenizer.json"]["post_processor"]["special_tokens"]["<s>"]["ids"] == [1]


def test_a_unigram_model_of_unnormalized_text_is_none_that_can_be_expressed(tmp_path):
    """Its entries are not merged in pairs."""
    sentencepiece_model(
        tmp_path / "tokenizer.model", vocab_size=60, model_type="unigram", byte_fallback=False
    )
    assert fast_tokenizer_files(read_sentencepiece(tmp_path / "tokenizer.model")) == {}


def test_a_tokenizer_that_puts_a_space_in_front_is_expressed(tmp_path):
    """As Llama 2's."""
    import sentencepiece
    import tokenizers

    (tmp_path / "text").write_text("\n".join(words(i, 50) for i in range(50)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path / "tokenizer.model"
    theirs = sentencepiece.SentencePieceProcessor(str(path))
    made = tokenizers.Tokenizer.from_str(
        json.dumps(fast_tokenizer_files(read_sentencepiece(path))["tokenizer.json"])
    )
    for text in ("the cat sat", " the  cat", "und\u00e9r\nthe mat", "a"):
        ids = theirs.encode(text)
        assert made.encode(text, add_special_tokens=False).ids == ids
        assert made.decode(ids) == theirs.decode(ids) == text


def test_wrong_calls_are_one_line(read, folders, tmp_path, capsys, monkeypatch):
    source = read[1][0] / "single"
    for value in ("0", "-1", "nan", "inf"):
        code, error = run(capsys, "export", source, tmp_path / "out", "--shard-gib", value)
        assert (
            code == 2
            and error.startswith(f"--shard-gib {float(value)}: must be")
            and error.count("\n") == 1
        )
    monkeypatch.chdir(tmp_path)
    for command in (("export", source), ("import", folders["single"])):
        code, error = run(capsys, *command, ".")
        assert code == 2 and error == (
            f"{tmp_path}: is the current folder or /, which cannot be replaced; name one in it\n"
        )
        assert run(capsys, *command, "/")[0] == 2
    assert not [*tmp_path.iterdir()]


def test_an_export_without_a_usable_tokenizer_says_what_it_leaves_out(read, tmp_path, capsys):
    checkpoint = shutil.copytree(
        read[1][0] / "single/checkpoints/step-00000001", tmp_path / "checkpoint"
    )
    (checkpoint / "tokenizer.json").write_text("{}")
    seal(checkpoint)
    code, error = run(capsys, "export", checkpoint, tmp_path / "out")
    assert code == 0 and "BOS and EOS tokens are left out of config.json: " in error
    theirs = json.loads((tmp_path / "out/config.json").read_text())
    assert theirs["bos_token_id"] is None is theirs["eos_token_id"]


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
    "generation cut": (
        cut("generation_config.json", 9),
        ["generation_config.json: cannot be read"],
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
def test_what_is_wrong_is_refused_by_name(folders, tmp_path, capsys, case):
    spoil, expected = WRONG[case]
    folder = shutil.copytree(
        folders[case.partition(":")[0] if ":" in case else "single"], tmp_path / "hf"
    )
    spoil(folder)
    code, error = run(capsys, "import", folder, tmp_path / "new/folder/out")
    assert code == 2 and all(words in error for words in expected), error
    assert (
        all(line.startswith(str(tmp_path)) for line in error.splitlines())
        and "Traceback" not in error
    )
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_clone_without_git_lfs_is_one_line(folders, tmp_path, capsys):
    folder = shutil.copytree(folders["sharded"], tmp_path / "hf")
    for path in folder.glob("model-*"):
        path.write_text(POINTER)
    code, error = run(capsys, "import", folder, tmp_path / "out")
    assert code == 2 and error.count("\n") == 1 and "model-00001-of" in error
    assert (
        f"is a git-lfs pointer, not the file itself; fetch what its folder points to: git -C {folder} lfs pull"
        in error
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_of_equal_values_is_taken(folders, tmp_path, capsys, dtype):
    """Of another dtype, too."""
    folder = shutil.copytree(folders["tied"], tmp_path / "hf")
    weights(lambda t: t.update({EMBEDDING: t[EMBEDDING].to(dtype)}))(folder)
    weights(lambda t: t.update({HEAD: t[EMBEDDING].float().clone()}))(folder)
    assert run(capsys, "import", folder, tmp_path / "out") == (0, "")


def test_names_of_wrapping_modules_are_left_out(folders, tmp_path, capsys):
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
    code, error = run(capsys, "import", folder, tmp_path / "out")
    assert code == 2 and error.count("\n") == 1 and "; keep one" in error


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


@pytest.mark.parametrize(
    "package, command",
    [
        ("safetensors.torch", "export"),
        ("safetensors.torch", "import"),
        ("google.protobuf.message", "export"),
    ],
)
def test_a_missing_package_is_one_line(
    read, folders, prepared, tmp_path, capsys, monkeypatch, package, command
):
    monkeypatch.setitem(sys.modules, package, None)
    checkpoint = shutil.copytree(
        read[1][0] / "single/checkpoints/step-00000001", tmp_path / "checkpoint"
    )
    shutil.copy(prepared / "tokenizer.model", checkpoint)
    seal(checkpoint)
    code, error = run(
        capsys, command, checkpoint if command == "export" else folders["single"], tmp_path / "out"
    )
    assert (
        code == 2
        and "-m pip install" in error
        and package.split(".")[-2] in error
        and error.count("\n") == 1
    )
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_nothing_is_written_over(read, folders, tmp_path, capsys):
    source, out = read[1][0] / "single", tmp_path / "out"
    out.mkdir()
    (tmp_path / ".out.tmp/out").mkdir(parents=True)
    (tmp_path / ".out.tmp/out/left.safetensors").write_text("by one that was killed")
    assert run(capsys, "export", source, out)[0] == 0  # an empty folder is as good as none
    assert not (out / "left.safetensors").exists()
    before = sorted((p.name, p.stat().st_mtime_ns) for p in out.iterdir())
    for command in (("export", source), ("import", folders["single"])):
        code, error = run(capsys, *command, out)
        assert code == 2 and "is there already" in error
    assert run(capsys, "export", source, tmp_path / "new/folder/out")[0] == 0
    assert [p.name for p in (tmp_path / "new/folder").iterdir()] == ["out"]
    shutil.rmtree(tmp_path / "new")
    assert sorted((p.name, p.stat().st_mtime_ns) for p in out.iterdir()) == before
    assert run(capsys, "export", tmp_path, tmp_path / "other")[0] == 2  # no checkpoint
    assert run(capsys, "import", folders["single"], tmp_path / "step-00000007") == (
        2,
        f"{tmp_path}/step-00000007: is the name of a run's checkpoint; choose another\n",
    )
    assert run(
        capsys, "export", source, tmp_path / "step-00000000"
    ) == (  # as an import may be named
        2,
        f"{tmp_path}/step-00000000: is the name of a run's checkpoint; choose another\n",
    )
    with hf.published(tmp_path / "twice"):
        assert (
            "is being written by another process"
            in run(capsys, "export", source, tmp_path / "twice")[1]
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "twice"]


def test_what_appears_is_on_disk(read, folders, tmp_path, capsys, monkeypatch):
    """So that a power cut leaves no folder that is there and not whole."""
    synced = {}
    published = []
    fsync = os.fsync
    publish = files.publish

    def noting(handle):
        fsync(handle)
        synced[os.readlink(f"/proc/self/fd/{handle}")] = os.fstat(handle).st_size

    def checked(temporary, final):
        written = {str(path.resolve()): path.stat().st_size for path in temporary.iterdir()}
        assert written.items() <= synced.items()
        published.append({path.name for path in temporary.iterdir()})
        publish(temporary, final)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(files, "publish", checked)
    several = ["--shard-gib", "0.00003"]
    assert run(capsys, "export", read[1][0] / "single", tmp_path / "out", *several) == (0, "")
    assert run(capsys, "import", folders["single"], tmp_path / "in") == (0, "")
    assert {"config.json", INDEX} < published[0] and {
        "manifest.json",
        "tokenizer.model",
    } < published[1]


def test_a_damaged_checkpoint_is_not_exported(read, tmp_path, capsys):
    run_folder = shutil.copytree(read[2][0] / "single", tmp_path / "run")
    first = run_folder / "checkpoints/step-00000001"
    later = shutil.copytree(first, run_folder / "checkpoints/step-00000002")
    # its name does not fit its state
    code, error = run(capsys, "export", run_folder, tmp_path / "out")
    assert code == 0 and "corrupt, skipped:" in error
    path = next(first.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, error = run(capsys, "export", first, tmp_path / "other")
    assert code == 2 and "expected SHA-256" in error
    code, error = run(capsys, "export", run_folder, tmp_path / "other")
    assert (
        code == 2
        and str(later) in error
        and str(first) in error
        and not (tmp_path / "other").exists()
    )


def test_a_full_disk_and_a_kill_leave_nothing_half(on_ranks, read, folders, tmp_path, capsys):
    export = ["export", str(read[2][0] / "sharded"), str(tmp_path / "out")]
    commands = [export, ["import", str(folders["sharded"]), str(tmp_path / "in")]]
    for (code, error), out in zip(
        on_ranks(1, hf_cases.with_small_files, commands, 100_000)[0], ("out", "in")
    ):
        assert code == 2 and "File too large" in error and len(error.splitlines()) == 1, (
            out,
            error,
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError):
        on_ranks(1, hf_cases.killed, [*export, "--shard-gib", "0.00003"])
    assert [p.name for p in tmp_path.iterdir()] == [".out.tmp"]
    assert run(capsys, *export) == (0, "")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# Memory


def test_memory_is_bounded(on_ranks, folders, tmp_path):
    cfg = configuration(300)
    make_folder(tmp_path / "hf", cfg)
    with torch.device("meta"):
        sizes = [p.nbytes / 2**20 for _, p in named_parameters(Llama(cfg.model))]
    assert sum(sizes) > 280
    for peak, shard in on_ranks(2, hf_cases.read_peak, str(tmp_path / "hf")):
        assert shard == pytest.approx(sum(sizes) / 2, rel=0.01) and peak < shard + 80, peak
    commands = []
    for name, source in (("small", folders["single"]), ("large", tmp_path / "hf")):
        # the first loads code
        commands += [
            ["import", str(source), str(tmp_path / f"{name}-in")],
            [
                "export",
                str(tmp_path / f"{name}-in"),
                str(tmp_path / f"{name}-out"),
                "--shard-gib",
                "0.04",
            ],
        ]
    *_, imported, exported = on_ranks(1, hf_cases.tool_peaks, commands)[0]
    assert imported < 2 * max(sizes) + 80 < 0.6 * sum(sizes), imported
    # a file, and reading a tensor
    assert exported < 0.04 * 1024 + 2 * max(sizes) + 80 < 0.75 * sum(sizes), exported


def test_what_is_not_a_number_is_not_imported(folders, tmp_path, capsys):
    folder = shutil.copytree(folders["single"], tmp_path / "hf")
    weights(lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))(folder)
    code, error = run(capsys, "import", folder, tmp_path / "out")
    assert code == 2 and "model.norm.weight holds values that are not finite" in error
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("length, notes", [(32, 0), (31, 1), (None, 0), ("long", 0)])
def test_longer_sequences_than_the_weights_have_seen_are_logged(tmp_path, length, notes):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": length}))
    told = hf_config.note_on_context(str(tmp_path), 32)
    assert len(told) == notes
    if told:
        assert told[0].startswith("train.seq_len = 32 is longer than max_position_embeddings = 31")
    # a resumed run's base may be gone
    assert hf_config.note_on_context(str(tmp_path / "none"), 32) == []
