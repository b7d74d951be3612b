"""Borders of growing text for tests: a little text has several segments.

PYTHONPATH=tests/small_borders      sets them in every Python process of a run, before it begins
SECONDS_A_RECORD=0.2                prepares slowly: small chunks, and a pause after each record
"""

import os
import time

VALUES = {
    "FIRST_BORDER": 4096,
    "BORDER_STEP": 8192,
    "HOLD_OUT_BEFORE": 30_000,
}


def shrink() -> None:
    import data.prepare
    import data.record

    data.prepare.SMALL = 0  # no text is prepared before a run
    for name, value in VALUES.items():
        setattr(data.record, name, value)
    seconds = float(os.environ.get("SECONDS_A_RECORD", "0"))
    if seconds:
        slow_down(seconds)


def slow_down(seconds: float) -> None:
    """Prepares in small chunks, with a pause after each record."""
    import data.encode
    import data.prepare
    import data.writer

    record = data.writer.TokenWriter.record

    def slowly(writer: data.writer.TokenWriter) -> None:
        record(writer)
        time.sleep(seconds)

    data.writer.TokenWriter.record = slowly
    data.encode.CHUNK, data.prepare.SYNC_SECONDS = 20_000, 0.0
