"""Converts config.json (Llama, Qwen3) and PEFT's adapter_config.json to and from our options.

Needs no torch.
"""

import contextlib
import json
import os
import pathlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

from config import SCHEMA, ConfigError, GivenOptions, convert, toml
from extras.huggingface import hub

# our option in [model] -> key in config.json
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
# keys of RoPE scaling, the same in both
ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# model_type -> architecture; only Qwen3 has qk_norm
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The only supported values; other values are an error. A key may be absent.
ONLY = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
# Keys of a config.json that do not affect training here. They belong to the tokenizer or to
# generation, describe how the model was saved, or are ignored by transformers in these
# architectures. A key that is neither read nor listed is an error unless its value is in OFF.
IGNORED = """
bos_token_id eos_token_id pad_token_id sep_token_id tokenizer_class prefix
max_position_embeddings initializer_range pretraining_tp dtype torch_dtype
sliding_window max_window_layers use_cache cache_implementation attn_implementation
transformers_version transformers.js_config unsloth_fixed unsloth_version name
return_dict output_attentions output_hidden_states torchscript use_bfloat16
id2label label2id num_labels problem_type finetuning_task task_specific_params
max_length min_length do_sample temperature top_k top_p typical_p num_beams num_beam_groups
num_return_sequences repetition_penalty length_penalty
"""
# transformers' defaults for absent keys
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}

TOKENIZERS = ("tokenizer.model", "tokenizer.json")
ADAPTER = "adapter_config.json"
ALL_LINEAR = "all-linear"  # selects all projections in PEFT's target_modules
# our name of a projection -> its module in a block of transformers' models
PROJECTION_MODULES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
OTHER_LAYERS = ("model.embed_tokens", "lm_head")  # only PEFT supports adapters for them
# our option in [lora] -> key in adapter_config.json
ADAPTER_KEYS = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}
# like ONLY and IGNORED, for adapter_config.json
ONLY_ADAPTER = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, False, "gaussian"],
}
IGNORED_ADAPTER = """
task_type auto_mapping peft_version base_model_name_or_path revision inference_mode layers_pattern
loftq_config eva_config corda_config lora_ga_config megatron_core qalora_group_size velora_config
"""
OFF = (None, False, 0, "", [], {})


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object of a Hugging Face folder. Raises ConfigError."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        hub.refuse_pointer(path)
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return value


# Reading


class Entry(NamedTuple):
    """A key and its value in a Hugging Face file."""

    key: str
    value: Any


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config.json as options of [model], {"model.dim": 64, ...}.

    Uses transformers' defaults. Reads both spellings of RoPE settings: rope_theta and rope_scaling
    or, since transformers 5, rope_parameters. Raises ConfigError, which names every invalid or
    unsupported value.
    """
    entries = {key: value for key, value in read_json(path).items() if value is not None}
    theirs = DEFAULTS | entries
    problems = []

    rope_key = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(rope_key) or {}
    if not isinstance(rope, dict):
        problems.append(f"{path}: {rope_key} = {toml(rope)}: must be an object")
        rope = {}
    rope = {key: value for key, value in rope.items() if value is not None}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope["rope_type"] = rope_type
    problems += _unsupported(path, theirs, rope_key, rope)

    is_qwen3 = theirs.get("model_type") == "qwen3"
    # For Qwen3, the defaults of these two keys fit only one model size, so both must be present.
    if not is_qwen3:
        theirs.setdefault("num_key_value_heads", theirs.get("num_attention_heads"))
    has_head_dim = is_qwen3 or "head_dim" in theirs
    options = {}
    for key, their_key in KEYS.items():
        if key != "head_dim" or has_head_dim:
            options[f"model.{key}"] = Entry(their_key, theirs.get(their_key))
    options["model.qk_norm"] = Entry("model_type", is_qwen3)
    rope_theta = rope.get("rope_theta", theirs["rope_theta"])
    options["model.rope_theta"] = Entry("rope_theta", rope_theta)
    if rope_type == "llama3":
        for key in ROPE_KEYS:
            options[f"model.rope_scaling.{key}"] = Entry(f"{rope_key}.{key}", rope.get(key))
    fitted, invalid = _fit(path, options)
    problems += invalid
    if problems:
        raise ConfigError(*problems)
    return fitted


def _unsupported(path: pathlib.Path, theirs: dict, rope_key: str, rope: dict) -> list[str]:
    """The problems of a config.json, one for each unsupported value."""
    problems = []

    def check(key: str, value: Any, supported: list) -> None:
        if value not in supported:
            words = " and ".join(map(toml, supported))
            problems.append(f"{path}: {key} = {toml(value)}: only {words} can be read")

    model_type = theirs.get("model_type")
    architectures = [ARCHITECTURES["qwen3" if model_type == "qwen3" else "llama"]]
    check("model_type", model_type, [*ARCHITECTURES])
    check("architectures", theirs.get("architectures") or architectures, [architectures])
    for key, only in ONLY.items():
        check(key, theirs.get(key), [only, None])
    read_keys = {
        *KEYS.values(),
        *ONLY,
        *IGNORED.split(),
        "architectures",
        "model_type",
        "layer_types",
    }
    problems += _unread(path, theirs, read_keys | {"rope_theta", "rope_scaling", "rope_parameters"})
    rope_keys = {*ROPE_KEYS, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    problems += _unread(path, rope, rope_keys, f"{rope_key}.")
    layer_types = theirs.get("layer_types", [])
    if not isinstance(layer_types, list):
        layer_types = [layer_types]
    for layer_type in layer_types:
        check("layer_types", layer_type, ["full_attention"])
    rotary_factor = rope.get("partial_rotary_factor", 1.0)
    check(f"{rope_key}.partial_rotary_factor", rotary_factor, [1.0])
    check(f"{rope_key}.rope_type", rope["rope_type"], ["default", "llama3"])
    return problems


def _unread(path: pathlib.Path, theirs: dict, known: set[str], table: str = "") -> list[str]:
    """The problems of a table, one for each unknown key. Skips keys whose value is in OFF, and
    programs' private keys, which begin with an underscore."""
    problems = []
    for key, value in theirs.items():
        if key not in known and value not in OFF and not key.startswith("_"):
            shown = textwrap.shorten(json.dumps(value), 100)
            problems.append(
                f"{path}: {table}{key} = {shown}: is not read here, so what it says would be lost; "
                "a key that changes nothing may be removed from the file"
            )
    return problems


