"""Adapters against PEFT on transformers' model: training on any mesh, exports, what is read and refused."""

import dataclasses
import itertools
import json
import pathlib
import shutil

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import config
from checkpoint import catalog, compare
from checkpoint.load import Reader, restore
from extras.huggingface.weights import fingerprint, hf_name, weighted_sum, weights_to_read
from extras.lora import nf4
from extras.lora.adapters import merged
from model.build import meta_model
from model.llama import Llama, flops_per_token, named_parameters, parameter_count
from optim import learning_rate
from parallel.materialize import ReadShard, materialize
from tests.conftest import TINY, is_near, mesh_for, refuses, token_ids, train_run
from tests.distributed import distributed, run_on_ranks
from tests.extras.lora.conftest import PROJECTIONS, lora_config, peft_of
from tests.reference import Trained, batches, trainer_steps

RUNS = {  # by the number of ranks: model_type, how the base is stored, [parallel]
    1: [("llama", "float32", {})],
    2: [
        ("llama", "float32", {"cp": 2, "recompute": "full"}),
        ("llama", "bfloat16", {"recompute": "selective", "reshard_after_forward": False}),
        ("llama", "nf4", {"replicated": ["embedding.weight", "blocks.0.*_proj.weight"]}),
    ],
    4: [
        ("llama", "float32", {"dp_replicate": 2, "tp": 2}),
        ("qwen3", "nf4", {"tp": 2, "recompute": "selective", "sync_every_micro_batch": False}),
    ],
}


def stored_as(dtype: str, base: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy of the base, its weights rounded as this dtype stores them."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        if dtype == "nf4" and "_proj" in name:
            codes, scales = nf4.codes_of(weight), nf4.scales_of(weight)
            tensors[name] = nf4.dequantize(codes, scales, torch.float32)
        elif dtype != "float32":
            tensors[name] = weight.bfloat16().float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reader_of(cfg: config.Config) -> ReadShard:
    weights = weights_to_read(cfg, 0)
    assert weights
    return weights.read_into


def read_model(cfg: config.Config) -> Llama:
    model = meta_model(cfg.model, cfg.lora)
    materialize(model, 0, torch.device("cpu"), reader_of(cfg))
    return model


def adapters_of(model: PeftModel, cfg: config.Config) -> dict[str, torch.Tensor]:
    """PEFT's trained parameters by our names."""
    ours = {hf_name(name): name for name, _ in named_parameters(meta_model(cfg.model, cfg.lora))}
    trained = [
        (n.replace(".default", ""), p) for n, p in model.named_parameters() if p.requires_grad
    ]
    return {ours[name]: parameter for name, parameter in trained}


def peft_loop(cfg: config.Config, model: PeftModel) -> Trained:
    """The run as PEFT's users write it."""
    o = cfg.optim
    adapters = adapters_of(model, cfg)
    optimizer = torch.optim.AdamW(
        adapters.values(), betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
    )
    losses, norms = [], []
    for step, (inputs, targets) in enumerate(batches(cfg), 1):
        logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        limit = float(cfg.train.max_grad_norm)
        norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), limit).item())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, cfg.train.steps, step)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: p.detach() for name, p in adapters.items()})


@pytest.fixture(scope="module")
def expected(bases, base, adapter, tmp_path_factory) -> dict[tuple[str, str], Trained]:
    """By model_type and dtype: PEFT's run over weights that are rounded so."""
    cfg = lora_config(base, adapter)
    folder = tmp_path_factory.mktemp("stored")
    runs = {}
    for kind, dtype, _ in itertools.chain(*RUNS.values()):
        if (kind, dtype) not in runs:
            rounded = stored_as(dtype, bases[kind], folder / f"{kind}-{dtype}")
            runs[kind, dtype] = peft_loop(cfg, peft_of(rounded))
    return runs


@pytest.mark.parametrize("ranks", RUNS)
@distributed()
def test_training_is_that_of_peft(world, ranks, bases, adapter, expected):
    for kind, dtype, parallel in RUNS[ranks]:
        cfg = lora_config(bases[kind], adapter, lora={"base_dtype": dtype}, parallel=parallel)
        ours = trainer_steps(cfg, mesh_for(cfg, world), reader_of(cfg))
        theirs = expected[kind, dtype]
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5), parallel
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-5), parallel
        assert len(theirs.weights) == 2 * 7 * 2
        for name, weight in theirs.weights.items():
            assert is_near(ours.weights[name], weight), (parallel, name)


# A run


def test_checkpoint_stores_the_adapters_alone(run):
    names = Reader(run[1]).metadata.state_dict_metadata
    assert len([name for name in names if name.startswith("model.")]) == 2 * 7 * 2
    assert all(".lora_" in name for name in names)


