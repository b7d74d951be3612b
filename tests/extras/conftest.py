"""The tests of an extra that was removed are not collected."""

import pathlib

import config

HERE = pathlib.Path(__file__).parent
collect_ignore = [path.name for path in HERE.iterdir() if not config.has_extra(path.name)]
