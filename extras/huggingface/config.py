"""Converts config.json (Llama, Qwen3) and PEFT's adapter_config.json to and from our options. Needs no torch."""

import json
import os
import pathlib
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from data import hub
from schema import ConfigError, Given, Schema, toml

KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# the same in both
ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# by model_type; Qwen3 has qk_norm
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The only values that the model supports; any other is refused. A key may be absent.
ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_sliding_window": False,
}


def read_json(path: pathlib.Path) -> dict:
    """A JSON object of a Hugging Face folder. Raises ConfigError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def read(path: pathlib.Path, schema: Schema) -> dict[str, Any]:
    """The options of [model] in a config.json, {"model.dim": 64, ...}, with transformers' defaults. Raises ConfigError
    naming every value that is invalid or that this model does not support.

    RoPE settings are read in both spellings: rope_theta and rope_scaling or, since transformers 5, rope_parameters.
    """
    content, problems = read_json(path), []
    theirs = {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        **{key: value for key, value in content.items() if value is not None},
    }
    qk_norm = theirs.get("model_type") == "qwen3"
    if not qk_norm:  # Qwen3's defaults of head_dim and num_key_value_heads are those of one size: both must be there
        theirs.setdefault("num_key_value_heads", theirs.get("num_attention_heads"))
    named = [[ARCHITECTURES["qwen3" if qk_norm else "llama"]]]  # the only value of architectures
    spelling = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(spelling) or {}
    if not isinstance(rope, dict):
        problems.append(f"{path}: {spelling} = {toml(rope)}: must be an object")
        rope = {}
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = kinds if isinstance(kinds := theirs.get("layer_types", []), list) else [kinds]
    demands = [
        ("model_type", theirs.get("model_type"), [*ARCHITECTURES]),
        ("architectures", theirs.get("architectures") or named[0], named),
        *((key, theirs.get(key), [only, None]) for key, only in ONLY.items()),
        *(("layer_types", other, ["full_attention"]) for other in kinds),
        (f"{spelling}.partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0]),
        (f"{spelling}.rope_type", kind, ["default", "llama3"]),
    ]
    problems += [
        f"{path}: {key} = {toml(value)}: only {' and '.join(map(toml, known))} can be read"
        for key, value, known in demands
        if value not in known
    ]
    found = {
        f"model.{key}": (their_key, theirs.get(their_key))
        for key, their_key in KEYS.items()
        if their_key in theirs or key != "head_dim" or qk_norm
    }
    found["model.qk_norm"] = "model_type", qk_norm
    found["model.rope_theta"] = "rope_theta", rope.get("rope_theta", theirs["rope_theta"])
    if kind == "llama3":
        found |= {
            f"model.rope_scaling.{key}": (f"{spelling}.{key}", rope.get(key)) for key in ROPE_KEYS
        }
    options = _fitted(path, schema, found, problems)
    if problems:
        raise ConfigError(*problems)
    return options


def _fitted(
    path: pathlib.Path, schema: Schema, found: dict[str, tuple[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """{option: value} of {option: (key in the file, value)}. Adds every value that is missing or invalid to `problems`
    and leaves it out."""
    options = {}
    for name, (key, value) in found.items():
        try:
            options[name] = schema.fit(name, value)
        except ValueError as error:
            problems.append(
                f"{path}: {key} {'is missing' if value is None else f'= {toml(value)}: {error}'}"
            )
    return options


def complete(given: Given) -> None:
    """Fills in options of [model] and [lora] from the folders that their init_from name; options already given must
    agree. Adds the commit to ids of the hub. Raises ConfigError if a folder cannot be read."""
    try:
        if "model.init_from" in given.values:
            _complete_model(given)
        if "lora.init_from" in given.values:
            _complete_adapter(given)
    except ConfigError as error:
        raise ConfigError(*given.problems.values(), *error.problems) from None
    if any(f"{name}.".startswith("lora.") for name in given.values):
        _normalize(given.values, given.schema.section("lora"))


def _normalize(values: dict[str, Any], lora: dict[str, tuple[Any, Field]]) -> None:
    """Of a run with adapters: another spelling is no change of its options, and paths work from anywhere."""
    (_, rank), (_, targets) = lora["rank"], lora["targets"]
    assert isinstance(targets.default, tuple)  # all projections, in order
    values.setdefault("lora.alpha", 2.0 * values.get("lora.rank", rank.default))
    if "lora.targets" in values:
        values["lora.targets"] = tuple(
            name for name in targets.default if name in values["lora.targets"]
        )
    for name in {"model.init_from", "lora.init_from"} & values.keys():
        values[name] = hub.absolute(values[name])


def _complete_model(given: Given) -> None:
    values, rope = given.values, "model.rope_scaling"
    # a complete table, as in a run's own config.toml, needs no folder: its run may resume from a checkpoint
    complete = {
        f"model.{key}"
        for key, (_, f) in given.schema.section("model").items()
        if f.default is MISSING
    }
    try:
        hub.pin(given, "model.init_from")
        path = hub.local(values["model.init_from"], hub.CONFIG) / "config.json"
        if not os.path.exists(path):  # unlike Path.exists(), False where access is denied
            raise ConfigError(
                f"{given.origins['model.init_from']}: [model] init_from = "
                f"{toml(values['model.init_from'])}: has no config.json; it must be a Hugging Face "
                "folder on this machine, or the id of a repository, OWNER/NAME"
            )
    except ConfigError:
        if complete <= values.keys():
            return
        raise
    theirs = read(path, given.schema)
    ours = {name for name in values if name.startswith(f"{rope}.")}
    if rope in given.origins and not ours and f"{rope}.factor" in theirs:
        given.problems[rope] = (
            f"{given.origins[rope]}: [model] rope_scaling is off: {path} and its weights have it; "
            "leave it out"
        )
    _take_over(
        given,
        path,
        dict.fromkeys(ours, "absent") | theirs,
        KEYS,
        "; leave it out, or, to resume from the run's checkpoint, move that file away",
    )


def _take_over(
    given: Given, path: pathlib.Path, theirs: dict[str, Any], keys: dict[str, str], advice: str
) -> None:
    """Adds a file's options to the given ones; one that is given must be equal. keys: our keys -> the file's."""
    for name, value in theirs.items():
        section, _, key = name.partition(".")
        ours = given.values.setdefault(name, value)
        given.origins.setdefault(name, str(path))
        if ours != value and not (name == "lora.targets" and {*ours} == {*value}):
            # order does not matter
            more = "; its weights have no more rows" if name == "model.vocab_size" else ""
            given.problems[name] = (
                f"{given.origins[name]}: [{section}] {key} = {toml(ours)}: {path} has "
                f"{keys.get(key, key)} = {toml(value)}{more}{advice}"
            )


def render(m: Any, seq_len: int, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a config.Model. RoPE settings and dtype appear twice, in the spellings of transformers 5 and
    of older versions. token_ids: bos_token_id and eos_token_id, if known.

    max_position_embeddings is seq_len, trained or imported. With rope_scaling, and seq_len within
    original_max_position_embeddings, it is factor times the latter.
    """
    rope, stretched, kind = {"rope_type": "default"}, 0, "qwen3" if m.qk_norm else "llama"
    if s := m.rope_scaling:
        rope = {"rope_type": "llama3", **{key: getattr(s, key) for key in ROPE_KEYS}}
        if seq_len <= s.original_max_position_embeddings:
            stretched = int(s.factor * s.original_max_position_embeddings)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(m, key) for key, theirs in KEYS.items()},
        "head_dim": m.width_per_head,
        "hidden_act": "silu",
        "attention_bias": False,
        **({"use_sliding_window": False} if m.qk_norm else {"mlp_bias": False}),
        "max_position_embeddings": max(seq_len, stretched),
        "rope_theta": m.rope_theta,
        "rope_scaling": rope if m.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": m.rope_theta},
        "bos_token_id": token_ids.get("bos_token_id"),
        "eos_token_id": token_ids.get("eos_token_id"),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


