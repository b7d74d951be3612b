"""Computes in plain torch what transformers computes for a config.json, and PEFT for an
adapter_config.json. Export refuses a model that computes something else, such as a fork's with
another activation, norm or RoPE. 24 tokens cannot reveal everything, such as a window of 4096. Such
features need an option, and export refuses options that config.json lacks.

Shapes: T tokens, D model dimension, H query heads, K key/value heads, E head dimension,
V vocabulary.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import config
from config import ConfigError
from extras.huggingface import config as hf_config
from extras.huggingface.weights import hf_name
from model.build import build_model
from parallel.materialize import initialize_buffers

# Relative to the largest logit. In 100 blocks, float32 rounding is a hundredth of this.
TOLERANCE = 1e-3
TOKENS = 24


@torch.no_grad()
def check_export(cfg: config.Config) -> None:
    """Compares the logits of cfg's model with the logits that its config.json defines.

    Uses small sizes and random weights. With [lora], compares the adapted model with config.json
    and adapter_config.json. Raises ConfigError if the logits differ, or if neither file can express
    an option.
    """
    m = cfg.model
    hf_config.check_rendered(m, cfg.lora)
    small = replace(
        m,
        dim=64,
        n_heads=4,
        n_kv_heads=4 if m.n_kv_heads == m.n_heads else 2,
        head_dim=m.width_per_head,
        ffn_dim=96,
        vocab_size=128,
        freeze=(),
    )
    lora = replace(cfg.lora, base_dtype="float32") if cfg.lora else None
    adapter = hf_config.render_adapter(lora, "") if lora else {}
    model = build_model(small, lora).eval()
    initialize_buffers(model, cfg.run.seed)
    random = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=random)
        p.copy_(1 + 0.1 * noise if p.ndim == 1 else noise / math.sqrt(p.shape[-1]))
        if name.endswith("lora_b.weight"):
            p.mul_(0.1)  # adapters are small: rounding would add up in a deep model
    model.embedding.weight.mul_(0.02)  # small enough for norm_eps to matter
    tokens = torch.randint(small.vocab_size, (TOKENS,), generator=random)
    positions = torch.arange(TOKENS) * max(1, cfg.train.seq_len // TOKENS)
    ours = model(tokens[None], positions=positions[None])[0]  # (T, V)
    weights = {hf_name(name): p for name, p in model.named_parameters()}
    settings = hf_config.render(small, cfg.train.seq_len, "float32", {})
    theirs = logits(settings, merged(adapter, weights), tokens, positions)
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not difference < TOLERANCE:
        architecture = settings["architectures"][0]
        raise ConfigError(
            f"this model is not transformers' {architecture}, as its config.json would say: with the "
            f"same random weights their logits differ by {difference:.2g} of the largest. Nothing "
            "is written; a model that transformers lacks needs a modeling file of its own"
        )


def merged(adapter: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights after PEFT has merged its adapters, if any."""
    full = dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in adapter.get("target_modules", ()):
            a = full.pop(f"base_model.model.{module}.lora_A.weight")
            b = full.pop(f"base_model.model.{module}.lora_B.weight")
            full[name] = weight + adapter["lora_alpha"] / adapter["r"] * b @ a
    return full


def logits(settings: dict, weights: dict[str, Tensor], tokens: Tensor, positions: Tensor) -> Tensor:
    """The logits (T, V) of Llama or Qwen3, as model_type in `settings`, a config.json, selects.
    Raises ConfigError if the names of the weights differ from transformers'."""
    weights = dict(weights)
    if settings["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    def take(name: str) -> Tensor:
        if name not in weights:
            raise ConfigError(f"the model has no {name}, which transformers' has")
        return weights.pop(name)

    def norm(x: Tensor, name: str) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x / (mean_square + settings["rms_norm_eps"]).sqrt() * take(f"{name}.weight")

    def project(x: Tensor, name: str) -> Tensor:
        return x @ take(f"{name}.weight").T

    angles = positions[:, None] * frequencies(settings)  # (T, E/2)
    x = take("model.embed_tokens.weight")[tokens]  # (T, D)
    for i in range(settings["num_hidden_layers"]):
        block = f"model.layers.{i}"
        attention = f"{block}.self_attn"
        h = norm(x, f"{block}.input_layernorm")
        q, k, v = (
            project(h, f"{attention}.{name}").unflatten(-1, (-1, settings["head_dim"]))
            for name in ("q_proj", "k_proj", "v_proj")
        )  # (T, H, E), (T, K, E), (T, K, E)
        if settings["model_type"] == "qwen3":
            q = norm(q, f"{attention}.q_norm")
            k = norm(k, f"{attention}.k_norm")
        values = attend(rotate(q, angles), rotate(k, angles), v)
        x = x + project(values, f"{attention}.o_proj")
        h = norm(x, f"{block}.post_attention_layernorm")
        gate = F.silu(project(h, f"{block}.mlp.gate_proj"))
        x = x + project(gate * project(h, f"{block}.mlp.up_proj"), f"{block}.mlp.down_proj")
    result = project(norm(x, "model.norm"), "lm_head")
    if weights:
        raise ConfigError(f"the model has {min(weights)}, which transformers' has not")
    return result


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (T, H, E) to k and v (T, K, E). H/K query heads share a key head.
    Returns (T, H*E)."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, v).flatten(1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Applies RoPE to x (T, heads, E). Both halves of E use the same angles (T, E/2)."""
    first, second = x.chunk(2, dim=-1)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def frequencies(settings: dict) -> Tensor:
    """The frequencies of RoPE, (E/2)."""
    size = settings["head_dim"]
    rope = settings["rope_parameters"]
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    if rope["rope_type"] == "default":
        return plain
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * plain / rope["factor"] + smooth * plain
    divided = torch.where(turns < low, plain / rope["factor"], between)
    return torch.where(turns > high, plain, divided)
