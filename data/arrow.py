"""Files that pyarrow reads, which comes with `datasets`: parquet, and compressed JSON lines."""

import io
import pathlib
from collections.abc import Iterator
from typing import Any

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 1 << 16  # bytes
# of a parquet file, read at a time: no more than either
BATCH_ROWS = 1024
BATCH_BYTES = 1 << 24


def decompressed(file: io.BufferedReader, suffix: str) -> io.BufferedReader:
    """Opens the decompressed bytes of an open compressed file."""
    import pyarrow

    stream = pyarrow.CompressedInputStream(file, COMPRESSIONS[suffix])
    return io.BufferedReader(stream, BUFFER)


def parquet_rows(
    path: pathlib.Path, column: str, read: int
) -> Iterator[tuple[int, int, dict[str, object]]]:
    """Yields (number of the row from 1, rows of the file, {column: value}) of all rows after the
    first `read`. A file without the column has one row, which names its columns. Raises whatever
    pyarrow raises."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    metadata = file.metadata
    names = file.schema_arrow.names
    if column not in names:
        if metadata.num_rows:
            yield 1, metadata.num_rows, dict.fromkeys(names)
        return
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    # row groups that were read are not opened again
    first_group = 0
    position = 0  # rows before the next batch
    while first_group < len(groups) and position + groups[first_group].num_rows <= read:
        position += groups[first_group].num_rows
        first_group += 1
    row_bytes = max([1, *map(mean_row_bytes, groups)])
    batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
    unread_groups = list(range(first_group, len(groups)))
    for batch in file.iter_batches(batch_rows, unread_groups, [column]):
        skipped = max(0, read - position)
        values = batch[column][skipped:].to_pylist()
        for number, value in enumerate(values, position + skipped + 1):
            yield number, metadata.num_rows, {column: value}
        position += batch.num_rows


def mean_row_bytes(group: Any) -> int:
    """Bytes of a row of a row group on average, from its pyarrow.parquet.RowGroupMetaData."""
    if not group.num_rows:
        return 0
    return group.total_byte_size // group.num_rows
