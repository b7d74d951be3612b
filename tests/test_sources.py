"""Sources of text: every kind, resumed at any place."""

import gzip
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from config import ConfigError
from data import identity, json_array, sources
from data.encode import CHUNK, chunks
from data.identity import open_source
from data.local_files import file_stamps, local_files, stdlib_files
from data.sources import Files
from tests.conftest import REPO, config_for, make_config, words

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kind", ["parquet", "txt", "jsonl", "glob", "folder", "folders"])
def test_local_sources(kind, corpus, tmp_path):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()][:50]
    source = tmp_path / f"texts.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source)
    elif kind == "txt":
        source.write_text("\n".join(texts))
        texts = ["\n".join(texts)]
    else:
        inner = tmp_path / "a/b" if kind == "folders" else tmp_path
        inner.mkdir(parents=True, exist_ok=True)
        for part in range(2):
            (inner / f"part{part}.jsonl").write_text(
                "".join(json.dumps({"text": t}) + "\n" for t in texts[part::2])
            )
        source = {
            "glob": tmp_path / "part*.jsonl",
            "folders": tmp_path / "**/part*.jsonl",
            "folder": tmp_path,
            "jsonl": tmp_path / "part0.jsonl",
        }[kind]
        texts = texts[::2] + ([] if kind == "jsonl" else texts[1::2])
    found = list(open_source(config_for(source, tmp_path).data))
    assert "".join(found) == "".join(texts)


