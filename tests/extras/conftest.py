"""The tests of an extra that was removed are not collected."""

import pathlib

from tests.conftest import has_extra

HERE = pathlib.Path(__file__).parent
collect_ignore = [path.name for path in HERE.iterdir() if not has_extra(path.name)]
