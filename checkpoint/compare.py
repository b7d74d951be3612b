"""Compares a checkpoint with the run that wants to use it: options, prepared data, tokenizer, base
of adapters. What a resume may do with an option, each says itself (config/option.py: Resume)."""

import pathlib
from collections.abc import Callable
from typing import Any

import config
from checkpoint import catalog
from checkpoint.catalog import path_of, read_state
from checkpoint.manifest import entry_of, read_manifest
from config import ConfigError

# The words of options that must be as they were, to train and to evaluate.
SAME_RUN = ("shape", "state", "output", "data", "run")
SAME_OUTPUTS = ("shape", "output")
ADVICE = {
    "shape": "its weights have those shapes; keep the old value, or choose another run.name",
    "state": "continue with that, or start another run from these weights ("
    f"{config.command('-m', 'huggingface', 'export')}, model.init_from): the optimizer's state "
    "belongs to what was trained, and how",
}


def starting_point(
    cfg: config.Config,
    evaluating: bool,
    problems_with: Callable[[pathlib.Path], list[str]] = catalog.wrong_sizes,
    once: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> tuple[list[int], int, dict[int, list[str]]]:
    """Whether and where a run may start, resume or be evaluated: (the steps of its checkpoints; the
    step to resume after, 0 for a new run; problems of newer checkpoints, by step).

    The launcher compares sizes; the ranks hash (problems_with), and one of them looks at the disk
    for all (once). Raises ConfigError if `resume` contradicts the checkpoints, none is good, the
    one that is chosen is another run's, or the disk cannot hold another.
    """
    root = catalog.root_of(cfg)
    saved = once(lambda: catalog.steps(root))
    step, corrupt = catalog.choose(root, saved, cfg.checkpoint, problems_with, evaluating)
    words = SAME_OUTPUTS if evaluating else SAME_RUN
    once(lambda: check_same_run(cfg, path_of(root, step), words))
    if cfg.checkpoint and not evaluating and step < cfg.train.steps:
        once(lambda: catalog.try_disk(root))
    return saved, step, corrupt


def changed_options(
    cfg: config.Config, folder: pathlib.Path, words: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """{option: (value in the checkpoint, value now)}, as text, of the options of these words of
    Resume that differ. An option that the checkpoint does not mention had its default. None differ
    from step 0."""
    if not folder.is_dir():
        return {}
    before = stated(config.values_of(read_state(folder)["config"]))
    now = stated(config.values_of(config.to_dict(cfg)))
    changed = {}
    for name in sorted(before.keys() - config.SCHEMA.tables.keys()):  # an empty table has no option
        if before[name] != now.get(name) and word_of(name) in words:
            changed[name] = (as_text(before[name]), as_text(now.get(name)))
    if cfg.lora:
        # the base may have moved, and its tokenizer with it: check_base() compares the weights
        # themselves, check_same_data() the tokenizers
        moved = changed.pop("model.init_from", None)
        if changed.get("data.tokenizer") == moved:
            changed.pop("data.tokenizer", None)
    return changed


def stated(values: dict[str, Any]) -> dict[str, Any]:
    """The values with those that others imply, where they are absent."""
    head_dim = values["model.head_dim"] or values["model.dim"] // values["model.n_heads"]
    implied_format = "messages" if values["data.messages_field"] else "text"
    row_format = values["data.format"] or implied_format
    return {**values, "model.head_dim": head_dim, "data.format": row_format}


def word_of(name: str) -> str:
    """What a resume may do with an option; one that this version does not have cannot be kept."""
    option = config.SCHEMA.options.get(name)
    return option.resume if option else "run"


def as_text(value: Any) -> str:
    if value is None:
        return "absent"
    return value if isinstance(value, str) else config.toml(value)


def check_same_run(
    cfg: config.Config, folder: pathlib.Path, words: tuple[str, ...] = SAME_RUN
) -> None:
    """Raises ConfigError naming every option of these words that differs from the checkpoint's,
    unless checkpoint.allow_changed names it."""
    problems = []
    for name, (before, now) in changed_options(cfg, folder, words).items():
        if name in allowed_changes(cfg.checkpoint):
            continue
        allowance = f'checkpoint.allow_changed = ["{name}"]'
        advice = f"continue with that, choose another run.name, or allow it: {allowance}"
        if name not in config.SCHEMA.options:
            advice = "this version has no such option"
        advice = ADVICE.get(word_of(name), advice)
        problems.append(f"{name} = {now}: {folder} was trained with {before}; {advice}")
    if problems:
        raise ConfigError(*problems)


def allowed_changes(settings: config.Checkpoint | None) -> tuple[str, ...]:
    return settings.allow_changed if settings else ()


def changes_since(cfg: config.Config, folder: pathlib.Path) -> list[str]:
    """A line for the log, or none: what makes another run of this one, because it is allowed or a
    recipe's."""
    changes = changed_options(cfg, folder, (*SAME_RUN, "recipe"))
    if cfg.optim.schedule_steps or cfg.optim.schedule == "constant":
        changes.pop("train.steps", None)  # without these the learning rate's schedule ends there
    if cfg.parallel.param_dtype == "auto":
        changes.pop("parallel.param_dtype", None)  # a resume keeps that of the checkpoint
    if not changes:
        return []
    texts = [f"{name} {before} -> {now}" for name, (before, now) in changes.items()]
    return [f"changed since {folder}: {', '.join(texts)}; another run: --run.name=NAME"]


def check_base(folder: pathlib.Path, init_from: str | None, base: str | None) -> None:
    """Raises ConfigError if a checkpoint's adapters were trained on a base with another
    fingerprint."""
    before = read_state(folder).get("base")
    if before != base:
        raise ConfigError(
            f"[model] init_from = {config.toml(init_from or '')}: its weights have the hash {base}, "
            f"but {folder} was trained on a base with {before}; name the folder with that base"
        )


def by_source(identities: list[dict]) -> dict[str, Any]:
    """The identities of prepared data, {"source 1.identity.source": ..., ...}."""
    return config.flatten({f"source {n}": entry for n, entry in enumerate(identities, 1)})


def check_same_data(
    folder: pathlib.Path, settings: config.Checkpoint | None, identities: list[dict]
) -> None:
    """Raises ConfigError, naming what differs, if the prepared data is another than that which a
    checkpoint was trained on, unless checkpoint.allow_changed allows it."""
    for name in allowed_changes(settings):
        # the tokenizer that is trained by default has the vocabulary's size
        if word_of(name) == "data" or name == "model.vocab_size":
            return
    trained_on = read_state(folder).get("data") if folder.is_dir() else None
    if trained_on is None:
        return
    old = by_source(trained_on)
    new = by_source(identities)
    changes = []
    for key in sorted(old | new):
        if old.get(key) != new.get(key):
            changes.append(f"{key} was {old.get(key)}, is {new.get(key)}")
    if changes:
        raise ConfigError(
            f"{folder}: was trained on other data: {'; '.join(changes)}; choose another run.name, "
            'or allow it: checkpoint.allow_changed = ["data.source"]'
        )


def other_tokenizer(folder: pathlib.Path, files: list[pathlib.Path]) -> list[str]:
    """A warning if the data was prepared with another tokenizer (these files) than the
    checkpoint's, else none."""
    saved = []
    for name, entry in (read_manifest(folder) if folder.is_dir() else {}).items():
        if name.startswith("tokenizer."):
            saved.append(entry)
    if not saved or not files or any(entry_of(path.read_bytes()) in saved for path in files):
        return []
    return [
        f"{', '.join(map(str, files))}: is not the tokenizer that {folder} was trained with: its "
        "token ids mean other words to those weights"
    ]


def check_same_tokenizer(
    folder: pathlib.Path, settings: config.Checkpoint | None, files: list[pathlib.Path]
) -> None:
    """Raises ConfigError if the data was prepared with another tokenizer than the checkpoint's,
    unless checkpoint.allow_changed allows it."""
    problems = other_tokenizer(folder, files)
    if problems and "data.tokenizer" not in allowed_changes(settings):
        run = folder.parent.parent  # which keeps it, whatever checkpoints are removed
        keeps = run if any(run.glob("tokenizer.*")) else folder
        raise ConfigError(
            f'{problems[0]}; with data.tokenizer = "{keeps}" and checkpoint.allow_changed = '
            '["data.source", "data.tokenizer"] that one is kept'
        )
