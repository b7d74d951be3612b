"""Adapters against PEFT on transformers' model: the same adapters and batches, on any mesh; and what a run with them
writes, reads and refuses."""

import dataclasses
import itertools
import json
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

import config
from checkpoint import compare, load
from config import ConfigError
from data.dataset import open_dataset
from extras.huggingface import config as hf_config
from extras.huggingface import convert as hf
from extras.huggingface.weights import fingerprint, hf_name, weighted_sum, weights_to_read
from extras.lora import nf4
from extras.lora.adapters import merged
from model.build import build_model, meta_model
from model.llama import flops_per_token, named_parameters, parameter_count
from optim import learning_rate
from parallel.materialize import materialize
from tests import cases
from tests.conftest import content, launch, loader_of, make_config, run_tool, tables
from tests.test_training import with_data

pytestmark = [pytest.mark.early, pytest.mark.slow]

WIDTHS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
PROJECTIONS = [*config.PROJECTIONS]
RUNS = {  # by the number of ranks: how the base is kept, [parallel], [train]
    1: {
        "alone": ("float32", {}, {}),
        "alone, nf4, compiled": ("nf4", {"compile": True, "recompute": "elementwise"}, {}),
    },
    2: {
        "two": ("float32", {}, {}),
        "cp 2": ("float32", {"cp": 2, "recompute": "full"}, {}),
        "two, bfloat16": (
            "bfloat16",
            {"recompute": "selective", "reshard_after_forward": False},
            {},
        ),
        "two, nf4": ("nf4", {"cpu_offload": True}, {"micro_batch_size": 2}),
        "two, nf4, replicated": (
            "nf4",
            {"replicated": ["embedding.weight", "blocks.0.*_proj.weight"]},
            {},
        ),
    },
    4: {
        "four": ("float32", {"dp_replicate": 2}, {}),
        "four, nf4": ("nf4", {"recompute": "full"}, {}),
        "dp 2 x tp 2": ("float32", {"tp": 2}, {}),
        "dp 2 x tp 2, nf4": (
            "nf4",
            {"tp": 2, "sync_every_micro_batch": False},
            {"micro_batch_size": 2},
        ),
        "dp 2 x tp 2, nf4, qwen3": ("nf4", {"tp": 2, "recompute": "selective"}, {}),
    },
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory, prepared):
    """Hugging Face folders, by model_type. Not to be changed."""
    found = {}
    for kind in LlamaConfig, Qwen3Config:
        folder = found[kind.model_type] = tmp_path_factory.mktemp("base") / "hf"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            kind(**WIDTHS, initializer_range=0.1, max_position_embeddings=64)
        )
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                torch.nn.init.normal_(weight, 1.0, 0.2)
        model.save_pretrained(folder)
        shutil.copy(prepared / "tokenizer.model", folder)
    return found


@pytest.fixture(scope="module")
def base(bases):
    return bases["llama"]


def type_of(name: str) -> str:
    """The model_type of a run's base."""
    return "qwen3" if "qwen3" in name else "llama"


def peft_of(base, **changes) -> PeftModel:
    torch.manual_seed(1)
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": PROJECTIONS,
        "init_lora_weights": False,
        **changes,
    }
    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**settings)
    )


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """PEFT's folder of adapters that are random, B too."""
    folder = tmp_path_factory.mktemp("adapter") / "peft"
    peft_of(base).save_pretrained(folder)
    return folder


def kept_as(dtype: str, base, folder):
    """A copy of the base whose weights are rounded as this dtype keeps them."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        if dtype == "nf4" and "_proj" in name:
            from tests.extras.lora.test_nf4 import quantize

            tensors[name] = nf4.dequantize(*quantize(weight), torch.float32)
        elif dtype != "float32":
            tensors[name] = weight.bfloat16().float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run_of(base, corpus, prepared, adapter=None, **changes) -> dict:
    """The tables of a run with adapters over the base."""
    lora = {
        "base_dtype": "float32",
        **({"init_from": str(adapter)} if adapter else {"rank": 4}),
        **changes.pop("lora", {}),
    }
    sizes = {**dict.fromkeys(tables()["model"]), "vocab_size": 320}  # all others are the folder's
    given = {
        "model": {**sizes, "init_from": str(base)},
        "lora": lora,
        "train": {"steps": 10, "micro_batch_size": None},
        "checkpoint": {"save_every_steps": 6},
    }
    given |= {name: {**given.get(name, {}), **keys} for name, keys in changes.items()}
    return with_data(given, corpus, {320: prepared})


def peft_loop(cfg: config.Config, base) -> tuple[list[dict], PeftModel, dict]:
    """The run as PEFT's users write it: (rows, the model after the last step, AdamW's first moments by our name)."""
    o, model = cfg.optim, peft_of(base)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
    )
    loader, found = loader_of(cfg, *open_dataset(cfg).train), []
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
    names = {
        hf_name(name): name
        for name, p in meta_model(cfg.model, cfg.lora).named_parameters()
        if p.requires_grad
    }
    moments = {
        names[name.replace(".default", "")]: optimizer.state[p]["exp_avg"]
        for name, p in trained.items()
    }
    return found, model, moments


@pytest.fixture(scope="module")
def expected(base, bases, adapter, corpus, prepared, tmp_path_factory):
    """By how the base is kept, and its model_type: PEFT's run over weights that are rounded so."""
    cfg, folder = (
        make_config(**run_of(base, corpus, prepared, adapter)),
        tmp_path_factory.mktemp("kept"),
    )
    return {
        (dtype, kind): peft_loop(cfg, kept_as(dtype, bases[kind], folder / f"{dtype} {kind}"))
        for dtype, kind in (
            ("float32", "llama"),
            ("bfloat16", "llama"),
            ("nf4", "llama"),
            ("nf4", "qwen3"),
        )
    }


