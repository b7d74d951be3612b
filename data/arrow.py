"""Files that pyarrow reads, which comes with `datasets`: parquet, Arrow, and compressed JSON."""

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
    path: pathlib.Path, columns: tuple[str, ...], read: int
) -> Iterator[tuple[int, int, dict[str, object]]]:
    """Yields (number of the row from 1, rows of the file, {column: value}) of all rows after the
    first `read`. columns: those to read; empty: all. A file without any of them has one row, which
    names its columns. Raises whatever pyarrow raises."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    metadata = file.metadata
    names = columns_in(file.schema_arrow.names, columns)
    if not names:
        if metadata.num_rows:
            yield 1, metadata.num_rows, dict.fromkeys(file.schema_arrow.names)
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
    for batch in file.iter_batches(batch_rows, unread_groups, names):
        skipped = max(0, read - position)
        rows = batch.select(names)[skipped:].to_pylist()
        for number, row in enumerate(rows, position + skipped + 1):
            yield number, metadata.num_rows, row
        position += batch.num_rows


def arrow_rows(
    path: pathlib.Path, columns: tuple[str, ...], read: int
) -> Iterator[tuple[int, int, dict[str, object]]]:
    """As parquet_rows(), of a file of record batches: datasets.save_to_disk() writes them. Yields
    (number of the row, bytes up to the end of its batch, row)."""
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as file:
        schema, batches = record_batches(file)
        names = columns_in(schema.names, columns)
        position = 0
        for batch in batches:
            if not names and batch.num_rows:
                yield 1, file.tell(), dict.fromkeys(schema.names)
                return
            first = max(0, read - position)
            for start in range(first, batch.num_rows, BATCH_ROWS):
                rows = batch.select(names).slice(start, BATCH_ROWS).to_pylist()
                for number, row in enumerate(rows, position + start + 1):
                    yield number, file.tell(), row
            position += batch.num_rows


def record_batches(file: Any) -> tuple[Any, Iterator[Any]]:
    """(schema, batches) of an Arrow file: of its streaming format, or of the one with an index."""
    import pyarrow.ipc

    magic = b"ARROW1"
    has_index = file.read(len(magic)) == magic
    file.seek(0)
    if has_index:
        reader = pyarrow.ipc.open_file(file)
        return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    stream = pyarrow.ipc.open_stream(file)
    return stream.schema, iter(stream)


def columns_in(names: list[str], columns: tuple[str, ...]) -> list[str]:
    """Those of the columns that a file has, which are `names`; without columns, all."""
    if not columns:
        return names
    return [name for name in columns if name in names]


def mean_row_bytes(group: Any) -> int:
    """Bytes of a row of a row group on average, from its pyarrow.parquet.RowGroupMetaData."""
    if not group.num_rows:
        return 0
    return group.total_byte_size // group.num_rows
