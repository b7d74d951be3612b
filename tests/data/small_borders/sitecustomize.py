"""Python imports this module by itself: text of kilobytes has several segments, and is prepared slowly.

PYTHONPATH=tests/data/small_borders:. SLOWLY_AFTER=FILE     a pause after each record, once the file exists; until then
                                                            only the first records are made
"""

import itertools
import os
import pathlib
import time
from typing import Any

import data.order

data.order.FIRST_BORDER = 4096
data.order.BORDER_STEP = 8192
data.order.HELD_OUT_OF = 16384

import data.prepare  # noqa: E402  # takes the values from above

data.prepare.BATCH_CHARACTERS = 4000
data.prepare.RECORD_SECONDS = 0.0
TokenWriter: Any = data.prepare.TokenWriter
record = TokenWriter.record
records = itertools.count()


def record_slowly(writer: Any) -> None:
    record(writer)
    file = os.environ.get("SLOWLY_AFTER")
    while file and next(records) > 6 and not pathlib.Path(file).exists():
        time.sleep(0.05)
    time.sleep(0.2 if file else 0)


TokenWriter.record = record_slowly