@pytest.fixture(scope="module")
def trained(on_ranks, bases, adapter, corpus, prepared, tmp_path_factory):
    """(rows by name, the folder of runs below their number of ranks)."""
    output, found = tmp_path_factory.mktemp("lora"), {}
    for ranks, of_ranks in RUNS.items():
        runs = {
            name: run_of(
                bases[type_of(name)],
                corpus,
                prepared,
                adapter,
                lora={"base_dtype": dtype},
                parallel=parallel,
                train=train,
            )
            for name, (dtype, parallel, train) in of_ranks.items()
        }
        found |= on_ranks(ranks, cases.train_all, runs, str(output))[0]
    return found, output


def test_the_base_has_one_hash_on_every_mesh(trained):
    saved = [
        json.loads(path.read_text()) for path in trained[1].glob("*/*/checkpoints/*/state.json")
    ]
    assert len({(state["config"]["model"]["qk_norm"], state["base"]) for state in saved}) == 2


def stored(run, step: int) -> dict[str, torch.Tensor]:
    reader = load.Reader(run / f"checkpoints/step-{step:08d}")
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in reader.metadata.state_dict_metadata.items()
    }
    load.read_tensors(reader, tensors)
    return tensors


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize(
    "ranks, name", [(ranks, name) for ranks, names in RUNS.items() for name in names]
)
def test_training_is_that_of_peft(trained, expected, ranks, name):
    """Losses and norms, the adapters and AdamW's average of their gradients after ten steps. The checkpoint holds the
    adapters alone."""
    rows, model, moments = expected[RUNS[ranks][name][0], type_of(name)]
    assert [row["batch_digest"] for row in trained[0][name]] == [
        row["batch_digest"] for row in rows
    ]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in trained[0][name]] == pytest.approx(
            [row[key] for row in rows], rel=1e-5
        ), key
    tensors = stored(trained[1] / str(ranks) / name.replace(" ", "-").replace(",", ""), 10)
    theirs = {
        name.replace(".default", ""): p.detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert {name for name in tensors if name.startswith("model.")} == {
        f"model.{name}" for name in moments
    }
    assert len(moments) == 2 * 7 * 2
    for name, moment in moments.items():
        assert near(tensors[f"model.{name}"], theirs[hf_name(name)]), name
        assert near(tensors[f"optim.{name}.exp_avg"], moment), name


STRATEGIES = {
    "": {},
    "kept": {"reshard_after_forward": False},
    "replicas": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "replicas x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}
VARIANTS = {
    "": {},
    "nf4": {"lora": {"base_dtype": "nf4"}},
    "bfloat16": {"lora": {"base_dtype": "bfloat16"}, "parallel": {"param_dtype": "bfloat16"}},
    "some targets": {"lora": {"targets": ["o_proj", "up_proj"], "base_dtype": "nf4"}},
    "deferred": {"parallel": {"sync_every_micro_batch": False}},
    "gathered once": {"parallel": {"gather_once": True}, "lora": {"base_dtype": "nf4"}},
    "full": {"parallel": {"recompute": "full"}, "lora": {"base_dtype": "nf4"}},
    "selective": {
        "parallel": {"recompute": "selective"},
        "lora": {"targets": ["q_proj", "v_proj"]},
    },
}


def case(base, strategy: str, variant: str) -> dict:
    changes = {**VARIANTS[variant]}
    parallel = {"param_dtype": "float32", **STRATEGIES[strategy], **changes.pop("parallel", {})}
    sizes = {**dict.fromkeys(tables()["model"]), "vocab_size": 320, "init_from": str(base)}
    # 2 or more a step
    return {
        "model": sizes,
        "lora": {"rank": 3, **changes.pop("lora", {})},
        "parallel": parallel,
        "train": {"global_batch_size": 4 if "tp" in strategy else 8, "micro_batch_size": 1},
    }


CASES = [
    (strategy, variant)
    for strategy, variant in itertools.product(STRATEGIES, VARIANTS)
    if variant in ("", "nf4") or strategy in ("", "cp x tp")
]
REAL = [("kept", ""), ("cp x tp", ""), ("replicas", "nf4"), ("tp", "nf4")]


@pytest.mark.parametrize("ranks", [4, None])
def test_collectives_equal_the_formula(on_ranks, base, ranks):
    """On torch's fake process group, and some on real ranks. What is frozen never travels as a gradient."""
    from tests.theory import collectives

    chosen = CASES if ranks else REAL
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
    from extras.planner.plan import plan

    strategies = {1: [""], 2: ["", "tp"], 3: [""], 4: ["", "replicas", "cp x tp"]}[ranks]
    every = [case(base, strategy, variant) for strategy in strategies for variant in ("", "nf4")]
    every.append(case(base, "", "some targets"))
    every = [
        {**sections, "train": {"global_batch_size": 12, "micro_batch_size": 1}}
        for sections in every
    ]
    real = on_ranks(ranks, cases.live_bytes, every)
    for i, sections in enumerate(every):
        cfg = make_config(**sections)
        planned = plan(cfg, ranks)
        for what in ("parameter", "gradient", "optimizer"):
            assert max(rank[i][what] for rank in real) == planned[f"{what}_bytes_per_rank"], (
                sections
            )


def test_adapters_go_on_exactly_on_any_mesh(
    on_ranks, trained, base, adapter, corpus, prepared, tmp_path
):
    """Bit for bit on the same mesh, from a base that lies elsewhere now, its adapter's folder gone; to 1e-5 on
    another."""
    for ranks, name in (2, "two, bfloat16"), (4, "dp 2 x tp 2, nf4"):
        dtype, parallel, train = RUNS[ranks][name]
        folder = name.replace(" ", "-").replace(",", "")
        for copy in ("same", "one"):
            shutil.copytree(trained[1] / str(ranks) / folder, tmp_path / folder / copy / "r")
            shutil.rmtree(tmp_path / folder / copy / "r/checkpoints/step-00000010")
        moved = shutil.copytree(base, tmp_path / folder / "moved")
        sections = run_of(
            moved,
            corpus,
            prepared,
            tmp_path / "gone",
            train=train,
            lora={"base_dtype": dtype, "rank": 4, "alpha": 6, "targets": PROJECTIONS},
        )
        wanted = stored(trained[1] / str(ranks) / folder, 10)
        for copy, on, mesh in ("same", ranks, parallel), ("one", 1, {}):
            rows = on_ranks(
                on,
                cases.train_to,
                10,
                {**sections, "parallel": mesh},
                str(tmp_path / folder / copy),
            )[0]
            assert [row["loss"] for row in rows] == pytest.approx(
                [row["loss"] for row in trained[0][name]], rel=1e-5
            )
            for key, tensor in stored(tmp_path / folder / copy / "r", 10).items():
                assert tensor.equal(wanted[key]) if copy == "same" else near(tensor, wanted[key]), (
                    key
                )


def test_the_hash_of_a_base_is_of_its_values(base, tmp_path):
    """Whatever rectangles it is read in, by however many; of another value, place or name it is another."""
    shape, noise = [6, 8], torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=noise)

    def share(rows: slice, columns: slice, of: torch.Tensor = values, name: str = "a") -> dict:
        place = (rows.start, columns.start)
        return {(name, *place): weighted_sum(name, place, shape, of[rows, columns])}

    whole = share(slice(0, 6), slice(0, 8))
    parts = [
        share(slice(0, 5), slice(0, 3)),
        share(slice(0, 5), slice(3, 8)),
        share(slice(5, 6), slice(0, 3)) | share(slice(5, 6), slice(3, 8)),
        share(slice(0, 5), slice(0, 3)),
    ]
    assert fingerprint([whole]) == fingerprint(parts) == fingerprint([{}, whole, whole])
    assert fingerprint([share(slice(0, 6), slice(0, 8), values.bfloat16().float())]) == fingerprint(
        [share(slice(0, 6), slice(0, 8), values.bfloat16())]
    )
    others = [
        values.flip(0),
        values.flip(1),
        values + torch.eye(6, 8) * 1e-6,
        -values,
        values[[1, 0, 2, 3, 4, 5]],
    ]
    for row in range(6):  # two changes of one row that cancel in a weaker sum
        for columns in itertools.combinations(range(8), 2):
            others += [values.clone(), values.clone()]
            others[-2][row, columns] *= -1
            others[-1][row, columns] *= torch.tensor([2.0, 0.5])
    found = {fingerprint([share(slice(0, 6), slice(0, 8), other)]) for other in others}
    found |= {fingerprint([whole]), fingerprint([share(slice(0, 6), slice(0, 8), name="b")])}
    assert len(found) == len(others) + 2


@pytest.mark.parametrize("dtype", ["bfloat16", "nf4"])
def test_weights_and_operations_are_counted_however_they_are_kept(base, dtype):
    """A frozen matrix has two products, an adapter's three; four bits are a weight too, its scales are none."""
    cfg = make_config(**{**case(base, "", ""), "lora": {"rank": 3, "base_dtype": dtype}})
    model, plain = meta_model(cfg.model, cfg.lora), meta_model(cfg.model)
    # of two blocks, q to down
    adapters = 2 * 3 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 2 * (64 + 128) + 128 + 64)
    assert parameter_count(model) == parameter_count(plain) + adapters
    matrices = parameter_count(plain) - 320 * 64 - 5 * 64  # without the embedding, and the norms
    assert flops_per_token(model, 32) == 4 * matrices + 6 * adapters + 6 * 2 * 4 * 32 * 32


