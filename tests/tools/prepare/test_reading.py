"""What is read is what was meant: the rows that were written, of the files that a source names;
anything else is refused, or told."""

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import pathlib
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import config
from system import warn_once
from tests.conftest import make_config, prepare_one, refuses, words
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


def array(texts: list[str], **style: Any) -> bytes:
    return json.dumps([{"text": text, "more": [{}, None]} for text in texts], **style).encode()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def table(texts: Sequence[str | None], kind: Any = "string") -> "pyarrow.Table":
    """With columns that nobody reads."""
    days = pyarrow.array(range(len(texts)), pyarrow.date32())
    return pyarrow.table({"day": days, "text": pyarrow.array(texts).cast(kind)})


def as_parquet(texts: Sequence[str | None], kind: Any = "string", rows_in_group: int = 2) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table(texts, kind), sink, row_group_size=rows_in_group)
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


FORMS = {
    "lines.jsonl": lines(TEXTS),
    "lines.json": lines(TEXTS, ensure_ascii=False),
    "mark-and-crlf.jsonl": BOM + lines(TEXTS, "\r\n"),
    "without-end.jsonl": lines(TEXTS).rstrip(),
    "array.json": array(TEXTS),
    "indented.json": BOM + b"\n".join([array(TEXTS, indent=3, ensure_ascii=False), b"\n"]),
    "two-members.jsonl.gz": gzip.compress(lines(TEXTS[:3])) + gzip.compress(lines(TEXTS[3:])),
    "two-frames.json.zst": zstd(lines(TEXTS[:3])) + zstd(lines(TEXTS[3:])),
    "quoted.csv": as_table(TEXTS),
    "excel.csv": BOM + as_table(TEXTS, "\r\n"),
    "blank-lines.csv.gz": gzip.compress(as_table(TEXTS, "\n\n")),
    "tabs.tsv": as_table(TEXTS, delimiter="\t"),
    "UPPER.JSONL.GZ": gzip.compress(lines(TEXTS)),
    "groups.parquet": as_parquet(TEXTS),
    "dictionary.parquet": as_parquet(TEXTS, pyarrow.dictionary(pyarrow.int32(), "string")),
    "stream.arrow": as_arrow(TEXTS),
    "indexed.arrow": as_arrow(TEXTS, pyarrow.ipc.new_file),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_those_that_were_written(name, tmp_path):
    (tmp_path / name).write_bytes(FORMS[name])
    assert documents(tmp_path / name) == TEXTS


# Texts without columns


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md", "a.rst", "a.py"])
def test_a_text_file_is_one_document(name, tmp_path):
    text = "日本 the cat sat\r\n" * 20_000
    content = BOM + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert documents(tmp_path / name, text_field="body") == [text]


def test_of_the_library_tests_packages_and_latin_1_are_left_out(tmp_path, monkeypatch):
    names = ("a.py", "email/b.py", "email/test.py", "email/c.txt", "site-packages/d.py")
    for name in (*names, "dist-packages/e.py", "test/f.py", "email/tests/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert sorted(documents("python-stdlib")) == ["a.py", "email/b.py", "email/test.py"]


# Which files


@pytest.mark.parametrize("pattern", ["", "*.txt", "*", "**/*.txt"])
def test_files_are_read_by_the_hash_of_their_names(pattern, tmp_path):
    names = [f"{n}.txt" for n in range(30)]
    if pattern == "**/*.txt":
        names = [f"{n % 3}/{n}.txt" for n in range(30)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    in_order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert documents(tmp_path / pattern) == in_order


def make(folder: pathlib.Path, names: str) -> None:
    """Files of a row each."""
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")


@pytest.mark.parametrize(
    "read, left, line",
    [
        ("a.jsonl more/b.jsonl more/deep/c.JSON", "", None),
        ("train-0.jsonl", "README.md data/readme.txt LICENSE.txt", "1 LICENSE.txt, 1 README.md"),
        ("a.jsonl", "b.jsonl.xz more/c.jsonl.xz d.part", "2 .xz, 1 .part"),
        ("a.txt a.md b.TXT", "._a.txt .ipynb_checkpoints/a.txt load.py", "1 .py"),
        ("a.csv b.tsv", "cache-1.arrow dataset_info.json notes", "1 .arrow, 1 .json, 1 without"),
    ],
)
def test_a_folder_is_read_with_its_subfolders_and_what_is_not_read_is_counted(
    read, left, line, tmp_path, capfd
):
    warn_once.cache_clear()
    make(tmp_path, f"{read} {left}")
    paths = [os.path.relpath(file.path, tmp_path) for file in list_files(options(tmp_path))[0]]
    assert sorted(paths) == sorted(read.split())
    log = capfd.readouterr().err
    assert f"{tmp_path}: not read: {line}" in log if line else not log


@pytest.mark.parametrize(
    "names, copies",
    [
        ("a.jsonl a.jsonl.gz", "a.jsonl: .*a.jsonl.gz"),
        ("a.txt a.txt.gz b.md", "a.txt.gz: .*a.txt"),
        ("deep/a.JSONL deep/a.parquet b.jsonl", "deep/a.parquet: .*deep/a.JSONL"),
        ("b.jsonl b-latest.jsonl->b.jsonl", "b-latest.jsonl: .*/b.jsonl"),
        ("deep/b.jsonl other->deep", "other: is the same folder as .*deep|deep: .*other"),
        ("a.txt a.md b.txt c.jsonl deep/c.jsonl", None),
    ],
)
@pytest.mark.parametrize("pattern", ["", "**/*"])
def test_text_that_a_source_names_twice_is_refused(names, copies, pattern, tmp_path):
    for name in names.split():
        link, _, target = name.partition("->")
        if target:
            (tmp_path / link).symlink_to(target)
        else:
            make(tmp_path, link)
    if not copies:
        assert len(list_files(options(tmp_path / pattern))[0]) == len(names.split())
        return
    with refuses(copies if not pattern or "other" not in names else "b.jsonl: holds the text of"):
        list_files(options(tmp_path / pattern))


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


@pytest.mark.parametrize(
    "source", ["my.csv", "my.md", "no/such/path/at.all", "./thing", "a-*.jsonl", "b.txt.gz"]
)
def test_what_looks_like_a_file_is_not_looked_for_on_a_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses(f"source = {source}".replace("*", "."), "no such file", r"\.jsonl, \.parquet"):
        documents(source)


def test_a_folder_without_a_file_to_read_is_refused_with_what_it_holds(tmp_path):
    make(tmp_path, "a.pdf b.pdf more/c.docx README.md .g")
    with refuses(r"holds 2 \.pdf, 1 README\.md, 1 \.docx, and no file", r"\.jsonl, .*\.md"):
        documents(tmp_path)


@pytest.mark.parametrize("name", ["notes.doc", "notes.*", "notes.parquet.gz", "notes"])
def test_a_file_of_another_kind_is_refused(name, tmp_path):
    (tmp_path / name.replace("*", "doc")).write_text('{"text": "a line of JSON"}\n')
    with refuses("source = .*notes", r"must be one of \.jsonl, \.parquet"):
        documents(tmp_path / name)


@pytest.mark.parametrize("source", ["folder", "folder/*.jsonl"])
def test_a_link_to_nothing_is_refused(source, tmp_path):
    """As in a cache that was cleared: without that file the text would be another."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "folder/b.jsonl").symlink_to("nowhere.jsonl")
    with refuses("b.jsonl: cannot be read: FileNotFoundError"):
        documents(tmp_path / source)


# Nothing to read, or what is wrong

CUT = gzip.compress(lines([words(i, 900) for i in range(99)]))[:9000]


def test_files_without_rows_are_skipped(tmp_path, prepared):
    for name, content in {
        "a.jsonl": b"",
        "b.json": b"[ ]\n",
        "c.jsonl": b"\n\n",
        "d.jsonl.gz": gzip.compress(b""),
        "e.parquet": as_parquet([]),
        "f.jsonl": b'{"text": ""}',
        "h.csv": b"",
        "i.tsv": b"text\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert documents(tmp_path) == []
    tokenizer = str(prepared / "tokenizer.model")
    data = {"source": str(tmp_path), "tokenizer": tokenizer, "path": str(prepared.parent / "empty")}
    with refuses("source = .*: holds no text"):
        prepare_one(make_config(data=data))
    (tmp_path / "g.jsonl").write_bytes(lines(["a"]))
    assert documents(tmp_path) == ["a"]


WRONG = [
    ("a.jsonl", b'{"text": "a"}\n\n{"text" 2}', "row 3: is not valid JSON, as each line"),
    ("a.jsonl", b'{"text": "\xff"}', "row 1: .*decode byte 0xff"),
    ("a.jsonl", b'{"a":' * 100_000, "row 1: is not valid JSON.*recursion"),
    ("a.jsonl", b'{"text": "a"}\n3', "row 2: must be an object, not int"),
    ("a.jsonl", b'{"body": "a", "n": 1}', r"row 1: has no field 'text' \(.*\), but body, n"),
    ("a.jsonl", b'{"text": null}', "row 1: field 'text' must be text, not NoneType"),
    ("a.jsonl", rb'{"text": "\ud800"}', "row 1: is not valid Unicode"),
    ("a.json", b'{\n"text": "a"\n}', "row 1: is not valid JSON, as each line must be"),
    ("a.json", b'[{"text": "a"},\n {"text" 2}]', "is not a valid JSON array: .*line 2 column 10"),
    ("a.json", b'[{"text": "a"}, ["b"]]', "row 2: must be an object, not list"),
    ("a.md", b"good\n\xff\n", "row 1: line 2: is not UTF-8"),
    ("a.txt", b"good\n" * 40_000 + b"\xe6\x97", "row 1: line 40001: is not UTF-8"),
    ("a.py", "# é".encode("latin-1"), "row 1: line 1: is not UTF-8"),
    ("a.csv", b'text,n\n"two\nlines",1\n\nb\n', "row 5: has 1 values, but the first row 2 columns"),
    ("a.csv", "text,n\na,1\n".encode("utf-16"), "row 1: is not UTF-8, but perhaps UTF-16"),
    ("a.csv", b'text\n"a" b\nc\n', "row 2: is not valid CSV"),
    ("a.csv", b"text\na\n\xff\n", "row 3: is not valid Unicode"),
    ("a.csv", b'text\n"a\nb\n', "row 2: is not valid CSV: .*end of data; fix its quotation"),
    (  # not a row that data.bad_rows leaves out
        "a.csv",
        b'text,n\n"a,1\nb,1\nc",1,2\nd,1\n',
        "row 2: has 3 values, .*; it ends in line 4: fix it, or its quotation marks$",
    ),
    ("a.csv", b"text,text\na,b\n", "row 1: names a column twice: text, text"),
    ("a.tsv", b"body\na\n", "row 2: has no field 'text'"),
    (
        "a.tsv",
        b'text\tn\na\t1\n"b\t2\nc"\t3\n',
        "row 3: quotation marks join .* up to 4, which look",
    ),
    ("a.csv", b'n,text\n1,"a\n2,b\n3,c\n4,d\n5,e"\n', "row 2: quotation marks join .* up to 6"),
    ("a.jsonl.gz", CUT, r"rows from \d+: cannot be read: OSError: Truncated"),
    ("a.json.zst", zstd(lines(TEXTS))[:-9], r"rows from \d+: cannot be read"),
    ("a.parquet", as_parquet(TEXTS)[:-9], "rows from 1: cannot be read: Arrow"),
    ("a.parquet", as_parquet(["a", "b", None]), "row 3: field 'text' must be text, not NoneType"),
    ("a.arrow", as_arrow(TEXTS)[:-2000], r"rows from \d+: cannot be read"),
    ("a.arrow", as_arrow(TEXTS)[:-8], "is cut after row 7: the stream has no end mark"),
    ("a.arrow", b"", "rows from 1: cannot be read: Arrow"),
]


@pytest.mark.parametrize("name, content, problem", WRONG)
def test_what_is_wrong_is_named_by_file_and_row(name, content, problem, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with refuses(f"{name}: {problem}") as refused:
        documents(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz", "line.csv", "values.csv"]
)
def test_a_row_of_more_than_64_mib_is_refused(name, tmp_path, monkeypatch):
    assert rows.LARGEST_ROW == row_format.LARGEST_ROW == 64 << 20
    for module in (rows, row_format):
        monkeypatch.setattr(module, "LARGEST_ROW", 1 << 20)
    long = "é" * (1 << 19)  # of 2 bytes each
    contents = {
        "a.jsonl": lines(["a", f"{long}b"], ensure_ascii=False),
        "a.jsonl.gz": gzip.compress(lines(["a", f"{long}b"])),
        "a.json": array(["a", f"{long}b"]),
        "a.parquet": as_parquet(["a", f"{long}b"]),
        "line.csv": b"text,n\n" + b"ab," * (1 << 19),
        "values.csv": f'text,n,m\n"a\n",{long},"\n{long}"'.encode(),
    }
    (tmp_path / name).write_bytes(contents[name])
    with refuses(f"{name}: row 2: is longer than 1 MiB; split it"):
        documents(tmp_path / name)
    (tmp_path / "b.parquet").write_bytes(as_parquet([long]))
    assert documents(tmp_path / "b.parquet") == [long]


def test_a_large_array_is_refused_with_the_command_that_makes_it_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LARGEST_ARRAY", 1000)
    (tmp_path / "a.json").write_bytes(array(["a" * 500, "b" * 500]))
    with refuses(r"a\.json: is an array of more than", "jq -cn --stream"):
        documents(tmp_path / "a.json")


# data.bad_rows


def wrong_in(total: int, *wrong: int) -> list[str | None]:
    """Texts by row, of which some are null."""
    return [None if row in wrong else f"text {row}" for row in range(1, total + 1)]


def as_messages(texts: Sequence[str | None]) -> bytes:
    """Conversations; in place of a null one without a role."""
    answer = {"role": "assistant", "content": "b"}
    written = []
    for text in texts:
        question = {"role": "user", "content": text} if text else {"content": "a"}
        written.append(json.dumps({"messages": [question, answer]}) + "\n")
    return "".join(written).encode()


# what is wrong with a row: a null, a ragged row, no role
KINDS = {
    "a.jsonl": lambda texts: lines(texts),
    "d.parquet": lambda texts: as_parquet(texts, rows_in_group=700),
    "e.csv": lambda texts: "".join(f"{text or ','},\n" for text in ["text", *texts]).encode(),
    "g.jsonl": as_messages,
}


@pytest.mark.parametrize("name", KINDS)
def test_wrong_rows_are_left_out_counted_and_named(name, tmp_path, capfd):
    warn_once.cache_clear()
    wrong = [7, 8, *range(1100, 2100, 100)]
    texts = wrong_in(2000, *wrong)
    (tmp_path / name).write_bytes(KINDS[name](texts))
    form = "messages" if name == "g.jsonl" else "text"
    d = options(tmp_path / name, bad_rows="skip", format=form, tokenizer="t", document_mask=True)
    count = Counter()
    read = list(source_module.documents(d, map(ByteRange, list_files(d)[0]), count))
    if form == "messages":
        read = [json.loads(text)[1][0]["content"] for text in read]
    assert read == [text for text in texts if text]
    assert (count["rows"], count["wrong"]) == (2000, len(wrong))
    logged = capfd.readouterr().err.splitlines()
    header = name.endswith(".csv")
    assert len(logged) == 10
    for line, row in zip(logged, wrong):
        assert f"{name}: row {row + header}: " in line


def test_quoted_values_of_several_lines_are_one_row_where_their_lines_do_not_look_like_rows(
    tmp_path,
):
    """As of prose, in which some lines have as many commas as the header."""
    prose = ["one\ntwo", "a, b\nc, d\ne, f\ng, h\ni, j\nk", "x\ty\nz"]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        (tmp_path / name).write_bytes(as_table(prose, delimiter=delimiter))
        assert documents(tmp_path / name) == prose


def test_a_file_that_vanished_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["a"]))
    files, _ = list_files(options(path))
    path.unlink()
    with refuses("a.jsonl: rows from 1: cannot be read: FileNotFoundError"):
        list(source_module.documents(options(path), map(ByteRange, files)))
