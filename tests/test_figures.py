"""The figures of README and docs are those that docs/figures/make.py draws by the plan."""

import re

import pytest
import torch

from tests.conftest import REPO

make = pytest.importorskip("docs.figures.make", exc_type=ModuleNotFoundError)  # needs tools/
pytestmark = pytest.mark.early
PINNED = (REPO / "requirements.txt").read_text().split("\n")[0].removeprefix("torch==")


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED, reason="the figures are those of the pinned torch"
)
def test_figures_are_those_of_the_plan():
    """Three drawings, and two rows of a table; python -m docs.figures.make --check compares all in a minute."""
    for name in ("step", "mesh", "losses"):
        assert make.DRAWN[name]() == (make.FIGURES / f"{name}.svg").read_text(), name
    for page, rows in make.FIT.items():
        written = make.TABLE.search((REPO / page).read_text())[0]
        asked = rows.split(",")
        assert re.findall(r"^\| `(.*?)`", written, re.M) == [row.split()[0] for row in asked]
        if page == "README.md":
            assert written.startswith(make.fit_table(",".join(asked[:2])))