@pytest.fixture(scope="module")
def logits(expected):
    """Of PEFT's models after training."""
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return ids, {key: model(input_ids=ids).logits for key, (_, model, _) in expected.items()}


def export(*words: object) -> None:
    assert hf.main(["export", *map(str, words)]) == 0


@pytest.mark.parametrize(
    "ranks, name",
    [(4, "dp 2 x tp 2"), (4, "four, nf4"), (2, "two, bfloat16"), (4, "dp 2 x tp 2, nf4, qwen3")],
)
def test_exports_give_our_logits_in_peft_and_transformers(
    trained, expected, logits, bases, tmp_path, ranks, name
):
    run, dtype = (
        trained[1] / str(ranks) / name.replace(" ", "-").replace(",", ""),
        RUNS[ranks][name][0],
    )
    export(run, tmp_path / "adapter", "--adapter")
    export(run, tmp_path / "merged")
    base = bases[type_of(name)]
    kept = kept_as(dtype, base, tmp_path / "kept")
    ids, wanted = logits[0], logits[1][dtype, type_of(name)]
    model = AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        assert near(adapted(input_ids=ids).logits, wanted)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert near(merged(input_ids=ids).logits, wanted)
    export(run, tmp_path / "half", "--dtype", "bfloat16")  # rounded once
    for key, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert load_file(tmp_path / "half/model.safetensors")[key].equal(tensor.bfloat16()), key
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], {*settings["target_modules"]}) == (
        4,
        6,
        {*PROJECTIONS},
    )
    assert settings["base_model_name_or_path"] == str(base)


