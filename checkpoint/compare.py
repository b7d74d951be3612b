"""Compares a checkpoint with the run that wants to use it: options, prepared data, tokenizer, base of adapters."""

import pathlib
import re
from typing import Any

import config
import schema
from checkpoint.catalog import path_of, read_state
from config import ConfigError

ADAPTERS = r"lora\.(?!init_from$).*"
# these determine what state the optimizer has
OPTIMIZER_STATE = r"model\.freeze|optim\.(name|state_dtype)"
# Those, and what determines weights and data order. The rest (steps, intervals, ranks, precision, learning rate) may
# change.
GUARDED = re.compile(
    rf"model\..*|{ADAPTERS}|{OPTIMIZER_STATE}|data\.(?!path$).*|run\.seed|"
    r"train\.(seq_len|global_batch_size)"
)
# Those that determine parameter shapes: even if allowed to change, the checkpoint would not load.
SHAPES = re.compile(r"model\.(dim|n_layers|ffn_dim|vocab_size|tie_embeddings)|lora\.(rank|targets)")
# Options that change the prepared data: allowing one of them to change also allows other data.
PREPARED = re.compile(
    r"data\.(sources?|subset|split|text_field|tokenizer|max_tokens|validation|messages_field|"
    r"chat_template)|"
    r"model\.vocab_size"
)
# Options that determine the outputs for given weights: an evaluation with other values would be silently wrong.
SAME_OUTPUTS = re.compile(rf"model\.(?!init_from$|freeze$).*|{ADAPTERS}")


def changed_options(cfg: config.Config, step: int, names: re.Pattern) -> dict[str, tuple[str, str]]:
    """{option: (value in the checkpoint, value now)} of options matching `names` that differ, as text."""
    saved = read_state(path_of(cfg, step))["config"]
    before, now = config.SCHEMA.complete(saved), config.SCHEMA.complete(config.to_dict(cfg))
    if (
        len({o["model.head_dim"] or o["model.dim"] // o["model.n_heads"] for o in (before, now)})
        == 1
    ):
        before["model.head_dim"] = now["model.head_dim"]  # the same width, given or derived

    def words(value: Any) -> str:
        return (
            value if isinstance(value, str) else "absent" if value is None else schema.toml(value)
        )

    older = {key for key, value in before.items() if value is not None} - schema.flatten(
        saved, before
    ).keys()
    return {
        key: (words(before.get(key)) + ", the default" * (key in older), words(now.get(key)))
        for key in sorted(before | now)
        if names.fullmatch(key) and before.get(key) != now.get(key)
    }


def check_same_run(cfg: config.Config, step: int, guarded: re.Pattern = GUARDED) -> None:
    """Raises ConfigError naming every option of `guarded` (default: those that determine weights and data order) that
    differs from the checkpoint's. An option newer than the checkpoint counts as its default there."""
    allowed = cfg.checkpoint.allow_changed if cfg.checkpoint else ()
    exists = path_of(cfg, step).is_dir()  # a step of 0 is an imported checkpoint, or none
    changed = changed_options(cfg, step, guarded) if exists else {}
    if exists and bool(read_state(path_of(cfg, step))["config"].get("lora")) != bool(cfg.lora):
        raise ConfigError(
            f"[lora] is {'on' if cfg.lora else 'off'}: {path_of(cfg, step)} was trained "
            f"with{'out' * bool(cfg.lora)} adapters; continue so, or choose another run.name"
        )
    if cfg.lora:
        # the base may have moved: check_base() compares the weights themselves
        changed.pop("model.init_from", None)
    if problems := [
        f"{key} = {now}: {path_of(cfg, step)} was trained with {before}; {_instead(key)}"
        for key, (before, now) in changed.items()
        if key not in allowed
    ]:
        raise ConfigError(*problems)


def _instead(key: str) -> str:
    """Advice for an option that differs from the checkpoint's."""
    if key not in config.SCHEMA.options:
        return "this version has no such option"
    if re.fullmatch(OPTIMIZER_STATE, key):
        return (
            "continue with that, or start another run from these weights (python -m huggingface "
            "export, model.init_from): the optimizer's state is of what was trained, and how"
        )
    if SHAPES.fullmatch(key):
        return "its weights have those shapes; continue so, or choose another run.name"
    return f'continue with that, choose another run.name, or allow it: checkpoint.allow_changed = ["{key}"]'


def check_base(folder: pathlib.Path, init_from: str | None, base: str | None) -> None:
    """Raises ConfigError if a checkpoint's adapters were trained on a base with another fingerprint."""
    if (before := read_state(folder).get("base")) != base:
        raise ConfigError(
            f"[model] init_from = {schema.toml(init_from or '')}: its weights have the hash {base}, but "
            f"{folder} was trained on a base with {before}; name the folder with that base"
        )


def by_source(fingerprint: list[dict]) -> dict[str, Any]:
    """The fingerprint of prepared data, {"source 1.sha256.train.bin": ..., ...}."""
    return schema.flatten({f"source {n}": entry for n, entry in enumerate(fingerprint, 1)})


def check_same_data(cfg: config.Config, step: int, fingerprint: list[dict]) -> None:
    """Raises ConfigError, naming what differs, if the prepared data is not the data the checkpoint was trained on."""
    before = read_state(path_of(cfg, step)).get("data") if step else None
    # of growing text, which part is compared as it is read
    used = ("segments", "validation_hash")
    before = before and [{k: v for k, v in entry.items() if k not in used} for entry in before]
    allowed = cfg.checkpoint.allow_changed if cfg.checkpoint else ()
    if not before or before == fingerprint or any(map(PREPARED.fullmatch, allowed)):
        return
    old, new = by_source(before), by_source(fingerprint)
    differ = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    # a different identity explains different content
    changed = [
        f"{key} was {old.get(key)}, is {new.get(key)}"
        for key in [key for key in differ if ".identity." in key] or differ
    ]
    option = (
        "data.tokenizer"
        if all(".identity.tokenizer " in text for text in changed)
        else "data.source"
    )
    raise ConfigError(
        f"{path_of(cfg, step)}: was trained on other data: {'; '.join(changed)}; choose another "
        f'run.name, or allow it: checkpoint.allow_changed = ["{option}"]'
    )


def data_before(cfg: config.Config, step: int) -> list[dict] | None:
    """What a checkpoint was trained on, as Dataset.fingerprint(); None if it may be something else now."""
    allowed = cfg.checkpoint.allow_changed if cfg.checkpoint else ()
    if not step or any(map(PREPARED.fullmatch, allowed)):
        return None
    return read_state(path_of(cfg, step)).get("data")


def other_tokenizer(cfg: config.Config, step: int, files: list[pathlib.Path]) -> str | None:
    """A warning if the data was prepared with another tokenizer (these files) than the checkpoint's, else None."""
    folder = path_of(cfg, step)
    theirs = [path.read_bytes() for path in folder.glob("tokenizer.*") if path.is_file()]
    if theirs and not any(path.read_bytes() in theirs for path in files):
        return (
            f"{', '.join(map(str, files))}: is not the tokenizer that {folder} was trained with, to whose weights "
            f'its tokens mean other words; data.tokenizer = "{folder}" names the one that is'
        )
    return None


def check_same_tokenizer(cfg: config.Config, step: int, files: list[pathlib.Path]) -> None:
    """Raises ConfigError if an evaluation would use another tokenizer than the checkpoint's."""
    if (warning := other_tokenizer(cfg, step, files)) and not (
        cfg.checkpoint and "data.tokenizer" in cfg.checkpoint.allow_changed
    ):
        raise ConfigError(warning)
