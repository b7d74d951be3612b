"""What changed options mean for a run that resumes, in figures."""

import math
from collections.abc import Iterator

import config
from checkpoint import catalog
from config import Config, ConfigError
from data.mixture import Mixture
from optim import learning_rate

SAME_RATE = 0.01  # relative: what a step of a schedule may differ by


def changes(cfg: Config, step: int) -> list[str]:
    """A warning for each number that goes on otherwise after the step that a run resumes from. None
    if its checkpoint has the same options, or there is none."""
    folder = catalog.path_of(catalog.root_of(cfg), step)
    if step == 0 or not folder.is_dir():
        return []
    try:
        before = catalog.read_config(folder)
    except ConfigError:  # a fork's, whose options have changed
        return []
    return [*_rate(before, cfg, step), *_samples(before, cfg, step)]


def _rate(before: Config, now: Config, step: int) -> Iterator[str]:
    expected, rate = (
        learning_rate(cfg.optim, config.schedule_steps(cfg), step + 1) for cfg in (before, now)
    )
    if math.isclose(rate, expected, rel_tol=SAME_RATE):
        return
    last = learning_rate(before.optim, config.schedule_steps(before), step)
    text = f"the learning rate was {last:.4g} at step {step}, and is {rate:.4g} at step {step + 1}"
    if before.optim.decay_steps:
        decay = config.schedule_steps(before) - before.optim.decay_steps
        saved = [older for older in catalog.steps(catalog.root_of(now)) if older <= decay]
        if step > decay and saved:
            text += f"; to resume before its decay, which began after step {decay}: "
            text += f"--checkpoint.resume={max(saved)}"
        elif step > decay:
            text += f"; its decay began after step {decay}, and no checkpoint before that is left"
    yield text


def _samples(before: Config, now: Config, step: int) -> Iterator[str]:
    """Each source resumes at the sample that follows from step, batch size and weights."""
    if before.train.seq_len != now.train.seq_len:
        yield (
            f"train.seq_len {before.train.seq_len} -> {now.train.seq_len}: samples are cut and "
            "ordered anew: this epoch reads some text again, and some not at all"
        )
        return
    read = _samples_read(before, step)
    for source, following in _samples_read(now, step).items():
        last = read.get(source, 0)
        if following > last:
            yield f"{source}: its samples {last + 1:,} to {following:,} are not read in this epoch"
        elif following < last:
            yield f"{source}: its samples {following + 1:,} to {last:,} are read again"


def _samples_read(cfg: Config, step: int) -> dict[str, int]:
    """How many samples of each source a run reads up to a step."""
    names = [" ".join(filter(None, (s.source, s.subset, s.split))) for s in cfg.data.sources]
    mixture = Mixture([source.weight for source in cfg.data.sources] or [1.0])
    samples = step * cfg.train.global_batch_size
    return {name: mixture.count(i, samples) for i, name in enumerate(names or [cfg.data.source])}
