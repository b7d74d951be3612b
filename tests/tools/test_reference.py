"""What export compares a model with, and which models it refuses."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import config
from extras.huggingface import config as hf_config
from extras.huggingface.weights import hf_name
from model import llama
from model.attention import attention
from model.build import build_model
from parallel.materialize import materialize
from tests.conftest import make_config, refuses
from tests.model.test_llama import SCALING as SHORT
from tools import reference

SCALING = {**SHORT, "original_max_position_embeddings": 64}
ROPE_TABLES = llama.rope_tables
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
    cfg = transformers.AutoConfig.for_model(**settings)
    theirs = transformers.AutoModelForCausalLM.from_config(cfg)
    theirs.load_state_dict(weights, strict=not m.tie_embeddings)
    tokens = torch.arange(40) * 7 % m.vocab_size
    positions = 3 * torch.arange(40)
    with torch.no_grad():
        expected = theirs(tokens[None], position_ids=positions[None]).logits[0]
    ours = reference.logits(settings, weights, tokens, positions)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.quick
def test_adapters_may_be_exported_but_not_with_a_forks_scale(monkeypatch):
    lora = config.Lora(rank=4, alpha=12.0, targets=("q_proj", "down_proj"), base_dtype="nf4")
    cfg = replace(make_config(), lora=lora)
    reference.check_export(cfg)
    # as rsLoRA scales, without a word of it in adapter_config.json
    monkeypatch.setattr(config.Lora, "scale", property(lambda lora: lora.alpha / lora.rank**0.5))
    with refuses("not transformers' LlamaForCausalLM"):
        reference.check_export(cfg)


def layer_norm(self, x):
    return F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight


def interleaved(x, cos, sin):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    half = pairs.shape[-1]
    return torch.view_as_real(pairs * torch.complex(cos, sin)[..., half:]).flatten(-2)


def tiled_groups(q, k, v, mask):
    """Query head h attends to key head h % K, not h // (H / K)."""
    groups = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), mask)


@pytest.mark.quick
@pytest.mark.parametrize(
    "owner, name, change",
    [
        (llama.RMSNorm, "forward", layer_norm),
        (llama.Block, "add_feed_forward", lambda s, x: x + s.feed_forward_norm(s.feed_forward(x))),
        (llama, "apply_rope", interleaved),
        (llama, "rope_tables", lambda m, at: ROPE_TABLES(replace(m, rope_theta=1e5), at)),
        (llama, "scale_frequencies", lambda frequencies, scaling: frequencies / scaling.factor),
        (llama, "attention", tiled_groups),
    ],
)
def test_model_of_a_fork_is_refused(monkeypatch, owner, name, change):
    monkeypatch.setattr(owner, name, change)
    with refuses("not transformers' LlamaForCausalLM", "logits differ by"):
        reference.check_export(make_config(model={"rope_scaling": SCALING}))


@pytest.mark.quick
def test_parameters_of_a_fork_are_refused(monkeypatch):
    init = llama.FeedForward.__init__

    def with_gain(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.gain = torch.nn.Parameter(torch.ones(1))

    monkeypatch.setattr(llama.FeedForward, "__init__", with_gain)
    with refuses("feed_forward.gain"):
        reference.check_export(make_config())


@dataclass(frozen=True)
class Windowed(config.Model):
    sliding_window: int | None = None


@dataclass(frozen=True)
class Stable(config.Lora):
    rank_stable: bool = False


@pytest.mark.quick
def test_options_that_the_files_lack_are_refused_unless_at_their_default():
    cfg = make_config()
    m = vars(cfg.model)
    reference.check_export(replace(cfg, model=Windowed(**m), lora=Stable(rank=4, alpha=8.0)))
    with refuses(r"\[model\] sliding_window = 4096: is not written into config.json"):
        reference.check_export(replace(cfg, model=Windowed(**m, sliding_window=4096)))
    with refuses(r"\[lora\] rank_stable = true: is not written into adapter_config.json"):
        reference.check_export(replace(cfg, lora=Stable(rank=4, alpha=8.0, rank_stable=True)))
