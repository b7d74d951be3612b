"""The model against transformers' Llama and Qwen3 with the same weights, and its counts against the published ones."""

import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

import config
from config import ConfigError
from model.build import meta_model
from model.llama import Llama, RMSNorm, flops_per_token, parameter_count, rope_tables
from parallel.materialize import materialize
from tests.conftest import REPO, make_config, shipped_configs

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config_of(m: config.Model, max_position_embeddings: int) -> LlamaConfig | Qwen3Config:
    rope = {"rope_theta": m.rope_theta, "rope_type": "default"}
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
        max_position_embeddings=max_position_embeddings,
    )


def reference(m: config.Model) -> LlamaForCausalLM:
    theirs = config_of(m, 256)
    theirs._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(theirs)
    for weight in (p for p in model.parameters() if p.ndim == 1):
        # which tell one norm from another
        torch.nn.init.normal_(weight, 1.0, 0.2)
    return model


def name_in_transformers(name: str) -> str:
    """Their name of one of our parameters."""
    if name == "head.weight":
        return "lm_head.weight"
    for ours, theirs in (
        ("embedding.", "embed_tokens."),
        ("head.norm.", "norm."),
        ("blocks.", "layers."),
        (".attention_norm.", ".input_layernorm."),
        (".attention.", ".self_attn."),
        (".feed_forward_norm.", ".post_attention_layernorm."),
        (".feed_forward.", ".mlp."),
    ):
        name = name.replace(ours, theirs)
    return f"model.{name}"


def with_weights_of(theirs: LlamaForCausalLM, m: config.Model) -> Llama:
    ours, state = Llama(m), theirs.state_dict()
    ours.load_state_dict({name: state[name_in_transformers(name)] for name in ours.state_dict()})
    return ours


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True},
        {"n_kv_heads": 4},
        {"n_kv_heads": 1},
        {"head_dim": 20},
        {"rope_scaling": SCALING},
        {"rope_scaling": SCALING, "tie_embeddings": True, "head_dim": 32, "rope_theta": 10000.0},
        {"qk_norm": True},
        {"qk_norm": True, "tie_embeddings": True, "n_kv_heads": 4},
        {"qk_norm": True, "head_dim": 20},
        {
            "qk_norm": True,
            "n_kv_heads": 1,
            "head_dim": 32,
            "tie_embeddings": True,
            "rope_theta": 1e6,
            "norm_eps": 1e-6,
        },
    ],
    ids=str,
)
def test_forward_equals_transformers(changes):
    torch.manual_seed(0)
    m = make_config(model=changes).model
    theirs = reference(m)
    ours = with_weights_of(theirs, m)
    tokens = torch.randint(0, m.vocab_size, (2, 128))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
        sums, count = ours(tokens[:, :-1], tokens[:, 1:])
        expected = theirs(tokens, labels=tokens).loss
    assert math.isclose(sums["loss"].item() / count.item(), expected.item(), rel_tol=1e-5)


def test_rope_scaling_does_something():
    plain, scaled = make_config().model, make_config(model={"rope_scaling": SCALING}).model
    cos, sin = rope_tables(plain, torch.arange(64))
    other, _ = rope_tables(scaled, torch.arange(64))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (64, 1, plain.width_per_head)
    assert not torch.equal(cos, other)


# Each model's config.json, written out here once more: parameters, hidden_size, intermediate_size, num_hidden_layers,
# num_attention_heads, num_key_value_heads, head_dim, vocab_size, rope_theta, llama3 scaling factor, tied.
PUBLISHED = {
    "llama8b": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, None, False),
    "llama8b-float8": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, None, False),
    "llama8b-lora": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, None, False),
    "llama8b-qlora": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, None, False),
    "llama70b-qlora": (70_553_706_496, 8192, 28672, 80, 64, 8, 128, 128256, 500000.0, None, False),
    "llama8b-h200": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, None, False),
    "llama3.1-8b": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, 8.0, False),
    "llama3.1-8b-128k": (8_030_261_248, 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, 8.0, False),
    "llama70b": (70_553_706_496, 8192, 28672, 80, 64, 8, 128, 128256, 500000.0, None, False),
    "llama3.1-70b": (70_553_706_496, 8192, 28672, 80, 64, 8, 128, 128256, 500000.0, 8.0, False),
    "llama1b": (1_235_814_400, 2048, 8192, 16, 32, 8, 64, 128256, 500000.0, 32.0, True),
    "llama3b": (3_212_749_824, 3072, 8192, 28, 24, 8, 128, 128256, 500000.0, 32.0, True),
    "smollm2-135m": (134_515_008, 576, 1536, 30, 9, 3, 64, 49152, 100000.0, None, True),
    "llama3.1-8b-chat-lora": (
        8_030_261_248,
        4096,
        14336,
        32,
        32,
        8,
        128,
        128256,
        500000.0,
        8.0,
        False,
    ),
    "qwen3-0.6b-chat": (596_049_920, 1024, 3072, 28, 16, 8, 128, 151936, 1000000.0, None, True),
    "qwen3-8b-chat-qlora": (
        8_190_735_360,
        4096,
        12288,
        36,
        32,
        8,
        128,
        151936,
        1000000.0,
        None,
        False,
    ),
    "tinyllama-1.1b": (1_100_048_384, 2048, 5632, 22, 32, 4, 64, 32000, 10000.0, None, False),
}


