"""The rows that were written are read, of the files that a source names; anything else is refused, or logged."""

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import pathlib
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import config
from system import warn_once
from tests.conftest import make_config, refuses, words
from tools.prepare import row_format, rows
from tools.prepare import source as source_module
from tools.prepare.source import ByteRange, list_files

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.quick

TEXTS = ["plain", "two\nlines\r\n", 'é猫😀 \\ " {[', " \t", "2001-02-03", words(0, 30_000), "last"]
BOM = codecs.BOM_UTF8


def options(source: object, **data: Any) -> config.Data:
    return make_config(data={"source": str(source), **data}).data


def documents(source: object, **data: Any) -> list[str]:
    d = options(source, **data)
    return list(source_module.documents(d, map(ByteRange, list_files(d)[0])))


def lines(texts: Sequence[str | None], end: str = "\n", **style: Any) -> bytes:
    written = [json.dumps({"id": i, "text": text}, **style) for i, text in enumerate(texts)]
    return "".join(line + end for line in written).encode()


def table(texts: Sequence[str | None]) -> Any:
    """With a column that nobody reads."""
    days = pyarrow.array(range(len(texts)), pyarrow.date32())
    return pyarrow.table({"day": days, "text": pyarrow.array(texts, "string")})


def as_parquet(texts: Sequence[str | None], rows_in_group: int = 2) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table(texts), sink, row_group_size=rows_in_group)
    return sink.getvalue().to_pybytes()


def as_arrow(texts: list[str], new: Callable = pyarrow.ipc.new_stream) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with new(sink, table(texts).schema) as writer:
        writer.write_table(table(texts), max_chunksize=3)
    return sink.getvalue().to_pybytes()


def as_table(texts: list[str], end: str = "\n", delimiter: str = ",") -> bytes:
    """As csv.writer() makes it."""
    written = io.StringIO(newline="")
    rows_of_table = [["text", "id"], *([text, i] for i, text in enumerate(texts))]
    csv.writer(written, lineterminator=end, delimiter=delimiter).writerows(rows_of_table)
    return written.getvalue().encode()


def make(folder: pathlib.Path, *names: str) -> None:
    """Files of a row each, or links: "name->target"."""
    for name in names:
        link, _, target = name.partition("->")
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (folder / link).symlink_to(target)
        else:
            (folder / link).write_text(json.dumps({"text": name}) + "\n")


