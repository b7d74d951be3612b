"""The model against transformers' Llama and Qwen3 with the same weights."""

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

import config
from model.build import build_model, meta_model
from model.llama import Llama, RMSNorm, flops_per_token, named_parameters, parameter_count
from parallel.replicated import replicated_parameters
from tests.conftest import is_near, make_config, refuses, shipped_configs, token_ids
from tests.reference import fresh_model

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 32}


def transformers_config(m: config.Model) -> LlamaConfig | Qwen3Config:
    rope: dict[str, Any] = {"rope_theta": m.rope_theta, "rope_type": "default"}
    if m.rope_scaling:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(m.rope_scaling)}
    return (Qwen3Config if m.qk_norm else LlamaConfig)(
        vocab_size=m.vocab_size,
        hidden_size=m.dim,
        intermediate_size=m.ffn_dim,
        num_hidden_layers=m.n_layers,
        num_attention_heads=m.n_heads,
        num_key_value_heads=m.n_kv_heads,
        head_dim=m.width_per_head,
        rms_norm_eps=m.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=m.tie_embeddings,
        max_position_embeddings=256,
    )


def reference(m: config.Model) -> PreTrainedModel:
    """Theirs, at random."""
    theirs = AutoModelForCausalLM.from_config(transformers_config(m), attn_implementation="eager")
    for weight in theirs.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.2)  # tells one norm from another
    return theirs


THEIR_NAMES = {
    "head.weight": "lm_head.weight",
    "embedding.": "model.embed_tokens.",
    "head.norm.": "model.norm.",
    "blocks.": "model.layers.",
    "attention_norm.": "input_layernorm.",
    "attention.": "self_attn.",
    "feed_forward_norm.": "post_attention_layernorm.",
    "feed_forward.": "mlp.",
}


def name_in_transformers(name: str) -> str:
    """Their name of one of our parameters."""
    for ours, theirs in THEIR_NAMES.items():
        name = re.sub(rf"(^|\.){re.escape(ours)}", rf"\1{theirs}", name)
    return name


def with_weights_of(theirs: PreTrainedModel, m: config.Model) -> Llama:
    state = theirs.state_dict()
    ours = Llama(m)
    ours.load_state_dict({name: state[name_in_transformers(name)] for name in ours.state_dict()})
    return ours


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True},
        {"rope_scaling": SCALING, "tie_embeddings": True, "head_dim": 32, "rope_theta": 10000.0},
        {"qk_norm": True, "head_dim": 20},
        {"qk_norm": True, "n_kv_heads": 1, "tie_embeddings": True, "norm_eps": 1e-2},
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_and_loss_equal_transformers(changes):
    torch.manual_seed(0)
    m = make_config(model=changes).model
    theirs = reference(m)
    ours = with_weights_of(theirs, m)
    tokens = token_ids(2, 128)
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    sums, count = ours(tokens[:, :-1], tokens[:, 1:])
    assert math.isclose(sums["loss"] / count, theirs(tokens, labels=tokens).loss, rel_tol=1e-5)


# Each model's config.json, written out once more: hidden_size, intermediate_size, num_hidden_layers, heads,
# key/value heads, head_dim, vocab_size, rope_theta, llama3's scaling factor, tied; and its parameters.
LLAMA_8B = (4096, 14336, 32, 32, 8, 128, 128256, 500000.0)
LLAMA_70B = (8192, 28672, 80, 64, 8, 128, 128256, 500000.0)
OF_8B = "llama8b llama8b-float8 llama8b-lora llama8b-qlora llama8b-h200"
PUBLISHED = {
    (*LLAMA_8B, None, False, 8_030_261_248): OF_8B,
    (*LLAMA_8B, 8.0, False, 8_030_261_248): "llama3.1-8b llama3.1-8b-128k llama3.1-8b-chat-lora",
    (*LLAMA_70B, None, False, 70_553_706_496): "llama70b llama70b-qlora",
    (*LLAMA_70B, 8.0, False, 70_553_706_496): "llama3.1-70b",
    (2048, 8192, 16, 32, 8, 64, 128256, 500000.0, 32.0, True, 1_235_814_400): "llama1b",
    (3072, 8192, 28, 24, 8, 128, 128256, 500000.0, 32.0, True, 3_212_749_824): "llama3b",
    (576, 1536, 30, 9, 3, 64, 49152, 100000.0, None, True, 134_515_008): "smollm2-135m",
    (2048, 5632, 22, 32, 4, 64, 32000, 10000.0, None, False, 1_100_048_384): "tinyllama-1.1b",
    (1024, 3072, 28, 16, 8, 128, 151936, 1e6, None, True, 596_049_920): "qwen3-0.6b-chat",
    (4096, 12288, 36, 32, 8, 128, 151936, 1e6, None, False, 8_190_735_360): "qwen3-8b-chat-qlora",
}