def read_adapter(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the adapter_config.json of a PEFT folder. Raises ConfigError for unsupported values."""
    path = folder / ADAPTER
    theirs = read_json(path)
    problems = []
    for key, supported in ONLY_ADAPTER.items():
        value = theirs.get(key)
        if value is not None and value not in supported:
            only = json.dumps(supported[0])
            problems.append(f"{path}: {key} = {json.dumps(value)}: only {only} can be read")
    problems += _unread(
        path, theirs, {*ADAPTER_KEYS.values(), *ONLY_ADAPTER, *IGNORED_ADAPTER.split()}
    )
    if problems:
        raise ConfigError(*problems)
    return theirs


def adapted_projections(path: pathlib.Path, targets: Any, blocks: int) -> list[str]:
    """The projections that PEFT's target_modules selects in a model of `blocks` blocks.

    `targets` is a list of names or ends of modules' paths, a regular expression for the full path,
    or "all-linear". `path` is the adapter_config.json. Raises ConfigError if the targets differ
    between blocks, select nothing, or also select other modules.
    """
    shown = f"{path}: target_modules = {textwrap.shorten(json.dumps(targets), 200)}"
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return [*PROJECTION_MODULES]
    is_list = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if not is_list and not isinstance(targets, str):
        raise ConfigError(f'{shown}: must be a list of modules, an expression, or "{ALL_LINEAR}"')
    try:
        other = [name for name in OTHER_LAYERS if _is_target(name, targets)]
        by_block = []
        for block in range(blocks):
            selected = []
            for name, module in PROJECTION_MODULES.items():
                if _is_target(f"model.layers.{block}.{module}", targets):
                    selected.append(name)
            by_block.append(selected)
    except re.error as error:
        raise ConfigError(f"{shown}: is no regular expression: {error}") from None
    if other:
        raise ConfigError(f"{shown}: selects {', '.join(other)}; only projections have adapters")
    if by_block != [by_block[0]] * blocks:
        raise ConfigError(f"{shown}: must select the same projections in every block")
    if not by_block[0]:
        raise ConfigError(f"{shown}: selects none of {', '.join(PROJECTION_MODULES)}")
    return by_block[0]


def _is_target(module: str, targets: list[str] | str) -> bool:
    """Whether PEFT's target_modules selects a module. Raises re.error."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    ends = tuple(f".{target}" for target in targets)
    return module in targets or module.endswith(ends)


def _fit(path: pathlib.Path, entries: dict[str, Entry]) -> tuple[dict[str, Any], list[str]]:
    """Converts the values of a file. Returns (values by option, a problem for each missing or
    invalid value)."""
    fitted = {}
    problems = []
    for name, (key, value) in entries.items():
        try:
            fitted[name] = convert(name, value)
        except ValueError as error:
            if value is None:
                problems.append(f"{path}: {key} is missing")
            else:
                problems.append(f"{path}: {key} = {toml(value)}: {error}")
    return fitted, problems


# Fill in a configuration


def fill_in(given: GivenOptions) -> None:
    """Fills in options of [model] and [lora] from the folders that their init_from names.

    Given options must agree with the folders. Pins hub ids to a commit. Raises ConfigError if a
    folder cannot be read.
    """
    with contextlib.suppress(ConfigError):
        # a plan does not need the tokenizer; other programs report why they cannot read it
        hub.pin(given, "data.tokenizer")
    try:
        if "model.init_from" in given.values:
            _fill_in_model(given)
        if "lora.init_from" in given.values:
            _fill_in_adapter(given)
    except ConfigError as error:
        raise ConfigError(*given.invalid.values(), *error.problems) from None
    if given.has_table("lora"):
        _normalize_adapter(given)
    if "model.init_from" in given.values:
        _fill_in_tokenizer(given)


def _fill_in_model(given: GivenOptions) -> None:
    values = given.values
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
        options = SCHEMA.tables["model"].options
        required = {f"model.{key}" for key in options if options[key].default is MISSING}
        # a run's own config.toml has all options: resuming from a checkpoint needs no folder
        if required <= values.keys():
            return
        raise
    theirs = read(path)
    rope = "model.rope_scaling"
    ours = {name for name in values if name.startswith(f"{rope}.")}
    is_off = rope in given.origins and not ours
    if is_off and f"{rope}.factor" in theirs:
        given.invalid[rope] = (
            f"{given.origins[rope]}: [model] rope_scaling is off: {path} and its weights have it; "
            "leave it out"
        )
    # given options of rope_scaling must be equal to the file's
    theirs = dict.fromkeys(ours, "absent") | theirs
    advice = "; leave it out, or, to resume from the run's checkpoint, move that file away"
    _take_over(given, path, theirs, KEYS, advice)


def _fill_in_adapter(given: GivenOptions) -> None:
    # a run's own config.toml has all options: resuming from a checkpoint needs no folder
    if {f"lora.{key}" for key in ADAPTER_KEYS} <= given.values.keys():
        return
    path = pathlib.Path(given.values["lora.init_from"], ADAPTER)
    theirs = read_adapter(path.parent)
    entries = {}
    for key, their_key in ADAPTER_KEYS.items():
        entries[f"lora.{key}"] = Entry(their_key, theirs.get(their_key))
    target_modules = entries.pop("lora.targets")
    problems = []
    try:
        blocks = given.values.get("model.n_layers", 1)
        projections = adapted_projections(path, target_modules.value, blocks)
        entries["lora.targets"] = Entry(target_modules.key, projections)
    except ConfigError as error:
        problems += error.problems
    fitted, invalid = _fit(path, entries)
    problems += invalid
    _take_over(given, path, fitted, ADAPTER_KEYS, "; leave it out")
    if problems:
        raise ConfigError(*problems)


def _fill_in_tokenizer(given: GivenOptions) -> None:
    """Sets data.tokenizer to model.init_from, if that has a tokenizer and the option is not given.

    A run that began without data.tokenizer resumes without it: its data has another tokenizer.
    """
    if "data.tokenizer" in given.values:
        return
    base = given.values["model.init_from"]
    before = hub.options_of_run(given)
    if before.get("model.init_from") == base and "data.tokenizer" not in before:
        return
    # assume that a repository has a tokenizer: its reader will check, and a plan needs none
    if hub.is_id(base) or any(pathlib.Path(base, name).is_file() for name in TOKENIZERS):
        given.values["data.tokenizer"] = base
        given.origins["data.tokenizer"] = given.origins["model.init_from"]


def _take_over(
    given: GivenOptions,
    path: pathlib.Path,
    theirs: dict[str, Any],
    keys: dict[str, str],
    advice: str,
) -> None:
    """Adds a file's options to the given ones. Given options must be equal to the file's.

    keys: our keys -> the file's keys. advice: the end of the message for a differing option.
    """
    for name, value in theirs.items():
        ours = given.values.setdefault(name, value)
        given.origins.setdefault(name, str(path))
        if ours == value:
            continue
        if name == "lora.targets" and {*ours} == {*value}:  # order does not matter
            continue
        reason = "; its weights have no more rows" if name == "model.vocab_size" else ""
        section, _, key = name.partition(".")
        given.invalid[name] = (
            f"{given.origins[name]}: [{section}] {key} = {toml(ours)}: {path} has "
            f"{keys.get(key, key)} = {toml(value)}{reason}{advice}"
        )


def _normalize_adapter(given: GivenOptions) -> None:
    """Normalizes the options of a run with adapters: sets alpha, sorts targets, makes paths
    absolute. Resuming compares these options with the checkpoint's."""
    values = given.values
    options = SCHEMA.tables["lora"].options
    rank = values.get("lora.rank", options["rank"].default)
    values.setdefault("lora.alpha", 2.0 * rank)
    if "lora.targets" in values:
        projections = options["targets"].default
        assert isinstance(projections, tuple)  # all projections, in a block's order
        targets = values["lora.targets"]
        values["lora.targets"] = tuple(name for name in projections if name in targets)
    for name in ("model.init_from", "lora.init_from"):
        if name in values:
            values[name] = hub.absolute(values[name])


# Writing


def render(m: Any, seq_len: int, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
    """The config.json for a config.Model.

    Contains RoPE settings and dtype twice, as transformers 5 and older versions spell them.
    token_ids has bos_token_id and eos_token_id, if known.
    """
    model_type = "qwen3" if m.qk_norm else "llama"
    rope = _render_rope(m)
    keys = {their_key: getattr(m, key) for key, their_key in KEYS.items()}
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        **keys,
        "head_dim": m.width_per_head,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if m.qk_norm:
        config["use_sliding_window"] = False
    else:
        config["mlp_bias"] = False
    return config | {
        "max_position_embeddings": _context_length(m, seq_len),
        "rope_theta": m.rope_theta,
        "rope_scaling": rope if m.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": m.rope_theta},
        "bos_token_id": token_ids.get("bos_token_id"),
        "eos_token_id": token_ids.get("eos_token_id"),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _render_rope(m: Any) -> dict[str, Any]:
    if m.rope_scaling is None:
        return {"rope_type": "default"}
    factors = {key: getattr(m.rope_scaling, key) for key in ROPE_KEYS}
    return {"rope_type": "llama3", **factors}


def _context_length(m: Any, seq_len: int) -> int:
    """The value of max_position_embeddings. It is seq_len, as trained or imported.

    With rope_scaling, if seq_len is at most original_max_position_embeddings, it is `factor` times
    original_max_position_embeddings.
    """
    scaling = m.rope_scaling
    if scaling is None or seq_len > scaling.original_max_position_embeddings:
        return seq_len
    return max(seq_len, int(scaling.factor * scaling.original_max_position_embeddings))


def render_adapter(lora: Any, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json for a config.Lora. `base` is the base model's folder or id."""
    commit = ""
    if hub.is_id(base):
        base, _, commit = base.partition("@")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
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


# Find options that a file cannot express


def check_rendered(m: Any, lora: Any = None) -> None:
    """Raises ConfigError if render() or render_adapter() leaves out an option that is not at its
    default: other programs would compute something else.

    Checks a config.Model and, if given, a config.Lora. The error names every such option.
    """
    written: set[str] = set()
    render(Recorded(m, written), 1, "float32", {})
    written |= {"init_from", "freeze"}  # where weights come from, and which are trained
    problems = _not_written("model", m, written, "config.json", "render()")
    if lora:
        written = set()
        render_adapter(Recorded(lora, written), "")
        written |= {"init_from", "base_dtype"}  # where weights come from, and how they are stored
        problems += _not_written("lora", lora, written, ADAPTER, "render_adapter()")
    if problems:
        raise ConfigError(*problems)


class Recorded:
    """Wraps options, and records the names of those that are read: {"rope_scaling.factor", ...}."""

    def __init__(self, options: Any, names: set[str], table: str = ""):
        self.options = options
        self.names = names
        self.table = table

    def __getattr__(self, key: str) -> Any:
        name = self.table + key
        self.names.add(name)
        value = getattr(self.options, key)
        if is_dataclass(value):
            return Recorded(value, self.names, f"{name}.")
        return value


def _not_written(
    section: str, options: Any, written: set[str], file: str, function: str
) -> list[str]:
    """A problem for each option that is not at its default and that `function` does not write."""
    return [
        f"[{section}] {name} = {toml(value)}: is not written into {file}, without which others "
        f"would compute something else; write it in extras/huggingface/config.py: {function}"
        for name, value in _changed_options(options, written)
    ]


def _changed_options(options: Any, written: set[str], table: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of each option that is not at its default and not in `written`."""
    for f in fields(options):
        name = table + f.name
        value = getattr(options, f.name)
        if name not in written:
            if value != f.default:
                yield name, value
        elif is_dataclass(value):
            yield from _changed_options(value, written, f"{name}.")
