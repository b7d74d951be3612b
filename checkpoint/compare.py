"""Compares a checkpoint with the run that wants to use it: options, prepared data, tokenizer, base
of adapters."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import config
from checkpoint import catalog
from checkpoint.catalog import path_of, read_state
from config import ConfigError

ADAPTERS = r"lora\.(?!init_from$).*"
# Options that determine which state the optimizer has.
OPTIMIZER_STATE = r"model\.freeze|optim\.(name|state_dtype)"
# These, and what determines weights and data order. The rest (steps, intervals, ranks, precision,
# learning rate) may change.
GUARDED = re.compile(
    rf"model\..*|{ADAPTERS}|{OPTIMIZER_STATE}|data\.(?!path$).*|run\.seed|"
    r"train\.(seq_len|global_batch_size)"
)
# Options that determine parameter shapes: even if allowed to change, the checkpoint would not load.
SHAPES = re.compile(
    r"model\.(dim|n_layers|n_heads|n_kv_heads|head_dim|ffn_dim|vocab_size|tie_embeddings|qk_norm)|"
    r"lora\.(rank|targets)"
)
# Options that change the prepared data: allowing one of them to change also allows other data.
PREPARED = re.compile(
    r"data\.(sources?|subset|split|text_field|tokenizer|max_tokens|validation|format|"
    r"messages_field|chat_template|token_dtype|eos_id)|"
    r"model\.vocab_size"
)
# Options that determine the outputs for given weights: an evaluation with other values would be
# silently wrong.
SAME_OUTPUTS = re.compile(rf"model\.(?!init_from$|freeze$).*|{ADAPTERS}")
# Options that make another run of the one that resumes. The mesh, paths and reports do not. Of the
# tokenizer see other_tokenizer().
OF_TRAINING = re.compile(
    r"(model|data|optim|lora)\.(?!path$|tokenizer$|init_from$).*|train\.(?!micro_batch_size$).*|"
    r"parallel\.(\w+_dtype|keep_fp32|float8)|run\.seed"
)


def starting_point(
    cfg: config.Config,
    evaluating: bool,
    problems_with: Callable[[pathlib.Path], list[str]] = catalog.problems_without_hashing,
    once: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> tuple[list[int], int, dict[int, list[str]]]:
    """Whether and where a run may start, resume or be evaluated: (the steps of its checkpoints; the
    step to resume after, 0 for a new run; problems of newer checkpoints, by step).

    The launcher compares sizes; the ranks hash (problems_with), and one of them looks at the disk
    for all (once). Raises ConfigError if `resume` contradicts the checkpoints, none is good, or the
    one that is chosen is another run's.
    """
    saved = once(lambda: catalog.steps(cfg))
    step, corrupt = catalog.choose(cfg, saved, problems_with, evaluating)
    once(lambda: check_same_run(cfg, step, SAME_OUTPUTS if evaluating else GUARDED))
    return saved, step, corrupt


def changed_options(cfg: config.Config, step: int, names: re.Pattern) -> dict[str, tuple[str, str]]:
    """{option: (value in the checkpoint, value now)}, as text, of the options matching `names` that
    differ. An option that the checkpoint does not mention had its default."""
    saved = read_state(path_of(cfg, step))["config"]
    before = config.values_of(saved)
    now = config.values_of(config.to_dict(cfg))
    if _head_width(before) == _head_width(now):
        before["model.head_dim"] = now["model.head_dim"]  # stated or derived, it is the same
    if _row_format(before) == _row_format(now):
        before["data.format"] = now["data.format"]
    mentioned = config.flatten(saved, before)
    changed = {}
    for key in sorted(before | now):
        old_value = before.get(key)
        new_value = now.get(key)
        if old_value == new_value or not names.fullmatch(key):
            continue
        old_text = _as_text(old_value)
        if old_value is not None and key not in mentioned:
            old_text += ", the default"
        changed[key] = (old_text, _as_text(new_value))
    return changed


def _head_width(options: dict[str, Any]) -> int:
    return options["model.head_dim"] or options["model.dim"] // options["model.n_heads"]


def _row_format(options: dict[str, Any]) -> str:
    return options["data.format"] or ("messages" if options["data.messages_field"] else "text")


def _as_text(value: Any) -> str:
    if value is None:
        return "absent"
    return value if isinstance(value, str) else config.toml(value)


def check_same_run(cfg: config.Config, step: int, guarded: re.Pattern = GUARDED) -> None:
    """Raises ConfigError naming every option of `guarded` (default: those that determine weights
    and data order) that differs from the checkpoint's. An option newer than the checkpoint counts
    as its default there."""
    folder = path_of(cfg, step)
    if not folder.is_dir():  # step 0 is an imported checkpoint, or none
        return
    changed = changed_options(cfg, step, guarded)
    had_adapters = bool(read_state(folder)["config"].get("lora"))
    if cfg.lora and not had_adapters:
        raise ConfigError(
            f"[lora] is on: {folder} was trained without adapters; continue so, or choose another "
            "run.name"
        )
    if had_adapters and not cfg.lora:
        raise ConfigError(
            f"[lora] is off: {folder} was trained with adapters; continue so, or choose another "
            "run.name"
        )
    if cfg.lora:
        # the base may have moved: check_base() compares the weights themselves
        moved = changed.pop("model.init_from", None)
        if changed.get("data.tokenizer") == moved:
            # its tokenizer with it: check_same_data() compares the tokenizers themselves
            changed.pop("data.tokenizer", None)
    problems = [
        f"{key} = {now}: {folder} was trained with {before}; {_advice(key)}"
        for key, (before, now) in changed.items()
        if key not in allowed_changes(cfg)
    ]
    if problems:
        raise ConfigError(*problems)


def allowed_changes(cfg: config.Config) -> tuple[str, ...]:
    """checkpoint.allow_changed."""
    return cfg.checkpoint.allow_changed if cfg.checkpoint else ()


def may_read_other_data(cfg: config.Config) -> bool:
    """Whether allow_changed names an option that changes the prepared data."""
    return any(PREPARED.fullmatch(key) for key in allowed_changes(cfg))


def _advice(key: str) -> str:
    """Advice for an option that differs from the checkpoint's."""
    if key not in config.SCHEMA.options:
        return "this version has no such option"
    if re.fullmatch(OPTIMIZER_STATE, key):
        return (
            "continue with that, or start another run from these weights (./run_train.sh -m huggingface "
            "export, model.init_from): the optimizer's state is of what was trained, and how"
        )
    if SHAPES.fullmatch(key):
        return "its weights have those shapes; continue so, or choose another run.name"
    return (
        "continue with that, choose another run.name, or allow it: "
        f'checkpoint.allow_changed = ["{key}"]'
    )


