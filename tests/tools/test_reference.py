"""What export compares a model with, and which models it refuses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import config
from extras.huggingface import config as hf_config
from extras.huggingface.weights import hf_name
from model import llama
from model.build import build_model
from parallel.materialize import materialize
from tests.conftest import make_config, refuses
from tools import reference

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict] = {
    "llama": {},
    "llama3.1": {"rope_scaling": SCALING},
    "qwen3": {"qk_norm": True, "tie_embeddings": True, "head_dim": 24},
}


@pytest.mark.parametrize("name", MODELS)
def test_reference_is_transformers(name):
    transformers = pytest.importorskip("transformers")
    m = make_config(model=MODELS[name]).model
    model = build_model(m)
    materialize(model, 3, torch.device("cpu"))
    weights = {hf_name(name): p.detach() for name, p in model.named_parameters()}
    settings = hf_config.render(m, 128, "float32", {})
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings)
    )
    theirs.load_state_dict(weights, strict=not m.tie_embeddings)
    tokens = torch.arange(40) * 7 % m.vocab_size
    positions = 3 * torch.arange(40)
    with torch.no_grad():
        expected = theirs(tokens[None], position_ids=positions[None]).logits[0]
    torch.testing.assert_close(
        reference.logits(settings, weights, tokens, positions), expected, atol=2e-5, rtol=1e-4
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
def test_model_of_this_repository_may_be_exported(name):
    reference.check_export(make_config(model=MODELS[name], train={"seq_len": 512}))


@pytest.mark.quick
@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), config.PROJECTIONS])
def test_adapters_may_be_exported(targets, monkeypatch):
    lora = config.Lora(rank=4, alpha=12.0, targets=targets, base_dtype="nf4")
    cfg = replace(make_config(), lora=lora)
    reference.check_export(cfg)
    # as rsLoRA scales, without a word of it in adapter_config.json
    monkeypatch.setattr(config.Lora, "scale", property(lambda lora: lora.alpha / lora.rank**0.5))
    with refuses("not transformers' LlamaForCausalLM"):
        reference.check_export(cfg)


def gelu(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def layer_norm(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos = cos[..., : even.shape[-1]]
    sin = sin[..., even.shape[-1] :]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def tables_of(**changes: Any) -> Callable:
    tables = llama.rope_tables
    return lambda m, positions: tables(replace(m, **changes), positions)


def scaled_embedding(self: Any, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, self.weight) * 8


def norm_after(self: Any, x: Tensor) -> Tensor:
    return x + self.feed_forward_norm(self.feed_forward(x))


@pytest.mark.quick
@pytest.mark.parametrize(
    "owner, name, change",
    [
        (llama.FeedForward, "forward", gelu),
        (llama.RMSNorm, "forward", layer_norm),
        (llama, "apply_rope", interleaved),
        (llama, "rope_tables", tables_of(rope_theta=1e5)),
        (llama, "scale_frequencies", lambda frequencies, scaling: frequencies / scaling.factor),
        (llama.Embedding, "forward", scaled_embedding),
        (llama.Block, "add_feed_forward", norm_after),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_model_of_a_fork_is_refused(monkeypatch, owner, name, change):
    monkeypatch.setattr(owner, name, change)
    with refuses("not transformers' LlamaForCausalLM", "logits differ by"):
        reference.check_export(make_config(model={"rope_scaling": SCALING}))


@dataclass(frozen=True)
class Windowed(config.Model):
    sliding_window: int | None = None


@dataclass(frozen=True)
class Stable(config.Lora):
    rank_stable: bool = False


@pytest.mark.quick
def test_options_that_the_files_lack_are_refused():
    """But at their default, with which a fork's model is the same."""
    cfg = make_config()
    reference.check_export(
        replace(cfg, model=Windowed(**vars(cfg.model)), lora=Stable(rank=4, alpha=8.0))
    )
    with refuses(r"\[model\] sliding_window = 4096: is not written into config.json"):
        windowed = Windowed(**vars(cfg.model), sliding_window=4096)
        reference.check_export(replace(cfg, model=windowed))
    with refuses(r"\[lora\] rank_stable = true: is not written into adapter_config.json"):
        reference.check_export(replace(cfg, lora=Stable(rank=4, alpha=8.0, rank_stable=True)))


@pytest.mark.quick
def test_parameters_of_a_fork_are_refused(monkeypatch):
    init = llama.FeedForward.__init__

    def with_gain(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.gain = torch.nn.Parameter(torch.ones(1))

    monkeypatch.setattr(llama.FeedForward, "__init__", with_gain)
    with refuses("feed_forward.gain"):
        reference.check_export(make_config())
