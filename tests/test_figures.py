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
def test_figures_are_those_of_the_plan(monkeypatch, capsys):
    """Three drawings and two rows of the table; python -m docs.figures.make --check compares all in a minute."""
    drawn = {name: make.DRAWN[name] for name in ("step", "mesh", "losses")}
    monkeypatch.setattr(make, "DRAWN", drawn)
    written = {}  # tables by their rows' text
    for page, rows in make.FIT.items():
        written[rows] = make.TABLE.search((REPO / page).read_text())[0]
        names = re.findall(r"^\| `(.*?)`", written[rows], re.M)
        assert names == [row.split()[0] for row in rows.split(",")]
    of_readme = make.FIT["README.md"]
    assert written[of_readme].startswith(make.fit_table(",".join(of_readme.split(",")[:2])))
    for old, code, printed in ("9 x", 0, ""), ("8 x", 1, "README.md: differs\n"):
        monkeypatch.setattr(
            make, "fit_table", lambda rows, old=old: written[rows].replace(old, "9 x")
        )
        assert (make.main(["--check"]), capsys.readouterr().out) == (code, printed)
