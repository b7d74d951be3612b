"""Files that pyarrow reads, which comes with `datasets`: parquet, and compressed JSON lines."""

import io
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
COMPRESSED_UNIT = 1 << 20  # bytes of a compressed file, about three times as many of its text
BUFFER = 1 << 16  # bytes

Rows = Iterator[tuple[str, object]]  # (where, row)


def units(path: pathlib.Path, size: int) -> tuple[int, int]:
    """How many units a file of so many bytes has, and about how many bytes of text are one."""
    if path.suffix in COMPRESSED:
        return compressed_units(size), 3 * COMPRESSED_UNIT
    import pyarrow.parquet

    groups = pyarrow.parquet.ParquetFile(path).metadata.num_row_groups
    return groups, max(1, size // max(1, groups))


def compressed_units(size: int) -> int:
    return max(1, size // COMPRESSED_UNIT)


def rows(
    source: Any,
    path: pathlib.Path,
    parse: Callable[[pathlib.Path, str, bytes], Rows],
    piece: tuple[int, int] | None = None,
) -> Rows:
    """The rows of a file from where reading stopped, or of a piece of it: the units from the first to before the
    second. source: the data.sources.Files that reads it, whose row and byte this keeps up to date. parse: gives the row
    of a file's line, by its number. Raises whatever pyarrow raises."""
    if path.suffix in COMPRESSED:
        return compressed(source, path, parse, piece)
    return parquet(source, path, piece)


def compressed(
    source: Any,
    path: pathlib.Path,
    parse: Callable[[pathlib.Path, str, bytes], Rows],
    piece: tuple[int, int] | None,
) -> Rows:
    """JSON lines. Every piece decompresses all of its file: docs/data.md has the price."""
    with path.open("rb") as file:
        import pyarrow

        units = compressed_units(os.fstat(file.fileno()).st_size)
        begin, end = piece or (0, units)
        lines = io.BufferedReader(
            pyarrow.CompressedInputStream(file, COMPRESSED[path.suffix]), BUFFER
        )
        for number, line in enumerate(lines):
            if number >= source.row and begin <= number % units < end:
                source.row, source.byte = number + 1, file.tell()
                yield from parse(path, f"{source.row}", line)


def parquet(source: Any, path: pathlib.Path, piece: tuple[int, int] | None) -> Rows:
    import pyarrow.parquet

    field, table = source.d.text_field, pyarrow.parquet.ParquetFile(path)
    ends = [
        0,
        *itertools.accumulate(
            table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)
        ),
    ]
    first, last = source.parquet_rows(ends, path, *piece) if piece else (0, ends[-1])
    groups = [
        i for i, (a, b) in enumerate(itertools.pairwise(ends)) if max(a, first) < min(b, last)
    ]
    if groups and field not in table.schema_arrow.names:
        yield f"{path}: row 1", dict.fromkeys(table.schema_arrow.names)
    position = ends[groups[0]] if groups else 0  # rows before the next batch
    for batch in table.iter_batches(1024, groups, [field]):
        read = first + source.row
        for text in batch[field][max(0, read - position) : max(0, last - position)].to_pylist():
            source.row += 1
            source.byte = source.sizes[source.number] * source.row // ends[-1]
            yield f"{path}: row {first + source.row}", {field: text}
        position += batch.num_rows
