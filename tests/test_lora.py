"""Adapters against PEFT on transformers' model: the same adapters and batches, on any mesh; and what a run with them
writes, reads and refuses."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import config
from checkpoint import catalog, load
from config import ConfigError
from data.dataset import open_dataset
from data.loader import Loader
from model import hf
from model.hf_weights import peft_name, weights_to_read
from model.llama import meta_model, named_parameters
from optim import learning_rate
from parallel.materialize import materialize_from
from parallel.plan import collectives, plan
from tests import cases
from tests.conftest import make_config, tables
from tests.test_training import with_data

WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
          "vocab_size": 320, "num_hidden_layers": 2, "head_dim": 32}
PROJECTIONS = [*config.PROJECTIONS]
MESHES = {  # by the number of ranks
    1: {"alone": {}},
    2: {"two": {}, "cp 2": {"cp": 2}},
    4: {"four": {}, "dp 2 x tp 2": {"tp": 2}},
}
EVERYWHERE = {"recompute": "selective", "reshard_after_forward": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory, prepared):
    """A Hugging Face folder. Not to be changed."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**WIDTHS, initializer_range=0.1, max_position_embeddings=64)).save_pretrained(folder)
    shutil.copy(prepared / "tokenizer.model", folder)
    return folder


def peft_of(base, **changes) -> PeftModel:
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS, "init_lora_weights": False, **changes}
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**settings))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """PEFT's folder of adapters that are random, B too."""
    folder = tmp_path_factory.mktemp("adapter") / "peft"
    peft_of(base).save_pretrained(folder)
    return folder


def run_of(base, corpus, prepared, adapter=None, **changes) -> dict:
    """The tables of a run with adapters over the base."""
    lora = {"base_dtype": "float32", **({"init_from": str(adapter)} if adapter else {"rank": 4}),
            **changes.pop("lora", {})}
    sizes = {**dict.fromkeys(tables()["model"]), "vocab_size": 320}  # all others are the folder's
    given = {"model": {**sizes, "init_from": str(base)}, "lora": lora,
             "train": {"steps": 10, "micro_batch_size": None}, "checkpoint": {"save_every_steps": 6}}
    given |= {name: {**given.get(name, {}), **keys} for name, keys in changes.items()}
    return with_data(given, corpus, {320: prepared})


def peft_loop(cfg: config.Config, base) -> tuple[list[dict], PeftModel, dict]:
    """The run as PEFT's users write it: (rows, the model after the last step, AdamW's first moments by our name)."""
    o, model = cfg.optim, peft_of(base)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    loader, found = Loader(cfg, open_dataset(cfg).train, [1.0], 0, 1, 1, False), []
    for step in range(1, cfg.train.steps + 1):
        batch = next(loader)
        inputs, targets = (torch.cat(part) for part in zip(*batch.micro_batches))
        loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), cfg.train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, cfg.train.steps, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.item(), "grad_norm": norm.item(), "batch_digest": batch.digest})
    loader.close()
    names = {peft_name(name): name for name, p in meta_model(cfg.model, cfg.lora).named_parameters() if p.requires_grad}
    moments = {names[name.replace(".default", "")]: optimizer.state[p]["exp_avg"] for name, p in trained.items()}
    return found, model, moments


@pytest.fixture(scope="module")
def expected(base, adapter, corpus, prepared):
    return peft_loop(make_config(**run_of(base, corpus, prepared, adapter)), base)


@pytest.fixture(scope="module")
def trained(on_ranks, base, adapter, corpus, prepared, tmp_path_factory):
    """(rows by mesh, the folder of runs below their number of ranks)."""
    output, found = tmp_path_factory.mktemp("lora"), {}
    for ranks, meshes in MESHES.items():
        runs = {name: run_of(base, corpus, prepared, adapter, parallel=mesh) for name, mesh in meshes.items()}
        found |= on_ranks(ranks, cases.train_all, runs, str(output))[0]
    return found, output


