"""data.order = "growing": parts hold the source's text once, and every way of preparing them gives the same samples."""

import functools
import itertools
import json
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

import config
from config import ConfigError
from data import growing
from data.dataset import data_folders, open_dataset
from data.encode import is_validation
from data.loader import Loader
from data.order import make_order
from data.pieces import Piece, Pieces, cut, read_plan
from data.prepare import prepare
from data.sources import Files
from data.tokenizer import Tokenizer
from tests.conftest import REPO, data_rank, launch, make_config, rows, words

TEXTS = [words(i, 5 + i % 80) + ("" if i % 7 else "\n\u00e9\u732b") for i in range(3000)]


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """The text here is little: cut it as if it were much. The plan is made in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.pieces.SMALLEST", 6000)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The same texts as files of each kind, of uneven sizes."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("growing")
    cuts = [0, 1, 40, 1900, 1901, 2600, 3000]
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        part = TEXTS[begin:end]
        (folder / f"jsonl{number}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )
        (folder / f"txt{number}.txt").write_text("\n".join(part) + "\n" * (number % 2))
        pyarrow.parquet.write_table(
            pyarrow.table({"text": part}), folder / f"parquet{number}.parquet", row_group_size=100
        )
    return {kind: folder / f"{kind}*.{kind}" for kind in ("jsonl", "txt", "parquet")}


def started(cfg: config.Config, workers: int) -> subprocess.Popen:
    return growing.start_preparing(json.dumps(config.to_dict(cfg)), workers)


def growing_config(source, path, **sections) -> config.Config:
    data = {
        "source": str(source),
        "path": str(path),
        "order": "growing",
        **sections.pop("data", {}),
    }
    return make_config(data=data, **sections)


@pytest.fixture(scope="module")
def folder(sources, tmp_path_factory) -> pathlib.Path:
    """All parts of the jsonl source, prepared by three processes at once."""
    cfg = growing_config(sources["jsonl"], tmp_path_factory.mktemp("parts") / "all")
    prepare(cfg)
    children = [started(cfg, 1) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    return pathlib.Path(cfg.data.path)


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
@pytest.mark.parametrize("size", [300, 5000, 10**7])
def test_parts_hold_each_text_once(sources, monkeypatch, kind, size):
    monkeypatch.setattr("data.pieces.SMALLEST", size)
    monkeypatch.setattr("data.pieces.LARGEST", size)
    d = growing_config(sources[kind], "unused").data
    source = Pieces(d)
    parts = cut(source)
    for number in range(len(source.paths)):  # each unit of each file is in one piece
        pieces = sorted(piece[1:] for part in parts for piece in part if piece[0] == number)
        assert pieces[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    found = [[*Pieces(d, None, pieces)] for pieces in parts]
    assert "".join(itertools.chain(*found)) == "".join(source) == "".join(Files(d, None))
    if kind != "txt":
        assert Counter(itertools.chain(*found)) == Counter(text for text in TEXTS if text)
    lengths = [sum(len(text.encode()) for text in texts) for texts in found]
    assert len(parts) == 1 if size == 10**7 else len(parts) > 10
    if size == 5000 and kind == "jsonl":
        assert max(lengths) < 2 * size and sorted(lengths)[len(lengths) // 2] > size / 2


def test_the_standard_library_is_cut_at_files():
    d = growing_config("python-stdlib", "unused").data
    source = Pieces(d)
    parts = cut(source)
    assert 50 < len(parts) < 80 and [piece[0] for part in parts for piece in part] == [
        number for number, size in enumerate(source.sizes) if size
    ]


def test_an_epoch_has_every_window_once_segment_by_segment(folder, sources):
    cfg = growing_config(sources["jsonl"], folder, train={"global_batch_size": 4})
    (parts,) = open_dataset(cfg).train
    order = make_order(cfg, [parts])
    counts = [parts.stream(place).length for place in range(len(parts.turn))]
    windows = [max(0, (count - 1) // 32) for count in counts]
    total = sum(windows)
    places = [order(number) for number in range(3 * total)]
    for epoch in range(3):
        found = places[epoch * total : (epoch + 1) * total]
        assert sorted(place.window for place in found) == [*range(total)] and {
            p.epoch for p in found
        } == {epoch}
    begins = [sum(windows[:begin]) for begin in parts.segments]
    assert [b - a for a, b in itertools.pairwise(parts.segments)][:5] == [1, 1, 2, 4, 8]
    for begin, end in itertools.pairwise(
        begins
    ):  # of the first epoch; permuted, unless there is nothing to permute
        found = [place.window for place in places[begin:end]]
        assert sorted(found) == [*range(begin, end)] and (found != sorted(found) or end - begin < 3)
    late = [place.window for place in places[total : total + begins[2]]]
    assert max(late) > begins[4]  # of the second epoch: from everywhere
    # only the tails of parts are lost
    assert 0 <= sum(counts) - 32 * total <= 33 * len(counts)
    spans = {(stream.path, first) for stream, first, _ in (parts.span(w, 32) for w in range(total))}
    assert len(spans) == total
    other = make_order(
        cfg2 := growing_config(sources["jsonl"], folder, run={"seed": 1}), open_dataset(cfg2).train
    )
    assert [other.sources[0].turn, *(other(n) for n in range(20))] != [parts.turn, *places[:20]]


def test_validation_is_the_held_out_text_of_the_first_parts(folder, sources):
    cfg = growing_config(sources["jsonl"], folder, eval={})
    dataset = open_dataset(cfg)
    (held,), (parts,) = dataset.validation, dataset.train
    first = [
        growing.part_folder(folder, number) for number in parts.turn[: growing.VALIDATION_PARTS]
    ]
    content = b"".join((path / "heldout.bin").read_bytes() for path in first)
    raw, ids = held.read(0, held.length)
    assert raw == content and ids.numel() == held.length == len(content) // 2 > 200
    assert held.read(37, 150)[0] == content[74:300]
    documents = held.documents(0, held.length)
    assert [begin for _, begin, _ in documents] == [0, *(end for *_, end in documents[:-1])]
    assert [n for n, *_ in documents] == [*range(len(documents))] and documents[-1][
        2
    ] == held.length
    tokenizer = Tokenizer(folder)
    texts = {tokenizer.decode(ids[begin:end].tolist()) for _, begin, end in documents}
    assert texts <= {*TEXTS} and len(texts) > 3
    assert held.documents(40, 90) == [d for d in documents if d[1] < 90 and d[2] > 40]


def digests(cfg: config.Config, steps: int, first: int = 1) -> list[int]:
    loader = Loader(cfg, open_dataset(cfg), data_rank(), first)
    found = [next(loader).digest for _ in range(steps)]
    loader.close()
    return found


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_samples_are_the_same_while_preparing_as_after_it(folder, sources, tmp_path):
    """Also of a part that another process holds until it is killed, and from a step in the middle of a segment."""
    whole = digests(growing_config(sources["jsonl"], folder), 60)
    cfg = growing_config(sources["jsonl"], tmp_path / "new")
    prepare(cfg)
    assert not (tmp_path / "new/parts").exists()
    (parts,) = open_dataset(cfg).train
    second = growing.part_folder(tmp_path / "new", parts.turn[1])
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys, time; from data import growing\n"
            "with growing.claimed(pathlib.Path(sys.argv[1])) as ours:\n    print(ours, flush=True)\n"
            "    time.sleep(100)",
            second.with_name(f".{second.name}.lock"),
        ],
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == "True\n"
    loader = Loader(cfg, open_dataset(cfg), data_rank(), 1)
    found = [next(loader).digest for _ in range(2)]
    assert not second.exists()
    holder.kill()
    found += [next(loader).digest for _ in range(58)]
    loader.close()
    assert started(cfg, 1).wait(60) == 0
    assert found == whole and digests(cfg, 9, first=14) == whole[13:22]
    assert content(tmp_path / "new") == content(folder)


def test_threads_that_miss_text_at_once_start_one_process(sources, tmp_path, prepared, monkeypatch):
    """The step's and the loader's."""
    calls = []

    def start(*arguments) -> None:
        calls.append(arguments)
        time.sleep(0.1)

    cfg = growing_config(
        sources["jsonl"], tmp_path / "new", data={"tokenizer": str(prepared / "tokenizer.model")}
    )
    prepare(cfg)
    (parts,) = open_dataset(cfg).train
    monkeypatch.setattr(growing, "start_once", functools.cache(start))
    threads = [threading.Thread(target=parts.prepare_rest) for _ in range(2)]
    for do in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            do(thread)
    assert len(calls) == 1


def test_a_folder_whose_plan_is_a_list_reads_the_same(folder, sources, tmp_path):
    """As the first version wrote it; each part was a group of its own."""
    shutil.copytree(folder, tmp_path / "old")
    (tmp_path / "old/plan.json").write_text(json.dumps(parts := read_plan(folder)["parts"]))
    order = growing.Permutation(len(parts), 0, -1, 0)
    (old,) = open_dataset(growing_config(sources["jsonl"], tmp_path / "old")).train
    assert old.turn == [order(i) for i in range(len(parts))] and len(parts) > 10
    assert digests(old.cfg, 9) == digests(growing_config(sources["jsonl"], folder), 9)


def test_a_mixture_of_a_prepared_and_an_unprepared_source(sources, tmp_path, prepared):
    """Its validation, too, which is read first here."""

    def of(folder: str) -> config.Config:
        cfg = growing_config(
            "x",
            tmp_path / folder,
            eval={},
            data={
                "source": None,
                "tokenizer": str(prepared / "tokenizer.model"),
                "sources": [
                    {"source": str(sources["jsonl"]), "weight": 0.3},
                    {"source": str(sources["parquet"]), "weight": 0.7},
                ],
            },
        )
        prepare(cfg)
        return cfg

    whole = of("whole")
    assert started(whole, 2).wait(60) == 0
    first, second = data_folders(mixed := of("mixed"))
    shutil.copytree(data_folders(whole)[0] / "parts", first / "parts")
    assert not (second / "parts").exists()
    held = [
        stream.read(0, stream.length)[0] for stream in open_dataset(mixed, train=False).validation
    ]
    assert held == [
        stream.read(0, stream.length)[0] for stream in open_dataset(whole, train=False).validation
    ]
    assert digests(mixed, 40) == digests(whole, 40)


def test_killed_at_random_moments_it_goes_on(folder, sources, tmp_path):
    cfg, draw = growing_config(sources["jsonl"], tmp_path / "new"), random.Random(0)
    prepare(cfg)
    for _ in range(8):
        child = started(cfg, 2)
        time.sleep(draw.uniform(0.15, 0.5))
        child.kill()  # its own child ends with it
        child.wait()
    assert started(cfg, 2).wait(60) == 0
    assert content(tmp_path / "new") == content(folder)


def test_killed_before_any_of_its_file_system_events_it_resumes_and_ends_the_same(
    tmp_path, prepared, monkeypatch
):
    """Those of the plan and of two parts: one kill at each event, and many of one preparation."""
    monkeypatch.setattr("data.pieces.SMALLEST", 40_000)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": words(i, 300)}) + "\n" for i in range(60))
    )
    cfg = growing_config(
        tmp_path / "a.jsonl",
        tmp_path / "killed/out",
        data={"tokenizer": str(prepared / "tokenizer.model")},
    )
    prepare(cfg)
    growing.prepare_parts([(folder := tmp_path / "killed/out", cfg)], cfg.run.seed)
    assert len(growing.published(folder)) == 2
    folder.rename(tmp_path / "final")
    shutil.rmtree(tmp_path / "killed")
    (tmp_path / "c.toml").write_text(config.to_toml(cfg))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_cases", tmp_path / "c.toml", tmp_path / "final"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["events"] > 30 and found["kills of one"] > 3, found


def test_a_row_that_cannot_be_read_ends_who_waits_for_it(sources, tmp_path):
    bad = tmp_path / "bad.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    lines[2000] = "{\n"
    bad.write_text("".join(lines))
    cfg = growing_config(bad, tmp_path / "p", data={"tokenizer": None})
    with pytest.raises(ConfigError, match="line 2001: is not valid JSON"):
        prepare(cfg)  # while the tokenizer reads it
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    good = growing_config(sources["jsonl"], tmp_path / "g")
    prepare(good)
    (tokenizer / "tokenizer.model").write_bytes((tmp_path / "g/tokenizer.model").read_bytes())
    cfg = growing_config(bad, tmp_path / "p", data={"tokenizer": str(tokenizer)})
    prepare(cfg)
    with pytest.raises(
        ConfigError, match=r"bad.jsonl: line \d+ after byte [\d,]+: is not valid JSON"
    ):
        digests(cfg, 1000)
    (tmp_path / "c.toml").write_text(config.to_toml(cfg))
    done = launch("-m", "data.prepare", tmp_path / "c.toml")
    assert done.returncode == 2 and "is not valid JSON" in done.stderr


def test_max_tokens_end_the_reading_order(folder, sources, tmp_path):
    """At the part that reaches them, whoever prepares; later epochs and the validation set have no more of them."""
    whole = growing_config(sources["jsonl"], folder)
    (parts,) = open_dataset(whole).train
    counts = [parts.stream(place).length for place in range(len(parts.turn))]
    cfg = growing_config(
        sources["jsonl"], tmp_path / "new", eval={}, data={"max_tokens": sum(counts[:6]) - 1}
    )
    prepare(cfg)
    dataset = open_dataset(cfg)
    (limited,), (held,) = dataset.train, dataset.validation
    total = sum((count - 1) // 32 for count in counts[:6])
    places = [limited.window(index) for index in range(2 * total)]
    assert limited.turn == parts.turn[:6] and held.length == sum(
        growing.manifest_of(growing.part_folder(folder, number))["tokens"]["heldout"]
        for number in parts.turn[:6]
    )
    for epoch in range(2):
        assert sorted(places[epoch * total :][:total]) == [
            (epoch, window) for window in range(total)
        ]
    assert places[: total // 2] == [
        parts.window(index) for index in range(total // 2)
    ]  # before the last segment
    assert started(cfg, 2).wait(60) == 0  # the other one may have written a part too many
    made, all_of_it = content(tmp_path / "new/parts"), content(folder / "parts")
    assert all(made[name] == all_of_it[name] for name in made if name.endswith(".bin"))
    assert len(growing.published(tmp_path / "new")) < 6 + 3 < len(counts)


def test_other_text_of_the_same_sizes_is_another_plan(sources, tmp_path, prepared):
    """And so another fingerprint, which a resume refuses; a part that was changed is hashed at a start."""
    path, lines = tmp_path / "a.jsonl", [json.dumps({"text": text}) for text in TEXTS]
    cfg = growing_config(
        path, tmp_path / "p", data={"tokenizer": str(prepared / "tokenizer.model")}
    )
    found = []
    for content in (lines, [line.replace("cat", "rat") for line in lines]):
        path.write_text("\n".join(content))
        prepare(cfg)
        found.append(open_dataset(cfg).fingerprint)
        if content is lines:
            assert started(cfg, 1).wait(100) == 0
            part = growing.published(tmp_path / "p")[3] / "train.bin"
            part.write_bytes(part.read_bytes()[:-2] + b"\0\0")
            with pytest.raises(
                ConfigError, match=r"parts/00003/train.bin: was changed since it was prepared"
            ):
                prepare(cfg)
            shutil.rmtree(tmp_path / "p")
    assert found[0] != found[1] and found[0][0]["identity"] == found[1][0]["identity"]


def test_a_huge_line_is_read_once_over_all_parts(tmp_path, monkeypatch):
    """By the part that it begins in; the others read no further than their own range."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a", "b" * 2_000_000, "c"))
    )
    d = growing_config(path, "unused").data
    monkeypatch.setattr("data.pieces.SMALLEST", 100_000)
    monkeypatch.setattr("data.pieces.LARGEST", 100_000)
    parts = cut(Pieces(d))

    found = []
    for pieces in parts:
        with Piece(path, *pieces[0][1:]) as file:
            assert file.tell() - pieces[0][1] <= 200_000
        found += Pieces(d, None, pieces)
    assert [len(text) for text in found] == [1, 2_000_000, 1] and len(parts) > 15