@pytest.mark.quick
@pytest.mark.parametrize("published", PUBLISHED, ids=PUBLISHED.values())
def test_shipped_models_are_the_published_ones(published):
    readable = {path.stem: path for path in shipped_configs()}
    for name in readable.keys() & PUBLISHED[published].split():
        m = config.load(str(readable[name])).model
        scaling = dataclasses.asdict(m.rope_scaling) if m.rope_scaling else None
        factor = scaling["factor"] if scaling else None
        sizes = (m.dim, m.ffn_dim, m.n_layers, m.n_heads, m.n_kv_heads, m.width_per_head)
        ours = (*sizes, m.vocab_size, m.rope_theta, factor, m.tie_embeddings)
        assert (*ours, parameter_count(meta_model(m))) == published
        assert m.norm_eps == (1e-6 if name.startswith("qwen3") else 1e-5)
        theirs = {**SCALING, "original_max_position_embeddings": 8192, "factor": factor}
        assert scaling in (None, theirs)


EMBEDDING = "embedding.weight"


@pytest.mark.quick
@pytest.mark.parametrize(
    "frozen",
    [
        [],
        [EMBEDDING, "blocks.[01].*"],
        [EMBEDDING, "blocks.*", "head.weight"],  # all but the head's norm
        # all but a projection
        [EMBEDDING, "*norm*", "*[qkven]_proj*", "blocks.0.*", "head.weight"],
        ["*q_proj*"],
        ["head.weight"],  # tied
    ],
    ids=str,
)
def test_flops_of_frozen_parameters_are_those_of_torch_s_counter(frozen):
    """Of matmuls; the attention of a block counts with three passes where any of it is in backward."""
    sections = {"n_layers": 3, "freeze": frozen, "tie_embeddings": frozen == ["head.weight"]}
    model = build_model(make_config(model={"head_dim": 20, **sections}).model)
    tokens = token_ids(1, 32)
    passes = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        passes.append(1 + 2 * q.requires_grad)
        return q + 0 * (k.sum() + v.sum())

    for block in model.blocks:
        block.attention.attend = attend
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)[0]["loss"].backward()
    attention = 2 * 32 * model.config.n_heads * model.config.width_per_head
    assert flops_per_token(model, 32) == counter.get_total_flops() / 32 + sum(passes) * attention


@pytest.mark.quick
@torch.no_grad()
def test_every_norm_has_its_statistics_in_float32():
    """Of bfloat16 inputs and weights: rounded once, by at most half of the last place."""
    model = fresh_model(make_config(model={"norm_eps": 1e-3})).bfloat16()
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            hook = lambda module, args, out, name=name: seen.update({name: (args[0], out)})  # noqa: E731
            module.register_forward_hook(hook)
    model(torch.arange(128)[None])
    assert len(seen) == 5
    for name, (x, out) in seen.items():
        weight = model.get_submodule(name).weight.double()
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
        assert out.dtype == torch.bfloat16
        assert ((out.double() - exact).abs() <= 2**-8 * 1.001 * exact.abs()).all(), name


def test_norm_has_the_dtype_of_its_weight():
    x = torch.randn(3, 512).bfloat16()
    norm = RMSNorm(512, 1e-5)
    torch.nn.init.ones_(norm.weight)
    assert norm(x).dtype == torch.float32
    assert is_near(norm(x), x / x.float().square().mean(-1, True).sqrt(), 1e-4)


@pytest.mark.parametrize(
    "freeze, words",
    [(["embedding*", "block.*"], r"'block.\*' matches none"), (["*"], "nothing is left to train")],
)
def test_freeze_must_match_some_and_not_all(freeze, words):
    with refuses(r"\[model\] freeze: ", words):
        meta_model(make_config(model={"freeze": freeze}).model)


@pytest.mark.quick
@pytest.mark.parametrize("pattern", ["embedding.weight", "head.weight", "*d.weight"])
def test_a_tied_matrix_is_matched_by_each_of_its_names(pattern):
    """Or refused, where units are named."""
    cfg = make_config(
        model={"tie_embeddings": True, "freeze": [pattern]}, parallel={"replicated": [pattern]}
    )
    model = meta_model(cfg.model)
    frozen = {name for name, p in named_parameters(model) if not p.requires_grad}
    assert frozen == {"embedding.weight"}
    assert replicated_parameters(model, cfg.parallel) == {model.head.weight}
    with refuses("keep_fp32", r"embedding\+head"):
        make_config(model={"tie_embeddings": True}, parallel={"keep_fp32": [pattern]})