def test_an_exported_adapter_is_a_start(trained, base, adapter, corpus, prepared, tmp_path):
    """What is read again is what was written; and its first loss that of PEFT's, as above for PEFT's own folder."""
    export(trained[1] / "1/alone", tmp_path / "adapter", "--adapter")
    cfg = make_config(**run_of(base, corpus, prepared, tmp_path / "adapter"))
    assert (cfg.lora.rank, cfg.lora.scale, cfg.lora.alpha) == (4, 1.5, 6)
    weights, model = weights_to_read(cfg, 0), meta_model(cfg.model, cfg.lora)
    materialize(model, 0, torch.device("cpu"), weights.read_into)
    written = stored(trained[1] / "1/alone", 10)
    for name, p in named_parameters(model):
        assert ".lora_" not in name or p.detach().equal(written[f"model.{name}"]), name


def test_an_adapter_s_settings_are_peft_s_own():
    """Each that PEFT has: it refuses others."""
    lora = config.Lora(rank=3, alpha=7.5, targets=("q_proj", "down_proj"))
    theirs = LoraConfig(
        r=3,
        lora_alpha=7.5,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path="/models/base",
        inference_mode=True,
    )
    ours = LoraConfig(**hf_config.render_adapter(lora, "/models/base"))
    assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_what_has_no_adapter_is_merged_as_the_base_is_kept(base, dtype):
    """W as it is rounded in training, and where there is an adapter alpha / rank B A, in float64."""
    lora = {"rank": 3, "alpha": 7.5, "targets": ["q_proj", "down_proj"], "base_dtype": dtype}
    cfg = make_config(**{**case(base, "", ""), "lora": lora})
    generator = torch.Generator().manual_seed(0)
    names = set()
    for path, module in meta_model(cfg.model, cfg.lora).named_modules():
        name = path.rpartition(".")[2]
        if "weight" not in dict(module.named_parameters(recurse=False)) or "lora" in name:
            continue
        is_projection = name in PROJECTIONS
        shape = (module.out_features, module.in_features) if is_projection else module.weight.shape
        weight = torch.randn(shape, generator=generator)
        rounded = weight
        if dtype == "nf4" and is_projection:
            rounded = nf4.dequantize(nf4.codes_of(weight), nf4.scales_of(weight), torch.float32)
        elif dtype != "float32":
            rounded = weight.bfloat16().float()
        expected = rounded.double()
        matrices = {}
        if name in ("q_proj", "down_proj"):
            matrices["lora_a"] = torch.randn(3, shape[1], generator=generator)
            matrices["lora_b"] = torch.randn(shape[0], 3, generator=generator)
            expected += 7.5 / 3 * matrices["lora_b"].double() @ matrices["lora_a"].double()
        found = merged(module, weight, matrices.pop)
        assert found.dtype == torch.float32 and not matrices, path
        assert near(found.double(), expected), path
        names.add(name)
    assert {*PROJECTIONS, "embedding", "head", "norm"} <= names


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_adapters_over_tied_embeddings_are_those_of_peft(corpus, prepared, tmp_path, kind):
    """As Llama 3.2's and Qwen3's small models have them: loss and the gradient of every adapter."""
    torch.manual_seed(0)
    settings = kind(
        **WIDTHS, initializer_range=0.1, max_position_embeddings=64, tie_word_embeddings=True
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "base")
    theirs = peft_of(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "peft")
    cfg = make_config(**run_of(tmp_path / "base", corpus, prepared, tmp_path / "peft"))
    assert cfg.model.tie_embeddings
    model = meta_model(cfg.model, cfg.lora)
    materialize(model, 0, torch.device("cpu"), weights_to_read(cfg, 0).read_into)
    ids = torch.randint(320, (2, 17))
    ours = model(ids[:, :-1], ids[:, 1:])[0]["loss"]
    wanted = F.cross_entropy(
        theirs(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
    ours.backward()
    wanted.backward()
    gradients = {
        name.replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    found = {hf_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert near(ours, wanted) and found.keys() == gradients.keys()
    assert all(near(found[name], gradients[name]) for name in found)


@pytest.mark.parametrize(
    "targets, names",
    [
        ("all-linear", PROJECTIONS),
        (r".*\.self_attn\.(q|v)_proj", ["q_proj", "v_proj"]),
        (["self_attn.k_proj", "down_proj"], ["k_proj", "down_proj"]),
        (
            [f"model.layers.{block}.mlp.{name}" for block in range(2) for name in PROJECTIONS[4:]],
            PROJECTIONS[4:],
        ),
    ],
    ids=["all-linear", "an expression", "ends of paths", "full paths"],
)
def test_targets_are_read_as_peft_reads_them(base, corpus, prepared, tmp_path, targets, names):
    """PEFT's model of a folder, and ours, compute the same."""
    theirs = peft_of(base, target_modules=targets)
    theirs.save_pretrained(tmp_path / "peft")
    # PEFT saves a list of names for "all-linear"; other programs save the word
    path = tmp_path / "peft/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": targets}))
    cfg = make_config(**run_of(base, corpus, prepared, tmp_path / "peft"))
    assert cfg.lora.targets == tuple(names)
    model = meta_model(cfg.model, cfg.lora)
    materialize(model, 0, torch.device("cpu"), weights_to_read(cfg, 0).read_into)
    ids = torch.randint(320, (2, 17))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft")
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits
        assert near(model(ids), wanted) and near(again(input_ids=ids).logits, wanted)


def test_all_linear_names_all_seven(base, adapter, corpus, prepared, tmp_path):
    all_linear = {"lora": {"targets": "all-linear"}}
    cfg = make_config(**run_of(base, corpus, prepared, **all_linear))
    assert cfg == make_config(**run_of(base, corpus, prepared))
    assert cfg.lora.targets == config.PROJECTIONS
    assert make_config(**run_of(base, corpus, prepared, adapter, **all_linear)).lora.rank == 4
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(cfg))
    assert config.load(str(path), ["--lora.targets=all-linear"]).lora == cfg.lora