def test_every_shipped_model_is_compared():
    assert {path.stem for path in (REPO / "configs").glob("*.toml")} == {
        "tiny",
        "tiny-chat",
        *PUBLISHED,
    }


def is_shipped(name: str) -> bool:
    """Whether the configuration needs no extra that was removed."""
    return REPO / f"configs/{name}.toml" in shipped_configs()


@pytest.mark.parametrize("name", [name for name in PUBLISHED if is_shipped(name)])
def test_shipped_models_are_the_published_ones(name):
    """Every number of the [model] table, and the parameters as we and as transformers count them."""
    parameters, dim, ffn_dim, layers, heads, kv_heads, head_dim, vocabulary, theta, factor, tied = (
        PUBLISHED[name]
    )
    rope = {"rope_theta": theta, "rope_type": "default"}
    if factor:
        rope |= {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    qwen3 = name.startswith("qwen3")
    published = (Qwen3Config if qwen3 else LlamaConfig)(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=ffn_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_parameters=rope,
        rms_norm_eps=1e-6 if qwen3 else 1e-5,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )
    m = config.load(str(REPO / f"configs/{name}.toml")).model
    assert m.freeze == () and (m.init_from is None) == ("lora" not in name and "chat" not in name)
    assert config_of(m, 131072).to_dict() == published.to_dict()
    with torch.device("meta"):
        assert (
            parameter_count(Llama(m))
            == parameter_count(AutoModelForCausalLM.from_config(published))
            == parameters
        )


def test_flops_per_token():
    # Llama 3 8B at 8,192 tokens: 51.5 GFLOP with the causal half, by 6 N + 6 L H E S
    m = config.load(str(REPO / "configs/llama8b.toml")).model
    with torch.device("meta"):
        flops = flops_per_token(Llama(m), 8192)
    assert (
        flops
        == 6 * (8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096) + 6 * 32 * 32 * 128 * 8192
    )
    assert round(flops / 1e9, 1) == 51.5


def test_tied_matrix_counts_once():
    cfg = make_config(model={"tie_embeddings": True})
    untied = make_config()
    with torch.device("meta"):
        tied, other = Llama(cfg.model), Llama(untied.model)
    assert parameter_count(other) - parameter_count(tied) == 320 * 48
    assert flops_per_token(other, 32) == flops_per_token(tied, 32)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_distributions(tied):
    """Standard deviation and largest value of each matrix; norms are ones."""
    model = Llama(make_config(model={"dim": 96, "tie_embeddings": tied}).model)
    materialize(model, 0, torch.device("cpu"))
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert (weight == 1).all(), name
            continue
        module = name.split(".")[-2]
        cutoff = math.inf
        std = 0.02
        if module == "head" or (module == "embedding" and tied):
            std = 96**-0.5
            cutoff = 3.0
        elif module == "embedding":
            std = 1.0
        elif module in ("o_proj", "up_proj", "down_proj"):
            layer = int(name.split(".")[1])
            std = 0.02 / math.sqrt(2 * (layer + 1))
        # 0.9866: what truncation at three standard deviations leaves of one
        expected = std * (0.9866 if cutoff == 3.0 else 1.0)
        assert weight.std().item() == pytest.approx(expected, rel=0.04), name
        assert weight.abs().max() <= cutoff * std, name


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).abs() / expected.abs()).max().item()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8 * 1.001)])
def test_rms_norm_of_bfloat16_has_statistics_in_float32(dtype, bound):
    """bound: of its one rounding, to the weight's dtype, by at most half of the last place; the weights are powers of
    two, which round nothing. Statistics in bfloat16 would round the factor, too."""
    norm = RMSNorm(512, 1e-5).to(dtype)
    scales = 10.0 ** torch.linspace(-4, 3, 64)[:, None]  # of small ones epsilon is all there is
    x = (torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * scales).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(2.0 ** (torch.arange(512) % 5 - 2))
        assert (
            norm(x).dtype == dtype and relative(norm(x), normalized(x, norm.weight, 1e-5)) <= bound
        )


def test_every_norm_of_a_model_in_bfloat16_has_its_statistics_in_float32():
    m = make_config(model={"norm_eps": 1e-3}).model
    model, seen = Llama(m), {}
    materialize(model, 0, torch.device("cpu"))
    model.bfloat16()
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, args, out, name=name: seen.update({name: (args, out)})
        )
    with torch.no_grad():
        model(torch.arange(128)[None])
    norms = {name: module for name, module in model.named_modules() if isinstance(module, RMSNorm)}
    assert len(norms) == 2 * m.n_layers + 1
    for name, norm in norms.items():
        (x,), out = seen[name]
        assert x.dtype == out.dtype == torch.bfloat16
        assert relative(out, normalized(x, norm.weight, 1e-3)) <= 2**-8 * 1.001, name
    for block in ("blocks.0", "blocks.1"):
        for part in ("attention", "feed_forward"):
            assert seen[f"{block}.{part}"][0][0] is seen[f"{block}.{part}_norm"][1]


def test_a_pattern_that_freezes_nothing_or_all_is_refused():
    for freeze, told in (
        (["embedding*", "block.*"], r"'block.\*' matches none of embedding.weight, "),
        (["*"], "nothing is left to train"),
    ):
        with pytest.raises(ConfigError, match=rf"\[model\] freeze: {told}"):
            meta_model(make_config(model={"freeze": freeze}).model)