def test_exports_compute_what_the_run_does(run, base, tmp_path):
    huggingface = pytest.importorskip("tools.huggingface")
    cfg, folder = run
    ids = token_ids(2, 40)
    ours = read_model(cfg).float()  # of NF4, what is not quantized
    restore(folder, ours, None)
    exports = {"adapter": ["--adapter"], "merged": [], "half": ["--dtype", "bfloat16"]}
    for name, options in exports.items():
        assert huggingface.main(["export", str(folder), str(tmp_path / name), *options]) == 0
    rounded = stored_as("nf4", base, tmp_path / "rounded")
    model = AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        wanted = ours(ids)
        assert not is_near(model(input_ids=ids).logits, wanted, 1e-3)
        theirs = PeftModel.from_pretrained(model, tmp_path / "adapter")
        assert is_near(theirs(input_ids=ids).logits, wanted)
        assert is_near(merged(input_ids=ids).logits, wanted)
    halves = load_file(tmp_path / "half/model.safetensors")
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert halves[name].equal(tensor.bfloat16()), name  # rounded once
    again = lora_config(base, tmp_path / "adapter")
    assert again.lora
    assert (again.lora.rank, again.lora.alpha, again.lora.scale) == (4, 6, 1.5)
    written = dict(named_parameters(ours))
    for name, parameter in named_parameters(read_model(again)):
        assert ".lora_" not in name or parameter.equal(written[name]), name


def test_run_resumes_from_a_moved_base_and_from_no_other(run, tmp_path):
    cfg, folder = run
    moved = shutil.copytree(cfg.model.init_from, tmp_path / "moved")
    shutil.copytree(config.run_folder(cfg.run), tmp_path / "r")
    copied = dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, init_from=str(moved)),
        train=dataclasses.replace(cfg.train, steps=5),
        run=dataclasses.replace(cfg.run, output_dir=str(tmp_path)),
    )
    (rows,) = run_on_ranks(1, lambda world: train_run(copied, world))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    base = catalog.read_state(folder)["base"]
    assert catalog.read_state(tmp_path / "r/checkpoints/step-00000005")["base"] == base
    with refuses("its weights have the hash other", f"was trained on a base with {base}"):
        compare.check_base(folder, "elsewhere", "other")


def test_other_adapters_are_another_run(run):
    cfg, folder = run
    fewer = dataclasses.replace(cfg.lora, targets=("q_proj",))
    for lora, words in (fewer, "lora.targets = "), (None, "lora.rank = absent"):
        for evaluating in False, True:
            with refuses(words, "was trained with"):
                compare.check_same_run(dataclasses.replace(cfg, lora=lora), folder, evaluating)
    moved = dataclasses.replace(cfg.model, init_from="elsewhere")
    compare.check_same_run(dataclasses.replace(cfg, model=moved), folder)


# Weights


def test_fingerprint_is_of_the_values_of_a_base():
    """Whatever rectangles they are read in; of another value, place or name it is another."""
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

    def share(of: torch.Tensor, rows=(0, 6), columns=(0, 8), name: str = "a") -> dict:
        offset = rows[0], columns[0]
        part = of[slice(*rows), slice(*columns)]
        return {(name, *offset): weighted_sum(name, offset, [6, 8], part)}

    above = share(values, (0, 5))
    below = [share(values, (5, 6), columns) for columns in ((0, 3), (3, 8))]
    assert fingerprint([share(values)]) == fingerprint([above, *below, above, {}])
    others = [values.flip(0), values.flip(1), -values, values + torch.eye(6, 8) * 1e-6]
    for columns in itertools.combinations(range(8), 2):
        others.append(values.clone())
        others[-1][2, columns] *= torch.tensor([2.0, 0.5])
    found = {fingerprint([share(other)]) for other in [values, *others]}
    found.add(fingerprint([share(values, name="b")]))
    assert len(found) == len(others) + 2


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_merged_weight_is_the_rounded_base_plus_the_adapter(base, dtype):
    lora = {"rank": 3, "alpha": 7.5, "targets": ["q_proj", "down_proj"], "base_dtype": dtype}
    cfg = lora_config(base, lora=lora)
    block = meta_model(cfg.model, cfg.lora).blocks[0]
    for module, has_adapter in (block.attention.q_proj, True), (block.attention.k_proj, False):
        weight = torch.randn(module.out_features, module.in_features)
        rounded = weight if dtype == "float32" else weight.bfloat16().float()
        if dtype == "nf4":
            rounded = nf4.dequantize(nf4.codes_of(weight), nf4.scales_of(weight), torch.float32)
        a, b = torch.randn(3, module.in_features), torch.randn(module.out_features, 3)
        wanted = rounded.double() + has_adapter * 7.5 / 3 * (b.double() @ a.double())
        assert is_near(merged(module, weight, {"lora_a": a, "lora_b": b}.__getitem__), wanted)