def test_new_adapters_change_nothing_at_first(base):
    """B is zero and A is not, as the paper says; both are float32, and the base is kept as asked, not upcast."""
    cfg = make_config(**case(base, "", "bfloat16"))
    model = meta_model(cfg.model, cfg.lora)
    materialize(model, 3, torch.device("cpu"), weights_to_read(cfg, 0).read_into)
    scaled = []  # A, as its std is that of PEFT's kaiming_uniform_(a=sqrt(5))
    for name, p in model.named_parameters():
        assert p.requires_grad == (".lora_" in name)
        assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16), name
        if ".lora_a." in name:
            scaled.append((p.detach() * (3 * p.shape[1]) ** 0.5).flatten())
        if ".lora_b." in name:
            assert not p.any()
    values = torch.cat(scaled)
    assert values.std() == pytest.approx(1, rel=0.05) and values.mean().abs() < 0.05


def test_the_tools_use_a_run_with_adapters(trained, base, tmp_path, capsys):
    import generate

    run = trained[1] / "4/four-nf4"
    assert (
        generate.main([str(run), "--prompt", "the cat", "--tokens", "3", "--temperature", "0"]) == 0
    )
    text = capsys.readouterr().out
    moved = shutil.copytree(base, tmp_path / "moved")
    assert (
        generate.main(
            [
                str(run),
                "--prompt",
                "the cat",
                "--tokens",
                "3",
                "--temperature",
                "0",
                "--base",
                str(moved),
            ]
        )
        == 0
        and capsys.readouterr().out == text
    )
    tensors = load_file(moved / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] += 1e-4
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    for main, words in (
        (generate.main, [run, "--prompt", "the cat"]),
        (hf.main, ["export", run, tmp_path / "out"]),
    ):
        assert run_tool(main, *words, "--base", moved) == 2
        assert "was trained on a base with" in capsys.readouterr().err
    theirs = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**theirs, "rms_norm_eps": 0.01}))
    assert run_tool(hf.main, "export", run, tmp_path / "out", "--base", moved) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith(f"--base {moved}: is another model than {base}") and told.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()
    whole = tmp_path / "whole"
    assert hf.main(["import", str(base), str(whole)]) == 0
    capsys.readouterr()
    for words, message in (
        (["--base", str(base)], "has no [lora]"),
        (["--adapter"], "has no [lora]; export it whole"),
    ):
        assert run_tool(hf.main, "export", whole, tmp_path / "out", *words) == 2
        assert message in capsys.readouterr().err


