"""[[data.sources]]: the order in which the samples of several sources come, and the tokenizer that they share."""

import math
import os
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import config
from config import LONGEST_PERIOD, ConfigError
from data.identity import identity, short_hash


class Mixture:
    """Which source a sample of the run comes from, and how many of that source came before it.

    Of the first n samples, a source of share w gets w n, rounded up or down, for every n and source
    (https://doi.org/10.1007/BF01940883): its j-th sample may come at number floor((j-1) / w) or later and is due by
    ceil(j / w); the eligible one with the earliest deadline is next. The order is periodic; a table holds one period.
    """

    def __init__(self, weights: Sequence[float]):
        self.parts = whole_parts(weights)  # samples of each source in a period
        self.period = sum(self.parts)
        self.table: list[tuple[int, int]] = []  # (source, its earlier samples in the period)
        given = [0] * len(self.parts)
        for number in range(self.period):
            _, source = min(
                (-(-(given[i] + 1) * self.period // part), i)
                for i, part in enumerate(self.parts)
                if given[i] * self.period // part <= number and given[i] < part
            )
            self.table.append((source, given[source]))
            given[source] += 1

    def __call__(self, number: int) -> tuple[int, int]:
        turn, place = divmod(number, self.period)
        source, before = self.table[place]
        return source, turn * self.parts[source] + before


def whole_parts(weights: Sequence[float]) -> list[int]:
    """The weights as integers in the same ratio, or close to it, with a sum of at most LONGEST_PERIOD."""
    exact = [Fraction(repr(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    near = [share.limit_denominator(LONGEST_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in near))
    if sum(near) == 1 and period <= LONGEST_PERIOD:
        return [int(share * period) for share in near]
    parts = [int(share * LONGEST_PERIOD) for share in shares]
    by_rest = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i] * LONGEST_PERIOD)
    for i in by_rest[: LONGEST_PERIOD - sum(parts)]:
        parts[i] += 1
    return parts


def sources_of(cfg: config.Config, tokenizer: str | None) -> list[config.Config]:
    """One configuration per source, with this tokenizer."""
    d = cfg.data
    return [
        replace(
            cfg,
            data=replace(
                d,
                sources=(),
                path=None,
                tokenizer=tokenizer,
                source=s.source,
                **{
                    key: getattr(s, key) or getattr(d, key)
                    for key in ("subset", "split", "text_field", "max_tokens", "validation")
                },
            ),
        )
        for s in d.sources
    ]


def common_tokenizer(cfg: config.Config) -> pathlib.Path:
    """The file of the tokenizer that is trained on all sources, if the mixture names none."""
    digest = short_hash(
        [[identity(part) for part in sources_of(cfg, None)], [s.weight for s in cfg.data.sources]]
    )
    return pathlib.Path(cfg.data.path or "prepared") / f"tokenizer-{digest}.model"


def has_tokenizer(cfg: config.Config) -> bool:
    """Whether the sources' tokenizer is named, or has been trained."""
    # unlike pathlib's, no error for an unreadable folder
    return bool(cfg.data.tokenizer) or os.path.exists(common_tokenizer(cfg))


def prepared_sources(cfg: config.Config) -> list[config.Config]:
    """The configuration that each source is prepared for. Raises ConfigError if their tokenizer has not been trained
    yet."""
    tokenizer = cfg.data.tokenizer or str(common_tokenizer(cfg))
    if not has_tokenizer(cfg):
        raise ConfigError(
            f"{tokenizer}: no prepared data; `python -m data.prepare CONFIG` makes it"
        )
    return sources_of(cfg, tokenizer)
