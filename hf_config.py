"""Hugging Face's config.json of the Llama family <-> [model]. Needs no torch."""

import json
import pathlib
from typing import Any

from options import ConfigError, to_dict, toml

KEYS = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size",
        "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings"}
ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # both sides'
# What the model computes; a file that says something else is refused. Absent is as good, but for the first.
ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 1.0, "quantization_config": None}


def read_json(path: pathlib.Path) -> dict:
    """A JSON object of a Hugging Face folder. Raises ConfigError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def read(path: pathlib.Path, problems: list[str]) -> dict[str, tuple[str, Any]]:
    """{our key in [model]: (their key, value as it stands there)}, with transformers' defaults; adds to `problems` what
    this model does not compute. Raises ConfigError where it cannot be read.

    Rotary settings are read in both spellings: rope_theta and rope_scaling or, since transformers 5, both of them in
    rope_parameters.
    """
    theirs = read_json(path)
    named = theirs.get("architectures") or ["LlamaForCausalLM"]
    if named != ["LlamaForCausalLM"]:
        problems.append(f'{path}: architectures = {toml(named)}: only ["LlamaForCausalLM"] can be read')
    problems += [f"{path}: {key} = {toml(value)}: only {toml(only)} can be read" for key, only in ONLY.items()
                 if (value := theirs.get(key)) != only and not (value is None and key != "model_type")]
    defaults = {"num_key_value_heads": theirs.get("num_attention_heads"), "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False}
    found = {key: (theirs_key, theirs[theirs_key] if theirs.get(theirs_key) is not None else defaults.get(theirs_key))
             for key, theirs_key in KEYS.items()}
    if found["head_dim"][1] is None:
        del found["head_dim"]
    spelling = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(spelling) or {}
    if not isinstance(rope, dict):
        raise ConfigError(*problems, f"{path}: {spelling} = {toml(rope)}: must be an object")
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"{path}: {spelling}.partial_rotary_factor = {toml(part)}: only 1.0 can be read")
    theta = rope.get("rope_theta", theirs.get("rope_theta"))
    found["rope_theta"] = "rope_theta", 10000.0 if theta is None else theta
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        found |= {f"rope_scaling.{key}": (f"{spelling}.{key}", rope.get(key)) for key in ROPE_KEYS}
    elif kind != "default":
        problems.append(f'{path}: {spelling}.rope_type = {toml(kind)}: only "default" and "llama3" can be read')
    return found


def render(m: Any, seq_len: int, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
    """config.json of a config.Model. Rotary settings and dtype are in it twice, as transformers 5 and as older ones
    read them. token_ids: bos_token_id and eos_token_id, where they are known.

    max_position_embeddings is the length that was trained with (or imported), or what the rotary table is stretched to
    where that length is not beyond the one that it was stretched from.
    """
    rope, stretched = {"rope_type": "default"}, 0
    if s := m.rope_scaling:
        rope = {"rope_type": "llama3", **to_dict(s)}
        if seq_len <= s.original_max_position_embeddings:
            stretched = int(s.factor * s.original_max_position_embeddings)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(m, key) for key, theirs in KEYS.items()},
        "head_dim": m.width_per_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": max(seq_len, stretched),
        "rope_theta": m.rope_theta,
        "rope_scaling": rope if m.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": m.rope_theta},
        "bos_token_id": token_ids.get("bos_token_id"),
        "eos_token_id": token_ids.get("eos_token_id"),
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