def stored(run, step: int) -> dict[str, torch.Tensor]:
    folder = run / f"checkpoints/step-{step:08d}"
    reader = load.Reader(folder)
    return {name: load.read_tensor(folder, reader, name) for name in reader.metadata.state_dict_metadata}


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("ranks, mesh", [(ranks, mesh) for ranks, meshes in MESHES.items() for mesh in meshes])
def test_training_is_that_of_peft(trained, expected, ranks, mesh):
    """Losses and norms, the adapters and AdamW's average of their gradients after ten steps. The checkpoint holds the
    adapters alone."""
    rows, model, moments = expected
    assert [row["batch_digest"] for row in trained[0][mesh]] == [row["batch_digest"] for row in rows]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in trained[0][mesh]] == pytest.approx([row[key] for row in rows], rel=1e-5), key
    tensors = stored(trained[1] / str(ranks) / mesh.replace(" ", "-"), 10)
    theirs = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in moments}
    assert len(moments) == 2 * 7 * 2
    for name, moment in moments.items():
        assert near(tensors[f"model.{name}"], theirs[peft_name(name)]), name
        assert near(tensors[f"optim.{name}.exp_avg"], moment), name


STRATEGIES = {
    "": {}, "kept": {"reshard_after_forward": False}, "replicas": {"dp_replicate": 2}, "tp": {"tp": 2}, "cp": {"cp": 2},
    "cp x tp": {"cp": 2, "tp": 2}, "replicas x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}
VARIANTS = {
    "": {},
    "nf4": {"lora": {"base_dtype": "nf4"}},
    "bfloat16": {"lora": {"base_dtype": "bfloat16"}, "parallel": {"param_dtype": "bfloat16"}},
    "some targets": {"lora": {"targets": ["o_proj", "up_proj"], "base_dtype": "nf4"}},
    "deferred": {"parallel": {"sync_every_micro_batch": False}},
    "full": {"parallel": {"recompute": "full"}, "lora": {"base_dtype": "nf4"}},
    "selective": {"parallel": {"recompute": "selective"}, "lora": {"targets": ["q_proj", "v_proj"]}},
}


def case(base, strategy: str, variant: str) -> dict:
    changes = {**VARIANTS[variant]}
    parallel = {"param_dtype": "float32", **STRATEGIES[strategy], **changes.pop("parallel", {})}
    sizes = {**dict.fromkeys(tables()["model"]), "vocab_size": 320, "init_from": str(base)}
    return {"model": sizes, "lora": {"rank": 3, **changes.pop("lora", {})}, "parallel": parallel,
            "train": {"global_batch_size": 8, "micro_batch_size": 1}}


CASES = [(strategy, variant) for strategy in STRATEGIES for variant in VARIANTS]


@pytest.mark.parametrize("ranks", [4, None])
def test_collectives_equal_the_formula(on_ranks, base, ranks):
    """On torch's fake process group, and some on real ranks. What is frozen never travels as a gradient."""
    chosen = CASES if ranks else [name for name in CASES if name[1] in ("", "nf4")]
    every = [case(base, *name) for name in chosen]
    counted = on_ranks(1 if ranks else 4, cases.count_collectives, every, ranks)[0]
    wrong = {}
    for name, sections, row in zip(chosen, every, counted):
        cfg = make_config(**sections)
        planned = collectives(cfg, meta_model(cfg.model, cfg.lora), 4)
        if planned != row:
            wrong[name] = (planned, row)
    assert not wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_equal_those_of_real_tensors(on_ranks, base, ranks):
    strategies = {1: [""], 2: ["", "tp"], 3: [""], 4: ["", "replicas", "cp x tp"]}[ranks]
    every = [case(base, strategy, variant) for strategy in strategies for variant in ("", "nf4", "some targets")]
    every = [{**sections, "train": {"global_batch_size": 12, "micro_batch_size": 1}} for sections in every]
    real = on_ranks(ranks, cases.live_bytes, every)
    for i, sections in enumerate(every):
        cfg = make_config(**sections)
        planned = plan(cfg, meta_model(cfg.model, cfg.lora), ranks, None)
        for what in ("parameter", "gradient", "optimizer"):
            assert max(rank[i][what] for rank in real) == planned[f"{what}_bytes_per_rank"], sections