def test_a_merged_export_takes_from_its_base_what_users_need_besides_weights(
    trained, base, prepared, tmp_path
):
    run, origin = trained[1] / "1/alone", shutil.copytree(base, tmp_path / "origin")
    theirs = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**theirs, "max_position_embeddings": 4096}))
    (origin / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    (origin / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ older }}", "tokenizer_class": "Its"}'
    )
    ours = (prepared / "tokenizer.model").read_bytes()
    for out, tokenizer, has_file in (
        ("other", b"another", True),
        ("same", ours, True),
        ("inline", ours, False),
    ):
        kept = tokenizer == ours
        (origin / "tokenizer.model").write_bytes(tokenizer)
        if not has_file:
            (origin / "chat_template.jinja").unlink()
        export(run, tmp_path / out, "--base", str(origin))
        written = json.loads((tmp_path / out / "config.json").read_text())
        assert written["max_position_embeddings"] == 4096
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((tmp_path / out / name).read_text())
            assert settings["eos_token_id"] == ([2, 7] if kept else 2)
        # one template, and that which transformers prefers
        assert (tmp_path / out / "chat_template.jinja").exists() == (kept and has_file)
        settings = json.loads((tmp_path / out / "tokenizer_config.json").read_text())
        assert settings.get("chat_template") == (None if has_file else "{{ older }}")
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert (tmp_path / out / "tokenizer.model").read_bytes() == ours
    # transformers takes them from config.json where there are no generation settings
    (origin / "generation_config.json").unlink()
    # trained on longer sequences than the base's
    length = config.load(str(run / "config.toml")).train.seq_len
    older = {**theirs, "eos_token_id": [9, 2], "max_position_embeddings": length - 1}
    (origin / "config.json").write_text(json.dumps(older))
    export(run, tmp_path / "older", "--base", str(origin))
    written = json.loads((tmp_path / "older/config.json").read_text())
    assert written["max_position_embeddings"] == length
    settings = json.loads((tmp_path / "older/generation_config.json").read_text())
    assert settings["eos_token_id"] == [9, 2]