def changes_since(cfg: config.Config, step: int) -> dict[str, tuple[str, str]]:
    """changed_options() of OF_TRAINING: those that may change, but make another run of this one.
    None of a run that begins."""
    if not path_of(cfg, step).is_dir():  # step 0
        return {}
    changes = changed_options(cfg, step, OF_TRAINING)
    if cfg.optim.schedule_steps or cfg.optim.schedule == "constant":
        changes.pop("train.steps", None)  # without these the learning rate's schedule ends there
    if cfg.parallel.param_dtype == "auto":
        changes.pop("parallel.param_dtype", None)  # a resume keeps that of the checkpoint
    return changes


def describe_changes(step: int, changes: dict[str, tuple[str, str]]) -> str:
    """changes_since() a step, in a line for the user."""
    words = [f"{name} {before} -> {now}" for name, (before, now) in changes.items()]
    return f"changed since step {step}: {', '.join(words)}; another run: --run.name=NAME"


def check_base(folder: pathlib.Path, init_from: str | None, base: str | None) -> None:
    """Raises ConfigError if a checkpoint's adapters were trained on a base with another
    fingerprint."""
    before = read_state(folder).get("base")
    if before != base:
        raise ConfigError(
            f"[model] init_from = {config.toml(init_from or '')}: its weights have the hash {base}, "
            f"but {folder} was trained on a base with {before}; name the folder with that base"
        )


def by_source(fingerprint: list[dict]) -> dict[str, Any]:
    """The fingerprint of prepared data, {"source 1.sha256.train.bin": ..., ...}."""
    return config.flatten({f"source {n}": entry for n, entry in enumerate(fingerprint, 1)})


def check_same_data(cfg: config.Config, step: int, fingerprint: list[dict]) -> None:
    """Raises ConfigError, naming what differs, if the prepared data is not the data the checkpoint
    was trained on."""
    trained_on = data_before(cfg, step)
    if not trained_on:
        return
    for entry in trained_on:
        entry.pop("hashes", None)  # those of text that grows are compared as it is read
    if trained_on == fingerprint:
        return
    old = by_source(trained_on)
    new = by_source(fingerprint)
    differing = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    # a different identity explains different hashes
    identities = [key for key in differing if ".identity." in key]
    named = identities or differing
    changes = [f"{key} was {old.get(key)}, is {new.get(key)}" for key in named]
    is_tokenizer = all(key.endswith(".identity.tokenizer") for key in named)
    option = "data.tokenizer" if is_tokenizer else "data.source"
    raise ConfigError(
        f"{path_of(cfg, step)}: was trained on other data: {'; '.join(changes)}; choose another "
        f'run.name, or allow it: checkpoint.allow_changed = ["{option}"]'
    )


def data_before(cfg: config.Config, step: int) -> list[dict] | None:
    """What a checkpoint was trained on, as Dataset.fingerprint(); None if it may be something else
    now."""
    if step == 0 or may_read_other_data(cfg):
        return None
    return read_state(path_of(cfg, step)).get("data")


def other_tokenizer(cfg: config.Config, step: int, files: list[pathlib.Path]) -> str | None:
    """A warning if the data was prepared with another tokenizer (these files) than the
    checkpoint's, else None."""
    folder = path_of(cfg, step)
    saved = [path.read_bytes() for path in folder.glob("tokenizer.*") if path.is_file()]
    if not saved or not files or any(path.read_bytes() in saved for path in files):
        return None
    return (
        f"{', '.join(map(str, files))}: is not the tokenizer that {folder} was trained with, to "
        "whose weights its tokens mean other words; "
        f'data.tokenizer = "{folder}" names the one that is'
    )


def check_same_tokenizer(cfg: config.Config, step: int, files: list[pathlib.Path]) -> None:
    """Raises ConfigError if an evaluation would use another tokenizer than the checkpoint's."""
    warning = other_tokenizer(cfg, step, files)
    if warning and "data.tokenizer" not in allowed_changes(cfg):
        raise ConfigError(warning)