def test_long_text_file_becomes_several_documents(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\r\n".join(words(i, 40) for i in range(2000)), newline="")
    found = list(open_source(config_for(path, tmp_path).data))
    assert len(found) > 3 and "".join(found) == path.read_bytes().decode()
    # no line is torn where its end is near
    assert all(piece.endswith("\r\n") for piece in found[:-1])


@pytest.mark.parametrize("pattern", ["", "*.txt"])
def test_files_are_read_in_the_order_of_their_names(pattern, tmp_path):
    """And not as the disk lists them: the same files elsewhere are the same tokens."""
    names = [f"{7 * n % 30:02}" for n in range(30)]
    for name in names:
        (tmp_path / f"{name}.txt").write_text(name)
    assert list(open_source(config_for(tmp_path / pattern, tmp_path).data)) == sorted(names)


@pytest.mark.parametrize("pattern", ["notes.csv", "notes.*"])
def test_a_file_of_another_kind_is_refused_by_name(pattern, tmp_path):
    (tmp_path / "notes.csv").write_text('{"text": "as it happens, a line of JSON"}\n')
    with pytest.raises(
        ConfigError,
        match=r"source = .*/notes\.csv: must be one of \.jsonl, \.json, \.parquet, \.txt",
    ):
        list(open_source(config_for(tmp_path / pattern, tmp_path).data))


def test_hugging_face_source_without_network_says_so(tmp_path):
    code = (
        "import sys; from data.sources import stdlib_files; from data.identity import open_source; import config; "
        "from tests.conftest import make_config\n"
        "try: list(open_source(make_config(data={'source': 'nobody/nothing-here'}).data))\n"
        "except config.ConfigError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert (
        "[data] source = nobody/nothing-here: is neither python-stdlib nor a local file, and as a Hugging Face "
        "dataset cannot be read"
    ) in done.stdout, done.stderr


@pytest.mark.parametrize(
    "source", ["my.csv", "no/such/path/at.all", "./thing", "texts-*.jsonl", "missing.txt"]
)
def test_what_looks_like_a_file_is_never_looked_for_on_a_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        list(open_source(make_config(data={"source": source}).data))


@pytest.mark.parametrize("name", ["folder", "folder/*.jsonl", "x" * 300 + ".jsonl"])
def test_files_that_cannot_be_looked_at_are_refused(name, tmp_path, monkeypatch):
    """A link to nothing, as a Hugging Face cache that was cleared has: read without it the data would be another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder/more.jsonl").mkdir(parents=True)
    (tmp_path / "folder/a.jsonl").write_text('{"text": "as it happens"}\n')
    assert [path for path, *_ in file_stamps("folder")] == ["folder/a.jsonl"]
    (tmp_path / "folder/b.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(
        ConfigError,
        match=r"\[data\] source = .*: (cannot be read: \w+Error: .*\.jsonl|no such file)",
    ):
        file_stamps(name)
        open_source(config_for(name, tmp_path).data)


def test_a_pattern_finds_each_file_once_and_passes_over_no_folder(tmp_path, monkeypatch):
    for name in "a", "b/c":
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jsonl").write_text('{"text": "as it happens"}\n')
    (tmp_path / "b/loop").symlink_to(tmp_path)
    (tmp_path / "a/again.jsonl").symlink_to("x.jsonl")  # on purpose
    assert (
        local_files(f"{tmp_path}/a/*.jsonl")
        == local_files(f"{tmp_path}/a")
        == [tmp_path / "a/again.jsonl", tmp_path / "a/x.jsonl"]
    )
    (tmp_path / "a/again.jsonl").unlink()
    found = [tmp_path / "a/x.jsonl", tmp_path / "b/c/x.jsonl"]
    assert (
        local_files(f"{tmp_path}/**/*.jsonl") == found
        and local_files(f"{tmp_path}/a/*.jsonl") == found[:1]
    )
    listdir = os.listdir

    def refuse(folder: str) -> list[str]:
        if pathlib.Path(folder).name == "b":
            raise PermissionError(13, "Permission denied", folder)
        return listdir(folder)

    monkeypatch.setattr("os.listdir", refuse)
    for pattern in "**/*.jsonl", "*/*/*.jsonl", "b/*/x.jsonl":
        with pytest.raises(ConfigError, match="cannot be read: PermissionError"):
            local_files(f"{tmp_path}/{pattern}")
    assert local_files(f"{tmp_path}/a/*.jsonl") == found[:1]


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "texts.csv").write_text("text\nthe cat\n")
    with pytest.raises(
        ConfigError,
        match=r"source = .*texts\.csv: must be one of \.jsonl, \.json, \.parquet, \.txt",
    ):
        list(open_source(config_for(tmp_path / "texts.csv", tmp_path).data))


def written(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")


def test_of_the_library_tests_and_packages_are_left_out(tmp_path, monkeypatch):
    written(tmp_path, "a.py", "email/b.py", "email/test.py", "email/c.txt")
    written(tmp_path, "site-packages/d.py", "dist-packages/e.py", "test/f.py", "email/tests/g.py")
    monkeypatch.setattr("data.local_files.stdlib_folder", lambda: tmp_path)
    assert stdlib_files() == [tmp_path / name for name in ("a.py", "email/b.py", "email/test.py")]


def test_a_library_that_lies_elsewhere_is_no_new_text(tmp_path, monkeypatch):
    """As a Python of the same version on another machine; of the same one a new file is."""
    d = make_config().data
    place = tmp_path / "here"
    monkeypatch.setattr("data.local_files.stdlib_folder", lambda: place)
    written(place, "a.py", "b.py")
    written(tmp_path / "there", "a.py", "b.py")
    begun = Files(d)
    assert len(list(begun)) == 2
    place = tmp_path / "there"
    list(Files(d, begun.state, {"files": begun.files}).compare_with_text(tmp_path))
    place = tmp_path / "here"
    written(place, "new.py")
    with pytest.raises(ConfigError, match=r"here/new\.py came after"):
        list(Files(d, begun.state, {"files": begun.files}).compare_with_text(tmp_path))


class Texts(list):
    """What chunks() needs of a source."""

    lists_wrong_rows = False

    def resume_state(self):
        return 0

    def fraction_read(self):
        return None

    files_to_record = fraction_read


def test_chunks_hold_all_texts_in_order():
    texts = Texts(words(i, 1 + i % 700) for i in range(900))
    cut = [chunk.documents for chunk in chunks(texts, len) if not chunk.is_last]
    assert [text for chunk in cut for text in chunk] == texts and len(cut) > 3
    assert all(sum(map(len, chunk[:-1])) < CHUNK for chunk in cut) and [
        chunk.documents for chunk in chunks(Texts(), len)
    ] == [[]]


OF_EVEN_ROWS = ("jsonl", "json", "txt", "parquet", "two parquets", "two files")


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        "json",
        "txt",
        "json.gz",
        "json array.gz",
        "jsonl.zst",
        "parquet",
        "two parquets",
        "saved",
        "two files",
        "stdlib",
    ],
)
def test_a_source_resumes_from_any_place(kind, corpus, tmp_path, monkeypatch):
    some = stdlib_files()[:40] if kind == "stdlib" else []
    monkeypatch.setattr("data.sources.stdlib_files", lambda: some)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()][:60]
    path = tmp_path / f"texts.{kind.split()[-1]}"
    if "parquet" in kind:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "*.parquet"
        for part in range(2 if kind == "two parquets" else 1):
            pyarrow.parquet.write_table(
                pyarrow.table({"other": texts[part:], "text": texts[part:]}),
                tmp_path / f"{part}.parquet",
                row_group_size=7,
            )
    elif kind == "txt":
        path.write_text("\n".join(words(i, 9000) for i in range(12)))
    elif kind == "json":  # an array, on many lines
        rows = [{"text": text, "more": [{}]} for text in texts]
        path.write_text(json.dumps(rows, indent=3))
    elif kind == "json array.gz":
        path = tmp_path / "texts.json.gz"
        path.write_bytes(gzip.compress(json.dumps([{"text": text} for text in texts]).encode()))
    elif kind == "saved":
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"other": texts, "text": texts})
        datasets.DatasetDict({"train": rows}).save_to_disk(path, num_shards={"train": 3})
    elif kind == "json.gz":  # in two members
        lines = corpus.read_bytes().splitlines(keepends=True)
        path.write_bytes(gzip.compress(b"".join(lines[:9])) + gzip.compress(b"".join(lines[9:])))
    elif kind == "jsonl.zst":
        import pyarrow

        path.write_bytes(pyarrow.compress(corpus.read_bytes(), "zstd", asbytes=True))
    elif kind == "two files":
        path = tmp_path / "part*.jsonl"
        for part in range(2):
            lines = [json.dumps({"text": text}) + "\n\n" for text in texts[part::2]]
            (tmp_path / f"part{part}.jsonl").write_text("".join(lines))
    else:
        shutil.copy(corpus, path)
    d = config_for("python-stdlib" if kind == "stdlib" else path, tmp_path).data
    whole = list(open_source(d))
    assert len(whole) > 5 and (kind != "two parquets" or whole == texts + texts[1:])
    if kind in ("json.gz", "jsonl.zst"):
        assert whole == [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    for read in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        source = open_source(d)
        assert list(itertools.islice(source, read)) == whole[:read]
        state, share = json.loads(json.dumps(source.resume_state())), source.fraction_read()
        assert 0 <= share <= 1 and (share == 0) == (read == 0)
        if read == len(whole):
            assert share > 0.99
        if read == len(whole) // 2 and kind in OF_EVEN_ROWS:
            assert share == pytest.approx(0.5, abs=0.1)
        assert list(open_source(d, state)) == whole[read:]


ARRAYS = {
    '[{"text": "a"},\n {"text" 2}]': "row 2, line 2: is not valid JSON: Expecting ':' delimiter",
    '[{"text": "a"}\n{"text": "b"}]': "row 2, line 2: needs a comma before it, not {",
    '[{"text": "a"},\n\n  {"body": "b"},\n  3]': (
        "row 2, line 3: has no field 'text' .*\n.*row 3, line 4: has no field, but is of type int$"
    ),
    '[\n{"text": "a"}': "row 2, line 2: is missing: the file ends, and the array does not",
    '[{"text": "a"}]\n[{"text": "b"}]': "row 2, line 2: stands behind the end of the array",
    "[\n\n]": "holds no text",
    '{\n  "text": "a"\n}': "line 1: is not valid JSON: .*; an object of several lines: write each",
}


@pytest.mark.parametrize("content", ARRAYS)
def test_what_is_wrong_with_an_array_is_named_by_row_and_line(content, tmp_path):
    (tmp_path / "in.json").write_text(content)
    with pytest.raises(ConfigError, match=f"in.json: {ARRAYS[content]}"):
        list(open_source(config_for(tmp_path / "in.json", tmp_path).data))


def test_an_array_is_read_in_blocks_of_any_size(monkeypatch):
    """Characters, escapes and numbers that a block's end cuts; from the beginning, and resumed."""
    texts = ["".join(['é€😀 \\ " \n'] * i) for i in range(9)]
    rows = [{"text": text, "n": 12345.678e-3, "l": [True, None, {}]} for text in texts]
    written = [
        json.dumps(rows).encode(),
        b"\xef\xbb\xbf\n" + json.dumps(rows, indent=2, ensure_ascii=False).encode() + b"\n\n",
        json.dumps([1, 22, 4.5e10, "x", True, None]).encode(),
    ]
    for block in (1, 2, 3, 7, 64, 1 << 20):
        monkeypatch.setattr(json_array, "BLOCK", block)
        for content in written:
            read = list(json_array.elements(io.BytesIO(content), 1 << 20))
            assert [element.value for element in read] == json.loads(content.decode("utf-8-sig"))
            for number, element in enumerate(read, 1):
                before = content[: element.byte]
                assert before.count(b"\n") + 1 >= element.line and element.number == number
                rest = json_array.elements(io.BytesIO(content), 1 << 20, number, element.byte)
                assert list(rest) == read[number:]
    even = json.dumps(["x" * 58] * 99).encode()  # 60 bytes each
    assert [e.problem for e in json_array.elements(io.BytesIO(even), 60)] == [None] * 99
    [refused] = json_array.elements(io.BytesIO(even), 59)
    assert refused.number == 1 and "is longer than" in refused.problem
    long = b'[{"a": 1}, {"a": "' + b"x" * 5000
    *_, last = json_array.elements(io.BytesIO(long), 4096)
    assert last.number == 2 and "is longer than 0 MiB" in last.problem


@pytest.mark.parametrize("space", [b"", b"\n" * 5000, b" " * 4095 + b"\n"], ids=len)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_an_array_is_known_by_its_first_character(mark, space):
    for content, expected in ((b"[1]", True), (b'{"a": [1]}', False), (b"", False)):
        assert json_array.holds_array(io.BytesIO(mark + space + content)) is expected


def test_of_what_save_to_disk_wrote_a_split_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = {name: datasets.Dataset.from_dict({"text": [name] * 3}) for name in ("train", "test")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    for split in made:
        d = make_config(data={"source": str(tmp_path / "saved"), "split": split}).data
        assert list(open_source(d)) == [split] * 3
        d = make_config(data={"source": str(tmp_path / "saved" / split)}).data
        assert list(open_source(d)) == [split] * 3
    d = make_config(data={"source": str(tmp_path / "saved"), "validation": "test"}).data
    validation = identity.validation_source(d)
    assert list(open_source(validation)) == ["test"] * 3
    d = make_config(data={"source": str(tmp_path / "saved"), "split": "dev"}).data
    with pytest.raises(ConfigError, match=r"\[data\] split = dev: .*saved has train, test"):
        open_source(d)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_long_table_resumes_in_any_of_its_batches(kind, tmp_path):
    """It is read 1,024 rows at a time, also where a batch of the file has more."""
    import pyarrow
    import pyarrow.parquet

    texts = [f"row {i}" for i in range(3000)]
    table = pyarrow.table({"text": texts})
    path = tmp_path / f"long.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2600)
    d = config_for(path, tmp_path).data
    for read in (1000, 1024, 1500, 2600, 2900):
        source = open_source(d)
        assert list(itertools.islice(source, read)) == texts[:read]
        assert list(open_source(d, source.resume_state())) == texts[read:]


def test_a_hub_source_resumes_and_knows_its_size(monkeypatch):
    """Through the same calls as a download, on rows that are here; in the revision that it was begun in."""
    import datasets
    import huggingface_hub

    rows = datasets.Dataset.from_dict({"text": [words(i, 5) for i in range(3000)]})
    newest, asked = ["first"], []

    def load(*args, revision, **options):
        asked.append(revision)
        assert args == ("owner/name",) and options == {
            "name": None,
            "split": "train",
            "streaming": True,
        }
        stream = rows.to_iterable_dataset(3)
        stream.info.splits = datasets.SplitDict(
            {"train": datasets.SplitInfo("train", num_examples=3000)}
        )
        return stream

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "dataset_info",
        lambda self, name: huggingface_hub.DatasetInfo(id=name, sha=newest[0], tags=[]),
    )
    d = make_config(data={"source": "owner/name"}).data
    whole, source = list(open_source(d)), open_source(d)
    newest[0] = "second"
    assert list(itertools.islice(source, 1500)) == whole[:1500] and source.fraction_read() == 0.5
    assert list(open_source(d, json.loads(json.dumps(source.resume_state())))) == whole[1500:]
    assert (
        asked == ["first"] * 3
        and source.revision == "first"
        and open_source(d).revision == "second"
    )
    for unknown in ({}, {"train": datasets.SplitInfo("train", num_examples=0)}, None):
        source.data.info.splits = unknown
        assert source.fraction_read() is None


def test_empty_files_are_skipped(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for name, texts in (("0", []), ("1", ["a", "b"])):
        table = pyarrow.table({"text": pyarrow.array(texts, "string")})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "2.jsonl").write_text("")
    (tmp_path / "3.txt").mkdir()
    assert list(open_source(config_for(tmp_path, tmp_path).data)) == ["a", "b"]


def test_a_broken_parquet_file_is_one_line(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(ConfigError) as caught:
        list(open_source(config_for(tmp_path / "bad.parquet", tmp_path).data))
    assert "bad.parquet: cannot be read: Arrow" in str(caught.value) and "\n" not in str(
        caught.value
    )


@pytest.mark.parametrize(
    "kind, told",
    [
        ("jsonl", "line 4: field 'text' must be text, not int"),
        ("parquet", "row 3: field 'text' must be text, not NoneType"),
        ("hub", "row 3: field 'text' must be text, not NoneType"),
    ],
)
def test_a_bad_row_is_named_by_its_number_resumed_or_not(kind, told, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub
    import pyarrow
    import pyarrow.parquet

    rows, source = {"text": ["a", "b", None]}, str(tmp_path / f"bad.{kind}")
    # empty lines are lines
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": 3}\n')
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "bad.parquet")
    if kind == "hub":
        source = "owner/name"
        stream = datasets.Dataset.from_dict(rows).to_iterable_dataset
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **options: stream())
        monkeypatch.setattr(
            huggingface_hub.HfApi, "dataset_info", lambda self, name: SimpleNamespace(sha="commit")
        )
    d = config_for(source, tmp_path).data
    begun = open_source(d)
    assert list(itertools.islice(begun, 2)) == ["a", "b"]
    for state in (None, json.loads(json.dumps(begun.resume_state()))):
        with pytest.raises(ConfigError) as caught:
            list(open_source(d, state))
        assert str(caught.value) == f"{source}: {told}"


def test_a_parquet_file_without_the_column_is_named_with_those_it_has(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"body": ["a"], "title": ["b"]}), tmp_path / "other.parquet"
    )
    with pytest.raises(
        ConfigError,
        match=r"other\.parquet: row 1: has no field 'text' \(data\.text_field\), but body, "
        "title$",
    ):
        list(open_source(config_for(tmp_path / "other.parquet", tmp_path).data))