def test_a_source_without_a_window_is_refused_before_step_1(tmp_path, prepared):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "few words"}) + "\n")
    cfg = growing_config(
        path, tmp_path / "p", data={"tokenizer": str(prepared / "tokenizer.model")}
    )
    prepare(cfg)
    with pytest.raises(ConfigError, match="no part has a window of train.seq_len = 32"):
        open_dataset(cfg)


@pytest.fixture(scope="module")
def short(tmp_path_factory, prepared) -> config.Config:
    """Two epochs and a half are 30 steps of four samples. All parts are there."""
    folder = tmp_path_factory.mktemp("short")
    texts = [*TEXTS[:48], *[text for text in TEXTS if is_validation(text)][:3]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "b.txt").write_text(TEXTS[40])
    cfg = growing_config(
        folder / "*.*",
        folder / "parts",
        data={"tokenizer": str(prepared / "tokenizer.model")},
        train={"steps": 30, "global_batch_size": 4, "micro_batch_size": 1},
        optim={"schedule": "constant"},
        eval={"every_steps": 15},
        checkpoint={"save_every_steps": 5},
    )
    prepare_in_small_parts(cfg)
    assert started(cfg, 1).wait(60) == 0
    return cfg


def prepare_in_small_parts(cfg: config.Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.pieces.SMALLEST", 600)
        prepare(cfg)


def test_ranks_together_read_what_one_reads(short):
    """Over the ends of epochs, and from there on."""
    (parts,) = open_dataset(short).train
    assert len(parts.turn) > 9 and 30 < parts.know(99) < 55  # windows; of 120 samples
    whole = digests(short, 30)
    assert len({*whole}) == 30
    for ranks, first in ((2, 1), (4, 1), (4, 8), (2, 17)):
        loaders = [
            Loader(short, open_dataset(short), data_rank(rank, ranks), first)
            for rank in range(ranks)
        ]
        assert whole[first - 1 :] == [
            sum(next(loader).digest for loader in loaders) % config.DIGEST_MODULUS
            for _ in range(first, 31)
        ]
        for loader in loaders:
            loader.close()


@pytest.mark.slow
def test_a_run_on_unprepared_text_is_that_on_prepared_one(short, tmp_path):
    """On four ranks, resumed on two in a later epoch, with validation."""
    (file := tmp_path / "c.toml").write_text(config.to_toml(short))
    found = {}
    for name, path, launches in (
        ("before", short.data.path, [(1, 30)]),
        ("during", tmp_path / "new", [(4, 15), (2, 30)]),
    ):
        own = [f"--data.path={path}", f"--run.output_dir={tmp_path}", f"--run.name={name}"]
        prepare_in_small_parts(config.load(str(file), own))
        for nproc, steps in launches:
            done = launch(file, *own, f"--train.steps={steps}", nproc=nproc)
            assert done.returncode == 0, done.stderr
        found[name] = [
            (row["batch_digest"], pytest.approx(row["loss"], rel=1e-5))
            for row in rows(tmp_path / name)
        ]
        found[name] += [
            pytest.approx(row["loss"], rel=1e-5) for row in rows(tmp_path / name, "eval")
        ]
    assert found["before"] == found["during"] and len(found["before"]) == 32
    assert rows(tmp_path / "during")[0]["data_seconds"] > 0.1  # waited for its first part
    assert [digest for digest, _ in found["before"][:30]] == digests(short, 30)
