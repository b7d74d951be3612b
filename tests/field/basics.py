"""The smallest situations: a text file that trains, and a source that is not there."""

from tests.conftest import words
from tests.field.situation import DONE, Situation

SITUATIONS = [
    Situation(
        "a text file of one's own",
        "base.toml --data.source=mine.txt",
        (DONE,),
        {"mine.txt": words(1, 4000)},
    ),
    Situation(
        "a source whose name is misspelt",
        "base.toml --data.source=mien.txt",
        ("mien.txt: no such file",),
        {"mine.txt": words(1, 4000)},
        exit_code=2,
    ),
]
