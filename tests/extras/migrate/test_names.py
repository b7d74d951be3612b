"""Names of other trainers, against the tables of docs/migrate.md."""

import re

import pytest

import config
from extras.migrate.names import NAMES
from tests.conftest import REPO


def rows() -> list[tuple[str, list[str], list[str]]]:
    """(torchtitan's section, names there, options here) of each row of the two tables."""
    text = (REPO / "docs/migrate.md").read_text()
    found = []
    for title in ("nanoGPT", "torchtitan"):
        section = ""
        for row in re.findall(r"^\|(.*)\|$", text.partition(f"| {title} | here")[2], re.M):
            theirs, ours, *_ = row.split("|")
            named = re.search(r"\*\*\[(\w+)\]\*\*", theirs)
            section = f"{named[1]}." if named else section
            names = re.findall(r"\b[a-z]\w*_?\w*\b", re.sub(r"\*\*.*\*\*|=.*", "", theirs))
            options = re.findall(r"`(\w+\.\w+)", ours)
            found.append((section, names, options))
    return found


# a name that is an option here, of another meaning
OTHER_MEANING = {"init_from"}


def test_every_name_of_the_tables_is_understood():
    checked = 0
    for section, names, options in rows():
        if not options:  # no equivalent
            continue
        for name in {*names} - OTHER_MEANING:
            suggestion = config.SCHEMA._suggestion(f"{section}{name}")
            assert suggestion in [f"; did you mean {option}?" for option in options], name
            checked += 1
    assert checked > 70


def test_what_is_suggested_exists_and_no_option_is_hidden():
    assert set(NAMES.values()) <= config.SCHEMA.options.keys() | config.SCHEMA.tables.keys()
    assert not NAMES.keys() & config.SCHEMA.options.keys()


@pytest.mark.parametrize(
    "name, option",
    [
        ("optim.learning_rate", "optim.lr"),
        ("train.batch_size", "train.global_batch_size"),
        ("eval.steps", "eval.every_steps"),  # eval_steps of others
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("training.steps", "train.steps"),
        ("train.sep_len", "train.seq_len"),  # a slip, as before
    ],
)
def test_a_habit_or_a_slip(name, option):
    with pytest.raises(config.ConfigError, match=rf"; did you mean {option}\?"):
        config.from_dict({}, "x.toml", [f"--{name}=1"])