@pytest.mark.quick
def test_new_adapters_change_nothing_at_first(base):
    """B is zero, A is not, with the std of PEFT's kaiming_uniform_(a=sqrt(5)); the base is stored as asked."""
    cfg = lora_config(base, lora={"base_dtype": "bfloat16"})
    scaled = []
    for name, p in read_model(cfg).named_parameters():
        assert p.requires_grad == (".lora_" in name)
        assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16), name
        if ".lora_a." in name:
            scaled.append((p.detach() * (3 * p.shape[1]) ** 0.5).flatten())
        assert ".lora_b." not in name or not p.any()
    assert torch.cat(scaled).std() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "nf4"])
def test_weights_and_flops_are_counted_however_they_are_stored(base, dtype):
    """A frozen matrix has two matmuls, an adapter's three, but for what reads the first input: its
    gradient is that of nothing trained."""
    cfg = lora_config(base, lora={"rank": 3, "base_dtype": dtype})
    model, plain = meta_model(cfg.model, cfg.lora), meta_model(cfg.model)
    sides = 2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 128)  # q and o, k and v, the feed-forward
    adapters = 2 * 3 * sides
    assert parameter_count(model) == parameter_count(plain) + adapters
    matrices = parameter_count(plain) - 320 * 64 - 5 * 64  # without embedding and norms
    first_input = 2 * 64 * (128 + 3)  # q_proj, and A of its adapter
    trained = 4 * matrices + 6 * adapters - first_input
    assert flops_per_token(model, 32) == trained + 6 * 2 * 4 * 32 * 32


# What is read, and what is refused


@pytest.mark.quick
@pytest.mark.parametrize(
    "targets, names",
    [("all-linear", PROJECTIONS), (r".*\.self_attn\.(q|v)_proj", ["q_proj", "v_proj"])],
    ids=str,
)
def test_targets_are_read_as_peft_reads_them(base, tmp_path, targets, names):
    theirs = peft_of(base, target_modules=targets)
    theirs.save_pretrained(tmp_path / "peft")
    change_json(tmp_path / "peft/adapter_config.json", target_modules=targets)
    cfg = lora_config(base, tmp_path / "peft")
    assert cfg.lora and cfg.lora.targets == tuple(names)
    ids = token_ids(2, 17)
    with torch.no_grad():
        assert is_near(read_model(cfg)(ids), theirs(input_ids=ids).logits)


def change_json(path: pathlib.Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"lora": {"targets": ["query"]}}, "must name projections: q_proj"),
        ({"lora": {"base_dtype": "nf4"}, "parallel": {"tp": 4}}, "n_heads x head_dim over tp = 32"),
        ({"model": {**TINY["model"], "init_from": None}}, "adapters need a base"),
        ({"lora": {"rank": 8}}, "has r = 4.*leave it out"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(base, adapter, sections, words):
    given = adapter if "leave it out" in words else None
    with refuses(words):
        weights_to_read(lora_config(base, given, **sections), 0)


VARIANTS = json.loads(  # settings of PEFT that compute something else
    """{"bias": "all", "use_dora": true, "use_rslora": true, "fan_in_fan_out": true, "lora_bias": true,
    "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "layers_to_transform": [0], "alora_invocation_tokens": [1], "use_qalora": true,
    "exclude_modules": ["x"], "layer_replication": [[0, 1]], "trainable_token_indices": [1],
    "target_parameters": ["x"], "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1}, "monteclora_config": {"num_samples": 2}}"""
)


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"r": 5}, [r"lora_A.weight is F32 .4, 64.; must be .* of shape .5, 64."]),
        ({"target_modules": "all_linear"}, ["selects none of q_proj"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["selects lm_head; only projections"]),
        ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, ["same projections in every"]),
        ({"target_modules": ["q_proj"]}, ["has base_model.*down_proj.lora_A.weight, which"]),
        ({"init_lora_weights": "pissa"}, ['init_lora_weights = "pissa": only true']),
        ({"peft_type": "IA3"}, ['peft_type = "IA3": only "LORA" can be read']),
        ({"a_later_option": True}, ["a_later_option = true: is not read here"]),
        (VARIANTS, [f"{name} = .*: (only|is not read)" for name in sorted(VARIANTS)]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_another_adapter_is_refused(base, adapter, tmp_path, changes, words):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    change_json(folder / "adapter_config.json", **changes)
    for word in words:
        with refuses(word):
            weights_to_read(lora_config(base, folder), 0)


@pytest.mark.quick
def test_a_base_that_is_not_finite_is_refused(base, tmp_path):
    broken = shutil.copytree(base, tmp_path / "base")
    cfg = lora_config(broken, lora={"base_dtype": "nf4"})
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with refuses("blocks.1.feed_forward.up_proj.weight: holds values that are not finite"):
        read_model(cfg)