@pytest.mark.parametrize("unit", ["x", "\r", "é", "日本", "😀", "a😀é日"])
def test_text_without_line_ends_is_cut_between_characters(unit, tmp_path):
    text = unit * (300_000 // len(unit.encode()))
    (tmp_path / "long.txt").write_bytes(text.encode())
    d = config_for(tmp_path / "long.txt", tmp_path).data
    found = list(open_source(d))
    assert "".join(found) == text and max(len(piece.encode()) for piece in found) <= 2 << 16
    source = open_source(d)
    next(iter(source))
    assert "".join(open_source(d, source.resume_state())) == text[len(found[0]) :]


@pytest.mark.parametrize(
    "content, line",
    [(b"good\n\xff\n", 2), (b"\n\xff", 2), (b"good\n" * 40_000 + b"\xe6\x97", 40_001)],
)
def test_text_that_is_not_utf8_is_named_by_line(content, line, tmp_path):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.txt: line {line}: is not UTF-8"):
        list(open_source(config_for(tmp_path / "bad.txt", tmp_path).data))


def test_a_source_that_is_code_is_identified_by_its_code(monkeypatch):
    """And files and datasets are not: their readers may be changed."""

    class Squares(sources.Source):
        def rows(self):
            yield "here", {"text": "1 4 9"}

    cfg = make_config(data={"source": "owner/name"})
    assert "code" not in identity.identity(cfg)
    monkeypatch.setattr(identity, "kind_of", lambda d: Squares)
    # it has no splits, although its name looks like a dataset's
    with_split = make_config(data={"source": "owner/name", "validation": "test"})
    with pytest.raises(ConfigError, match="validation = test: no such file"):
        identity.check_validation(with_split.data)
    before = identity.identity(cfg)["code"]
    monkeypatch.setattr(identity.inspect, "getsource", lambda kind: "another")
    assert len(before) == 64 and identity.identity(cfg)["code"] != before


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".jsonl.gz"])
def test_a_git_lfs_pointer_is_no_text(suffix, tmp_path):
    path = tmp_path / f"texts{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 98\n")
    with pytest.raises(ConfigError, match=f"texts{suffix}: is a git-lfs pointer.*lfs pull$"):
        list(open_source(config_for(path, tmp_path).data))