ADAPTER = "adapter_config.json"
# The only values of PEFT's options that adapters support here; any other is refused. A key may be absent.
ONLY_ADAPTER = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "use_dora": [False],
    "use_rslora": [False],
    "fan_in_fan_out": [False],
    "lora_bias": [False],
    "modules_to_save": [[]],
    "rank_pattern": [{}],
    "alpha_pattern": [{}],
    "layers_to_transform": [[]],
    "init_lora_weights": [True, False, "gaussian"],
    "alora_invocation_tokens": [[]],
    "use_qalora": [False],
    "exclude_modules": [[]],
    "layer_replication": [[]],
    "trainable_token_indices": [[]],
}
ADAPTER_KEYS = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}


def read_adapter(folder: pathlib.Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT folder. Raises ConfigError for values that are not supported here."""
    theirs, path = read_json(folder / ADAPTER), folder / ADAPTER
    if problems := [
        f"{path}: {key} = {json.dumps(theirs[key])}: only {json.dumps(known[0])} can be read"
        for key, known in ONLY_ADAPTER.items()
        if theirs.get(key) not in (*known, None)
    ]:
        raise ConfigError(*problems)
    return theirs


def _complete_adapter(given: Given) -> None:
    """A complete table, as in a run's own config.toml, needs no folder: its run may resume from a checkpoint."""
    path = pathlib.Path(given.values["lora.init_from"], ADAPTER)
    if {f"lora.{key}" for key in ADAPTER_KEYS} <= given.values.keys():
        return
    theirs, problems = read_adapter(path.parent), []
    found = {
        f"lora.{key}": (their_key, theirs.get(their_key)) for key, their_key in ADAPTER_KEYS.items()
    }
    _take_over(
        given, path, _fitted(path, given.schema, found, problems), ADAPTER_KEYS, "; leave it out"
    )
    if problems:
        raise ConfigError(*problems)


def render_adapter(lora: Any, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json of a config.Lora."""
    name, _, commit = base.partition("@") if hub.is_id(base) else (base, "", "")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": commit or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


class Recorded:
    """Options that record, in `names`, which of them are read: {"dim", "rope_scaling.factor", ...}."""

    def __init__(self, options: Any, names: set[str], table: str = ""):
        self.options, self.names, self.table = options, names, table

    def __getattr__(self, key: str) -> Any:
        value, name = getattr(self.options, key), self.table + key
        self.names.add(name)
        return Recorded(value, self.names, f"{name}.") if is_dataclass(value) else value


def check_rendered(m: Any, lora: Any = None) -> None:
    """Raises ConfigError naming every option of a config.Model, and of a config.Lora if given, that has another value
    than its default and that render(), or render_adapter(), does not write: what is computed elsewhere would differ."""
    problems = _not_rendered(
        "model",
        m,
        lambda m: render(m, 1, "float32", {}),
        "config.json",
        "render()",
        ("init_from", "freeze"),
    )
    if lora:
        problems += _not_rendered(
            "lora",
            lora,
            lambda lora: render_adapter(lora, ""),
            ADAPTER,
            "render_adapter()",
            ("init_from", "base_dtype"),
        )
    if problems:
        raise ConfigError(*problems)


def _not_rendered(
    section: str, options: Any, render: Callable, file: str, function: str, exempt: tuple[str, ...]
) -> list[str]:
    """exempt: options that say where weights come from, how they are kept, and which are trained."""
    problems, names = [], set()
    render(Recorded(options, names))

    def look(options: Any, table: str) -> None:
        for f in fields(options):
            value, name = getattr(options, f.name), table + f.name
            if name in names and is_dataclass(value):
                look(value, f"{name}.")
            elif name not in {*names, *exempt} and value != f.default:
                problems.append(
                    f"[{section}] {name} = {toml(value)}: is not written into {file}, without which others "
                    f"would compute something else; write it in extras/huggingface/config.py: {function}"
                )

    look(options, "")
    return problems
