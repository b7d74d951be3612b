"""Files that pyarrow reads, which comes with `datasets`: parquet, and compressed JSON lines."""

import io
import itertools
import pathlib
from collections.abc import Iterator

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 1 << 16  # bytes
ROWS, BATCH_BYTES = 1024, 1 << 24  # of a parquet file, read at a time: no more than either


def decompressed(file: io.BufferedReader, suffix: str) -> io.BufferedReader:
    """The content of an open compressed file."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, COMPRESSED[suffix]), BUFFER)


def parquet_rows(
    path: pathlib.Path, field: str, read: int
) -> Iterator[tuple[int, int, dict[str, object]]]:
    """Yields (number of the row from 1, rows of the file, row) of all rows after the first `read`. Raises whatever
    pyarrow raises."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path)
    metadata = table.metadata
    rows = metadata.num_rows
    if field not in table.schema_arrow.names:
        if rows:
            yield 1, rows, dict.fromkeys(table.schema_arrow.names)
        return
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    ends = list(itertools.accumulate(group.num_rows for group in groups))
    first_group = sum(end <= read for end in ends)
    position = ends[first_group - 1] if first_group else 0  # rows before the next batch
    largest = max(
        (group.total_byte_size // group.num_rows for group in groups if group.num_rows), default=1
    )
    batch_rows = max(1, min(ROWS, BATCH_BYTES // max(1, largest)))
    for batch in table.iter_batches(batch_rows, list(range(first_group, len(groups))), [field]):
        skipped = max(0, read - position)
        for number, value in enumerate(batch[field][skipped:].to_pylist(), position + skipped + 1):
            yield number, rows, {field: value}
        position += batch.num_rows