@pytest.mark.parametrize(
    "names, pattern",
    [
        (["train.jsonl", "val.jsonl"], "train.jsonl"),
        (
            ["train-00000-of-2.parquet", "train-00001-of-2.parquet", "test.parquet"],
            "train-0000*.parquet",
        ),
        (["my_training_set.txt", "my_dev_set.txt"], "my_training_set.txt"),
        (["a.jsonl", "b.jsonl", "README.txt"], "*.jsonl"),
        (["train.jsonl", "pretest.jsonl"], None),
        (["test.jsonl", "latest.jsonl"], None),
        (["a.txt", "b.txt", ".c.jsonl"], None),
        (["a.jsonl", "._a.jsonl", ".ipynb_checkpoints/a.jsonl"], None),
        (["a.jsonl", "LICENSE.txt"], "a.jsonl"),
        (["train.jsonl", "val.jsonl", "test.jsonl"], "train.jsonl"),
        (["a.jsonl", "cache-123.arrow"], None),
    ],
)
def test_a_folder_is_not_read_with_what_is_not_meant(tmp_path, names, pattern):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "as it happens"}\n')
    d = make_config(data={"source": str(tmp_path)}).data
    if pattern is None:
        read = [pathlib.Path(file.path).name for file in Files(d).files]
        assert read == sorted(name for name in names if not name.startswith((".", "cache")))
    else:
        with pytest.raises(ConfigError, match=re.escape(f"--data.source='{tmp_path}/{pattern}'")):
            Files(d)
    for everything in (f"{tmp_path}/*", f"{tmp_path}/{pattern or names[0]}"):
        assert Files(make_config(data={"source": everything}).data).files
    # what was prepared before is not refused
    recorded = {"files": [[str(tmp_path / name), 1, 1, None] for name in names]}
    assert len(Files(d, None, recorded).files) == len(names)