FORMS = {
    "lines.jsonl": lines(TEXTS),
    "mark-and-crlf.jsonl": BOM + lines(TEXTS, "\r\n"),
    "without-end.jsonl": lines(TEXTS).rstrip(),
    "array.json": BOM + json.dumps([{"text": text} for text in TEXTS], indent=3).encode(),
    "two-members.jsonl.gz": gzip.compress(lines(TEXTS[:3])) + gzip.compress(lines(TEXTS[3:])),
    "frames.json.zst": b"".join(pyarrow.compress(lines([t]), "zstd", asbytes=True) for t in TEXTS),
    "quoted.csv": as_table(TEXTS),
    "excel.csv": BOM + as_table(TEXTS, "\r\n"),
    "tabs.tsv": as_table(TEXTS, delimiter="\t"),
    "groups.parquet": as_parquet(TEXTS),
    "stream.arrow": as_arrow(TEXTS),
    "indexed.arrow": as_arrow(TEXTS, pyarrow.ipc.new_file),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_those_that_were_written(name, tmp_path):
    (tmp_path / name).write_bytes(FORMS[name])
    assert documents(tmp_path / name) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md", "a.rst", "a.py"])
def test_a_text_file_is_one_document(name, tmp_path):
    text = "日本 the cat sat\r\n" * 20_000
    content = BOM + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert documents(tmp_path / name, text_field="body") == [text]


def test_of_the_library_tests_packages_and_latin_1_are_left_out(tmp_path, monkeypatch):
    names = "a.py email/b.py email/test.py site-packages/d.py test/f.py email/tests/g.py"
    make(tmp_path, *names.split())
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    read = sorted(json.loads(text)["text"] for text in documents("python-stdlib"))
    assert read == ["a.py", "email/b.py", "email/test.py"]


@pytest.mark.parametrize("pattern, name", [("", "{0}.txt"), ("**/*.txt", "{1}/{0}.txt")])
def test_files_are_read_by_the_hash_of_their_names(pattern, name, tmp_path):
    names = [name.format(n, n % 3) for n in range(30)]
    make(tmp_path, *names)
    in_order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    paths = [file.path for file in list_files(options(tmp_path / pattern))[0]]
    assert [os.path.relpath(path, tmp_path) for path in paths] == in_order


FOLDERS = [  # files that are read, others, what is logged of those
    ("a.jsonl", "b.jsonl.xz more/c.jsonl.xz d.part", "2 .xz, 1 .part"),
    ("a.csv b.tsv", "README.md ._a.txt load.py cache-1.arrow", "1 README.md, 1 .arrow, 1 .py"),
    ("a.txt a.md b.txt c.jsonl more/deep/c.JSON", "", None),  # no copies
]


@pytest.mark.parametrize("read, left, line", FOLDERS)
def test_a_folder_is_read_with_its_subfolders_and_what_is_not_read_is_counted(
    read, left, line, tmp_path, capfd
):
    warn_once.cache_clear()
    make(tmp_path, *f"{read} {left}".split())
    paths = [os.path.relpath(file.path, tmp_path) for file in list_files(options(tmp_path))[0]]
    assert sorted(paths) == sorted(read.split())
    log = capfd.readouterr().err
    assert f"{tmp_path}: not read: {line}" in log if line else not log


def test_what_save_to_disk_wrote_the_last_time_is_read_without_caches(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    texts = [f"text {i}" for i in range(9)]
    made = datasets.Dataset.from_dict({"other": texts, "text": texts})
    for shards in (4, 3):
        datasets.DatasetDict({"train": made}).save_to_disk(tmp_path, num_shards={"train": shards})
    (tmp_path / "train/cache-0123.arrow").write_bytes(as_arrow(TEXTS))
    assert sorted(documents(tmp_path / "train")) == texts
    with refuses(f"holds splits; name one: {tmp_path}/train$"):
        documents(tmp_path)


REFUSED = r"""
 a.pdf b.pdf more/c.docx README.md .g | .            | holds 2 .pdf, 1 README.md, 1 .docx, and no file
 notes.doc                           | notes.*        | notes.doc: must be one of
 a.jsonl b.jsonl->nowhere.jsonl      | .              | b.jsonl: cannot be read: FileNotFoundError
 a.jsonl a.jsonl.gz                  | .              | a.jsonl: holds the text of .*a.jsonl.gz, it
 a.txt a.txt.gz b.md                 | *              | a.txt.gz: holds the text of a.txt
 deep/a.JSONL deep/a.parquet b.jsonl | **/*           | a.parquet: holds the text of deep/a.JSONL
 b.jsonl b-latest.jsonl->b.jsonl     | .              | jsonl: holds the text of .*b
 deep/b.jsonl other->deep            | .              | is the same folder as
"""


@pytest.mark.parametrize("row", REFUSED.strip("\n").splitlines(), ids=str.strip)
def test_source_that_does_not_name_text_is_refused(row, tmp_path, monkeypatch):
    files, source, problem = map(str.strip, row.split(" | "))
    monkeypatch.chdir(tmp_path)
    make(tmp_path, *files.split())
    with refuses(problem):
        list_files(options(source))


CUT = gzip.compress(lines([words(i, 900) for i in range(99)]))[:9000]
WRONG = [
    ("a.jsonl", b'{"text": "a"}\n\n{"text" 2}', "row 3: is not valid JSON, as each line"),
    ("a.jsonl", rb'{"text": "\ud800"}', "row 1: is not valid Unicode"),
    ("a.csv", b'text,n\n"two\nlines",1\n\nb\n', "row 5: has 1 values, but the first row 2 columns"),
    ("a.csv", b"text\na\n\xff\n", "row 3: is not valid Unicode"),
    ("a.csv", b'text\n"a\nb\n', "row 2: is not valid CSV: .*end of data; fix its quotation"),
    ("a.csv", b"text,text\na,b\n", "row 1: names a column twice: text, text"),
    ("a.tsv", b'text\tn\na\t1\n"b\t2\nc"\t3\n', "row 3: quotation marks join .* up to 4"),
    ("a.csv", b'n,text\n1,"a\n2,b\n3,c\n4,d\n5,e"\n', "row 2: quotation marks join .* up to 6"),
    ("a.jsonl.gz", CUT, r"rows from \d+: cannot be read: OSError: Truncated"),
    ("a.arrow", as_arrow(TEXTS)[:-8], "is cut after row 7: the stream has no end mark"),
]


@pytest.mark.parametrize("name, content, problem", WRONG)
def test_what_is_wrong_is_named_by_file_and_row(name, content, problem, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refuses(f"{name}: {problem}") as refused:
        documents(tmp_path / name)
    assert "\n" not in str(refused.value)


def test_wrong_rows_of_a_table_alone_are_left_out(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,n\na,1\nb\n"c" d,2\ne,3\n')
    assert documents(tmp_path / "a.csv", bad_rows="skip") == ["a", "e"]


@pytest.mark.parametrize("name, write", [("a.jsonl", lines), ("a.parquet", as_parquet)])
def test_a_row_of_more_than_64_mib_is_refused(name, write, tmp_path, monkeypatch):
    assert rows.LARGEST_ROW == row_format.LARGEST_ROW == 64 << 20
    for module in (rows, row_format):
        monkeypatch.setattr(module, "LARGEST_ROW", 1 << 20)
    (tmp_path / name).write_bytes(write(["a", "é" * (1 << 19) + "b"]))
    with refuses(f"{name}: row 2: is longer than 1 MiB; split it"):
        documents(tmp_path / name)