def test_evaluating_reads_the_base_and_another_is_refused(trained, expected, base, tmp_path):
    run = shutil.copytree(trained[1] / "2/two", tmp_path / "outputs/two")
    words = [run / "config.toml", f"--run.output_dir={tmp_path / 'outputs'}"]
    done = launch(*words, "--eval-only", nproc=2)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["step"] == 10 and row["loss"] < expected["float32", "llama"][0][0]["loss"]

    tensors = load_file(shutil.copytree(base, tmp_path / "other") / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    before = content(run)
    done = launch(*words, "--train.steps=11", f"--model.init_from={tmp_path / 'other'}")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert (
        done.stderr.count("its weights have the hash") == 1
        and "name the folder with that base" in done.stderr
    )
    done = launch(*words, "--eval-only", f"--model.init_from={tmp_path / 'other'}")
    assert (
        done.returncode == 2 and "its weights have the hash" in done.stderr and not done.stdout
    ), done.stderr
    assert content(run) == before


def test_one_spelling_of_the_same_adapters(base, corpus, prepared, monkeypatch):
    """Of targets in another order, of alpha as it is by default, of folders from where the run was started."""
    monkeypatch.chdir(base.parent)
    found = [
        make_config(**run_of(path, corpus, prepared, lora=lora)).lora
        for path, lora in (
            (base, {"targets": ["v_proj", "q_proj"]}),
            ("hf", {"targets": ["q_proj", "v_proj"], "alpha": 8}),
        )
    ]
    assert found[0] == found[1] and found[0].alpha == 8 and found[0].targets == ("q_proj", "v_proj")
    assert make_config(**run_of("hf", corpus, prepared)).model.init_from == str(base)


def test_a_base_that_is_gone_or_is_not_numbers_is_named(base, corpus, prepared, tmp_path):
    cfg = make_config(
        **run_of(
            shutil.copytree(base, tmp_path / "hf"), corpus, prepared, lora={"base_dtype": "nf4"}
        )
    )
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match="blocks.1.feed_forward.up_proj.weight: holds values that are not finite"
    ):
        materialize(
            meta_model(cfg.model, cfg.lora),
            0,
            torch.device("cpu"),
            weights_to_read(cfg, 0).read_into,
        )
    shutil.rmtree(tmp_path / "hf")
    with pytest.raises(
        ConfigError,
        match=r"\[model\] init_from = .*hf.: is not there, and the adapters need.*--base",
    ):
        weights_to_read(cfg, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"lora": {"rank": 65}},
            "rank = 65: must not exceed the smallest side of its matrices, 64",
        ),
        (
            {"lora": {"targets": ["query"]}},
            r"targets = \[\"query\"\]: must name projections: q_proj",
        ),
        ({"lora": {"targets": []}}, r"targets = \[\]: must name projections"),
        (
            {
                "model": {
                    "init_from": None,
                    "dim": 64,
                    "n_layers": 1,
                    "n_heads": 4,
                    "n_kv_heads": 2,
                    "ffn_dim": 128,
                }
            },
            "rank = 4: adapters need a base",
        ),
        (
            {"lora": {"base_dtype": "nf4"}, "parallel": {"tp": 4}},
            r"nf4.*n_heads x head_dim over tp = 32",
        ),
        ({"lora": {"base_dtype": "int8"}}, "base_dtype"),
    ],
)
def test_wrong_settings_are_refused(base, corpus, prepared, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**run_of(base, corpus, prepared, **changes))


def test_a_row_that_64_does_not_divide_is_refused(corpus, prepared, tmp_path):
    """By its name, of a folder whose feed-forward is 96 wide."""
    LlamaForCausalLM(LlamaConfig(**{**WIDTHS, "intermediate_size": 96})).save_pretrained(
        tmp_path / "hf"
    )
    with pytest.raises(ConfigError, match='base_dtype = "nf4": .* ffn_dim over tp = 96'):
        make_config(**run_of(tmp_path / "hf", corpus, prepared, lora={"base_dtype": "nf4"}))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"r": 5},
            "k_proj.lora_A.weight is F32 .4, 64.; must be F32 or BF16 or F16 of shape .5, 64.",
        ),
        ({"use_dora": True}, "use_dora = true: only false can be read"),
        (
            {"target_modules": ["q_proj", 3]},
            r'target_modules = \["q_proj", 3\]: must be a list of modules, an expression, or "all',
        ),
        ({"target_modules": "("}, r'target_modules = "\(": is no regular expression: missing \)'),
        (
            {"target_modules": "all_linear"},
            'target_modules = "all_linear": selects none of q_proj, k_proj,',
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "selects lm_head; only projections have adapters",
        ),
        (
            {"target_modules": [f"model.layers.1.{name}" for name in ("self_attn.q_proj",)]},
            "must select the same projections in every block",
        ),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa": only true can be read'),
        (
            {"target_modules": ["q_proj"]},
            "has base_model.model.model.layers.0.mlp.down_proj.lora_A.weight, which",
        ),
        ({"peft_type": "IA3"}, 'peft_type = "IA3": only "LORA" can be read'),
    ],
)
def test_another_adapter_is_refused(base, adapter, corpus, prepared, tmp_path, change, message):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(ConfigError, match=message):
        weights_to_read(make_config(**run_of(base, corpus, prepared, folder)), 0)
    with pytest.raises(
        ConfigError, match="rank = 8: .*adapter_config.json has r = 4; leave it out"
    ):
        make_config(**run_of(base, corpus, prepared, adapter, lora={"rank": 8}))
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "r": "four"}))
    with pytest.raises(
        ConfigError,
        match='(?s)alpha = 5.0: .*has lora_alpha = 6.0; leave it out.*r = "four": must be',
    ):
        make_config(**run_of(base, corpus, prepared, folder, lora={"alpha": 5}))
    # as a run's own config.toml, which may go on without it
    complete = {"rank": 4, "alpha": 5, "targets": PROJECTIONS}
    with pytest.raises(ConfigError, match="alpha = 5: .*has lora_alpha = 6; leave it out"):
        weights_to_read(make_config(**run_of(base, corpus, prepared, adapter, lora=complete)), 0)
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 4, "target_modules": [*PROJECTIONS]})
    )
    with pytest.raises(ConfigError, match="alpha = 5: .*has lora_alpha = None; leave it out"):
        weights_to_read(make_config(**run_of(base, corpus, prepared, folder, lora=complete)), 0)
    assert not any(
        ".lora_" in name
        for name in weights_to_read(
            make_config(**run_of(base, corpus, prepared, tmp_path / "gone", lora=complete)), 1
        ).stored
    )


