"""Compares a checkpoint with the run that wants to use it: options, prepared data, tokenizer, base
model of adapters. Each option declares what a resume may do with it (config/option.py: Resume)."""

import math
import pathlib
from collections.abc import Callable
from typing import Any

import config
from checkpoint import catalog
from checkpoint.catalog import path_of, read_state
from config import ConfigError


def starting_point(
    cfg: config.Config,
    evaluating: bool,
    problems_with: Callable[[pathlib.Path], list[str]] = catalog.wrong_sizes,
    on_one_rank: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> tuple[list[int], int, dict[int, list[str]]]:
    """Where a run starts, resumes or is evaluated: (the steps of its checkpoints; the step to resume
    after, 0 for a new run; the problems of newer checkpoints, by step).

    The launcher only compares the sizes of files. Ranks pass functions that hash them together, and
    that let one rank read the disk for all. Raises ConfigError if `resume` contradicts the
    checkpoints, if none is good, or if the chosen one belongs to another run.
    """
    root = catalog.root_of(cfg)
    saved = on_one_rank(lambda: catalog.steps(root))
    if not saved:
        on_one_rank(lambda: catalog.refuse_misplaced(root))
    step, corrupt = catalog.choose(root, saved, cfg.checkpoint, problems_with, evaluating)
    on_one_rank(lambda: check_same_run(cfg, path_of(root, step), evaluating))
    return saved, step, corrupt


def changed_options(
    cfg: config.Config, folder: pathlib.Path, kinds: tuple[str, ...] = ("fixed",)
) -> dict[str, tuple[str, str]]:
    """{option: (value in the checkpoint, value now)}, as text, of the options whose value changed and
    whose `resume` is one of `kinds`. An option that the checkpoint lacks had its default. Empty
    without a checkpoint."""
    if not folder.is_dir():
        return {}
    before = with_implied_values(config.values_of(read_state(folder)["config"]))
    now = with_implied_values(config.values_of(config.to_dict(cfg)))
    changed = {}
    for name in sorted(before.keys() - config.SCHEMA.tables.keys()):  # an empty table has no option
        option = config.SCHEMA.options.get(name)
        kind = option.resume if option else "fixed"  # a removed option
        if before[name] != now.get(name) and kind in kinds:
            changed[name] = (as_text(before[name]), as_text(now.get(name)))
    if cfg.lora:
        # The base may have moved, and its tokenizer with it. check_base() compares the weights
        # themselves, check_same_data() the tokenizers.
        moved = changed.pop("model.init_from", None)
        if changed.get("data.tokenizer") == moved:
            changed.pop("data.tokenizer", None)
    return changed


def with_implied_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values, and for absent ones what other options imply."""
    head_dim = values["model.head_dim"] or values["model.dim"] // values["model.n_heads"]
    implied_format = "messages" if values["data.messages_field"] else "text"
    row_format = values["data.format"] or implied_format
    return {**values, "model.head_dim": head_dim, "data.format": row_format}


def as_text(value: Any) -> str:
    if value is None:
        return "absent"
    return value if isinstance(value, str) else config.toml(value)


def check_same_run(cfg: config.Config, folder: pathlib.Path, evaluating: bool = False) -> None:
    """Raises ConfigError naming every fixed option that differs from the checkpoint's, unless
    checkpoint.allow_changed names it. evaluating: compares only options that change the forward pass."""
    problems = []
    not_computed = ("model.freeze", "model.init_from")
    for name, (before, now) in changed_options(cfg, folder).items():
        is_compared = not evaluating or (
            name.startswith(("model.", "lora.")) and name not in not_computed
        )
        if name in allowed_changes(cfg.checkpoint) or not is_compared:
            continue
        problems.append(
            f"{name} = {now}: {folder} was trained with {before}; continue with that, choose another "
            f'run.name, or, if the weights still fit, allow it: checkpoint.allow_changed = ["{name}"]'
        )
    if problems:
        raise ConfigError(*problems)


def allowed_changes(settings: config.Checkpoint | None) -> tuple[str, ...]:
    return settings.allow_changed if settings else ()


def changes_since(cfg: config.Config, folder: pathlib.Path) -> list[str]:
    """A line for the log with the changed options whose `resume` is not "free", if there are any."""
    changes = changed_options(cfg, folder, ("fixed", "logged"))
    if cfg.optim.schedule_steps or cfg.optim.schedule == "constant":
        changes.pop("train.steps", None)  # else it is the end of the learning rate's schedule
    if not changes:
        return []
    texts = [f"{name} {before} -> {now}" for name, (before, now) in changes.items()]
    return [f"changed since {folder}: {', '.join(texts)}; another run: --run.name=NAME"]


def validation_change(cfg: config.Config, folder: pathlib.Path) -> list[str]:
    """A line for the log if the validation text has changed: eval.batches counts batches, whose size
    may differ."""
    if not (folder.is_dir() and cfg.eval and cfg.eval.batches):
        return []
    before = config.values_of(read_state(folder)["config"])
    sizes = [before[name] for name in ("eval.batches", "train.global_batch_size", "train.seq_len")]
    now = cfg.eval.batches * config.tokens_per_step(cfg.train)
    if None in sizes or math.prod(sizes) == now:
        return []
    return [
        f"eval.batches = {cfg.eval.batches}: the validation text was {math.prod(sizes):,} tokens, is "
        f"{now:,}: results from before are of another text"
    ]


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
    """The identities of prepared data as {"source 1.identity.source": ..., ...}."""
    return config.flatten({f"source {n}": entry for n, entry in enumerate(identities, 1)})


def check_same_data(
    folder: pathlib.Path, settings: config.Checkpoint | None, identities: list[dict]
) -> None:
    """Raises ConfigError, naming what differs, if a checkpoint was trained on other prepared data,
    unless checkpoint.allow_changed allows it."""
    for name in allowed_changes(settings):
        # The tokenizer that is trained by default has the vocabulary's size.
        is_of_data = name.startswith("data.") or name == "model.vocab_size"
        if is_of_data and name != "data.document_mask":
            return
    trained_on = read_state(folder).get("data") if folder.is_dir() else None
    if trained_on is None:
        return
    old = by_source(trained_on)
    new = by_source(identities)
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    changes = [f"{key} was {old.get(key)}, is {new.get(key)}" for key in changed]
    if changes:
        raise ConfigError(
            f"{folder}: was trained on other data: {'; '.join(changes)}; choose another run.name, "
            'or allow it: checkpoint.allow_changed = ["data.source"]'
        )


def check_same_tokenizer(folder: pathlib.Path, identities: list[dict]) -> None:
    """Raises ConfigError if the data was prepared with another tokenizer than the checkpoint's data:
    its ids mean other words to these weights."""
    trained_on = read_state(folder).get("data") or [] if folder.is_dir() else []
    known = {source["tokenizer"] for source in trained_on}
    for source in identities:
        if known and source["tokenizer"] not in known:
            raise ConfigError(
                f"{folder}: was trained on ids of another tokenizer ({', '.join(map(str, known))}) "
                f"than the data is prepared with ({source['tokenizer']}); a run keeps its own: "
                f"data.tokenizer = {config.toml(str(folder.parent.parent))}"
            )