def test_a_pickled_adapter_is_named(base, adapter, corpus, prepared, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="is not there; adapter_model.bin: pickled files can run"):
        weights_to_read(make_config(**run_of(base, corpus, prepared, folder)), 0)


def test_changed_adapters_are_another_run(trained, base, adapter, corpus, prepared, tmp_path):
    cfg = make_config(
        **run_of(
            base,
            corpus,
            prepared,
            lora={"rank": 4, "alpha": 6, "targets": ["q_proj"]},
            run={"name": "alone", "output_dir": str(trained[1] / "1")},
        )
    )
    for guarded in compare.GUARDED, compare.SAME_OUTPUTS:
        with pytest.raises(ConfigError, match="lora.targets = .*was trained with"):
            compare.check_same_run(cfg, 10, guarded)
        with pytest.raises(
            ConfigError, match=r"\[lora\] is off: .* was trained with adapters; continue so"
        ):
            compare.check_same_run(dataclasses.replace(cfg, lora=None), 10, guarded)
    moved = dataclasses.replace(
        cfg,
        lora=dataclasses.replace(cfg.lora, targets=config.PROJECTIONS),
        model=dataclasses.replace(cfg.model, init_from="elsewhere"),
    )
    compare.check_same_run(moved, 10)


def test_what_a_compiled_block_keeps_does_not_hang_on_how_its_base_is_kept(base):
    """Of a base in 4 bits the codes, not the weights made of them; with adapters no more than without, but A x."""
    from benchmarks import counted_step

    m, kept = make_config(**case(base, "", "")).model, {}
    m = dataclasses.replace(m, dim=256, ffn_dim=704)
    for dtype, setting in itertools.product((None, "nf4"), ("none", "elementwise")):
        lora = config.Lora(rank=2, base_dtype=dtype) if dtype else None
        with mock.patch.object(counted_step, "Llama", lambda m, lora=lora: build_fake(m, lora)):
            forward, _ = counted_step.block_graphs(m, 128, setting, False)
        kept[dtype, setting] = counted_step.kept_bytes(forward, (1, 128, 256)) // 128
    for setting in ("none", "elementwise"):
        assert kept["nf4", setting] <= kept[None, setting] + 7 * 2 * 2, kept


def build_fake(m: config.Model, lora: config.Lora | None):
    with mock.patch.object(torch.nn.Module, "to", lambda module, dtype: module):
        # fakes are in bfloat16 already
        return build_model(m, lora)


def test_what_peft_would_compute_otherwise_is_refused(base, adapter, corpus, prepared, tmp_path):
    changes = {
        "bias": "all",
        "use_dora": True,
        "use_rslora": True,
        "fan_in_fan_out": True,
        "lora_bias": True,
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 2},
        "layers_to_transform": [0],
        "alora_invocation_tokens": [1],
        "use_qalora": True,
        "exclude_modules": ["x"],
        "layer_replication": [[0, 1]],
        "trainable_token_indices": [1],
        "target_parameters": ["x"],
        "use_bdlora": {"nblocks": 2},
        "arrow_config": {"top_k": 2},
        "kasa_config": {"beta": 0.1},
        "monteclora_config": {"num_samples": 2},
    }
    variants = {f.name for f in dataclasses.fields(LoraConfig) if f.metadata.get("is_lora_variant")}
    # that one only saves memory in backward
    assert variants - {"velora_config"} <= changes.keys()
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert changes.keys() <= settings.keys()  # as PEFT writes it
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ConfigError) as refused:
        make_config(**run_of(base, corpus, prepared, folder))
    for key, value in changes.items():
        assert f"{key} = {json.dumps(value)}: only " in str(refused.value)
