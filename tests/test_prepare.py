"""Preparation: whole or not at all, resumable, of one source or a mixture; wrong input named."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from config import ConfigError
from data.dataset import data_folders, is_prepared, source_names
from data.encode import is_held_out
from data.prepare import prepare
from data.tokenizer import Tokenizer
from data.tokens import open_stream, read_manifest
from tests.conftest import REPO, config_for, launch, make_config, prepare_one, silent, words


def test_held_out_documents_are_chosen_by_their_text(corpus, prepared):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    held = [text for text in texts if is_held_out(text)]
    manifest = read_manifest(prepared)
    assert manifest["documents"] == {"train": len(texts) - len(held), "heldout": len(held)} and held
    assert sum(is_held_out(str(i)) for i in range(20_000)) == pytest.approx(200, abs=60)
    tokenizer, stream = Tokenizer(prepared / "tokenizer.model"), open_stream(prepared, "heldout", 320)
    _, ids = stream.read(0, stream.length)
    expected = [i for text in held for i in [*tokenizer.bos, *tokenizer.encode([text])[0], *tokenizer.eos]]
    assert ids.tolist() == expected


def test_prepared_once(corpus, tmp_path):
    cfg, said = config_for(corpus, tmp_path), []
    folder = prepare_one(cfg, lambda text, passing=False: said.append(text))
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert said and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    said.clear()
    prepare_one(cfg, lambda text, passing=False: said.append(text))
    assert not said and {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_identity_decides_the_folder(corpus):
    def name(**data):
        return data_folders(make_config(data={"source": str(corpus), **data}))[0].name
    names = [name(), name(max_tokens=5), name(text_field="body"), name(subset="x")]
    assert len(set(names)) == 4 and name() == names[0]
    assert data_folders(make_config())[0].name.startswith("python-stdlib-")


def test_another_identity_in_the_same_folder_is_refused(corpus, tmp_path):
    prepare_one(config_for(corpus, tmp_path))
    with pytest.raises(ConfigError, match="max_tokens = None, the configuration says 7"):
        prepare_one(config_for(corpus, tmp_path, max_tokens=7))


def test_changed_source_is_noticed(corpus, tmp_path):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)
    prepare_one(config_for(copy, tmp_path))
    copy.write_text(copy.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match="changed since"):
        prepare_one(config_for(copy, tmp_path))
    copy.unlink()  # no longer needed
    prepare_one(config_for(copy, tmp_path))


def test_max_tokens_and_wide_ids(corpus, tmp_path):
    folder = prepare_one(config_for(corpus, tmp_path, max_tokens=1000))
    assert 1000 <= open_stream(folder, "train", 320).length < 1100


GOOD = json.dumps({"text": "some text that is good"}) + "\n"
BAD_INPUT = {
    "bad line after many": (GOOD * 60 + '{"body": "x"}\n', "line 61: has no field 'text'"),
    "nested without end": ("[" * 100_000 + "\n", "line 1: is not valid JSON"),
    "corrupt line": (GOOD * 6 + '{"text": "cut\n' + GOOD, "line 7: is not valid JSON"),
    "no such field": (GOOD + '{"body": "x"}\n', "line 2: has no field 'text'"),
    "number for text": (GOOD + '{"text": 5}\n', "line 2: field 'text' must be text, not int"),
    "null": (GOOD + '{"text": null}\n', "line 2: field 'text' must be text, not NoneType"),
    "list for a row": (GOOD + "[1]\n", "line 2: has no field"),
    "lone surrogate": (GOOD * 2 + '{"text": "a\\ud800"}\n', "line 3: is not valid Unicode"),
    "empty file": ("", "holds no text"),
    "documents all empty": ('{"text": ""}\n' * 5, "holds no text"),
    "too little text": (GOOD, r"\[model\] vocab_size = 320: the text is too little.*the largest that works is \d+"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_and_nothing_published(case, tmp_path):
    content, message = BAD_INPUT[case]
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepare_one(config_for(tmp_path / "in.jsonl", tmp_path))
    assert not (tmp_path / "out").exists() and not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_two_that_prepare_at_once(corpus, tmp_path):
    """Both end well, and one of them did the work."""
    path = tmp_path / "c.toml"
    import config
    path.write_text(config.to_toml(config_for(corpus, tmp_path)))
    both = [subprocess.Popen([sys.executable, "-m", "data.prepare", path], cwd=REPO, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    said = [p.communicate()[1] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert sum("prepared" in text and "to train on" in text for text in said) == 1


PREPARE = "import sys, data.prepare as p; p.SYNC_SECONDS = 0.05; sys.exit(p.main(sys.argv[1:]))"


def test_a_killed_preparation_goes_on_and_ends_as_one_that_was_not(prepared, write_config, tmp_path):
    """kill -9 at random moments; the processes that it started end with it."""
    corpus = tmp_path / "large.jsonl"
    corpus.write_text("".join(json.dumps({"text": words(i, 300)}) + "\n" for i in range(20000)))

    def command(name: str) -> list:
        data = {"source": str(corpus), "path": str(tmp_path / name), "tokenizer": str(prepared / "tokenizer.model")}
        return [sys.executable, "-c", PREPARE, write_config("prep", data=data)]

    began = time.monotonic()
    done = subprocess.run(command("straight"), cwd=REPO, capture_output=True, text=True)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    draw, kills, went_on = random.Random(1), 0, 0
    while True:
        process = subprocess.Popen(command("killed"), cwd=REPO, stderr=subprocess.PIPE, text=True)
        try:
            output = process.communicate(timeout=draw.uniform(0.2, 0.6) * seconds if kills < 5 else 100)[1]
        except subprocess.TimeoutExpired:
            kills += 1
            process.kill()
            output = process.communicate()[1]  # returns when all that hold the pipe have ended: the pool's too
        went_on += "going on after" in output
        if process.returncode == 0:
            break
    assert kills >= 2 and went_on >= 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "killed").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "straight").iterdir()}
    assert not list(tmp_path.glob(".killed*"))


def mixture(tmp_path, corpus, **data):
    if not (tmp_path / "other.jsonl").exists():
        (tmp_path / "other.jsonl").write_text("".join(json.dumps({"body": words(-i, 30)}) + "\n" for i in range(200)))
    sources = [{"source": str(corpus), "weight": 0.75, "max_tokens": 3000},
               {"source": str(tmp_path / "other.jsonl"), "weight": 0.25, "text_field": "body"}]
    return make_config(data={"sources": sources, "path": str(tmp_path / "mixed"), **data})


def test_a_mixture_trains_one_tokenizer_and_keeps_its_sources_apart(corpus, tmp_path):
    cfg = mixture(tmp_path, corpus)
    assert not is_prepared(cfg)
    with pytest.raises(ConfigError, match="no prepared data"):
        data_folders(cfg)
    first, second = prepare(cfg, silent)
    assert is_prepared(cfg) and data_folders(cfg) == [first, second]
    assert (first / "tokenizer.model").read_bytes() == (second / "tokenizer.model").read_bytes()
    assert 3000 <= read_manifest(first)["tokens"]["train"] < 3200
    assert read_manifest(second)["identity"]["text_field"] == "body"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mixed").rglob("*")}
    prepare(cfg, silent)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mixed").rglob("*")} == before


def test_a_source_prepared_once_serves_every_mixture(corpus, prepared, tmp_path):
    given = {"tokenizer": str(prepared / "tokenizer.model")}
    first = prepare(mixture(tmp_path, corpus, **given), silent)
    made = [folder.stat().st_mtime_ns for folder in first]
    cfg = mixture(tmp_path, corpus, **given)
    import dataclasses
    heavier = [dataclasses.replace(source, weight=source.weight + 1) for source in cfg.data.sources[::-1]]
    other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sources=tuple(heavier)))
    assert prepare(other, silent) == first[::-1] and [folder.stat().st_mtime_ns for folder in first] == made


def test_training_on_a_mixture_and_looking_at_it(corpus, tmp_path, write_config):
    cfg = mixture(tmp_path, corpus)
    import config
    path = write_config("mixed", data={k: v for k, v in config.to_dict(cfg)["data"].items() if k != "source"}, eval={},
                        checkpoint={})
    done = launch(path)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "outputs/mixed/metrics.jsonl").read_text().splitlines()[-1])
    assert row["kind"] == "eval" and set(row["loss_by_source"]) == {str(corpus), str(tmp_path / "other.jsonl")}
    assert min(row["loss_by_source"].values()) <= row["loss"] <= max(row["loss_by_source"].values())
    shown = launch("-m", "data.show", path, "--step", "1").stdout
    assert shown.count(f"of {corpus}") == 6 and shown.count("other.jsonl") == 2  # three of four, of eight samples
    plan = json.loads(launch(path, "--dry-run", "--json").stdout)
    assert plan["steps_per_epoch"] > 1
    refused = launch(path, '--data.sources=[{source = "python-stdlib"}]')
    assert refused.returncode == 2 and "data.sources" in refused.stderr


def test_other_data_is_refused_by_name(corpus, tmp_path, write_config):
    """The same configuration, and another corpus in the same place."""
    source = str(shutil.copy(corpus, tmp_path / "texts.jsonl"))
    path = write_config("guarded", data={"source": source, "path": str(tmp_path / "tokens")}, checkpoint={})
    assert launch(path).returncode == 0
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "texts.jsonl").write_text("".join(corpus.read_text().splitlines(True)[::-1]))
    done = launch(path, "--train.steps=6", "--optim.schedule_steps=4")
    assert done.returncode == 2 and "was trained on other data" in done.stderr, done.stderr
    assert "sha256.train.bin was" in done.stderr and "sha256.heldout.bin" in done.stderr, done.stderr


def test_progress_overwrites_itself_on_a_terminal_alone(capsys):
    from data.progress import Bar, Console

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, pipe = Terminal(), io.StringIO()
    at = {"characters": 5_000_000, "tokens": {"train": 500, "heldout": 0}, "documents": {"train": 9, "heldout": 1}}
    for stream in (terminal, pipe):
        with Console(stream) as say:
            bar = Bar(make_config(data={"max_tokens": 1000}).data, at, say)
            bar.show(None)
            at["tokens"]["train"] = 750
            bar.said -= 1
            bar.show(None)
            say("done")
    assert terminal.getvalue().startswith("python-stdlib: [############....] 75.0%, 0:00:0")
    assert " left, 0.0 MB/s, 750 tokens" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[Kdone\n")
    assert pipe.getvalue() == "done\n"


def test_a_full_disk_ends_in_a_line(corpus, prepared, write_config, tmp_path):
    path = write_config("full", data={"source": str(corpus), "path": str(tmp_path / "out"),
                                      "tokenizer": str(prepared / "tokenizer.model")})
    limit = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); " \
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); import data.prepare as p; " \
            "sys.exit(p.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", limit, path], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-1].endswith("data could not be prepared: File too large"), done.stderr
    assert subprocess.run([sys.executable, "-m", "data.prepare", path], cwd=REPO, check=False).returncode == 0


def test_a_changed_file_is_noticed_at_the_next_start(prepared, corpus, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(prepared, copy)
    cfg = make_config(data={"source": str(corpus), "path": str(copy)})
    tokens = bytearray((copy / "train.bin").read_bytes())
    tokens[1000] ^= 1
    said = []
    os.utime(copy / "train.bin")  # copied: hashed once, and found good
    prepare_one(cfg, lambda text, passing=False: said.append(text))
    assert len(said) == 2 and "train.bin: was copied or changed" in said[0] and "unchanged" in said[1]
    (copy / "train.bin").write_bytes(tokens)
    with pytest.raises(ConfigError, match=r"train\.bin: was changed since it was prepared"):
        prepare_one(cfg)
    (copy / "heldout.ends.bin").unlink()
    with pytest.raises(ConfigError, match=r"heldout\.ends\.bin: is missing"):
        prepare_one(cfg)


class Killed(BaseException):
    """Nothing catches it, as nothing catches kill -9."""


def killed(*unused):
    raise Killed


@pytest.mark.parametrize("where", ["_sha256", "os.sync"])
def test_killed_at_the_end_it_goes_on_at_the_end(where, corpus, prepared, tmp_path, monkeypatch):
    cfg = config_for(corpus, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(f"data.prepare.{where}", killed)
        with pytest.raises(Killed):
            prepare_one(cfg)
    monkeypatch.setattr("data.prepare._train_tokenizer", killed)
    if where == "os.sync":
        monkeypatch.setattr("data.prepare._write_tokens", killed)
    folder = prepare_one(cfg)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in prepared.iterdir()}


def test_text_that_changes_meanwhile_is_not_published(corpus, prepared, tmp_path, monkeypatch):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus, copy)

    def append(*unused):
        with copy.open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")
        return "0"

    monkeypatch.setattr("data.prepare._sha256", append)
    with pytest.raises(ConfigError, match=r"copy\.jsonl: changed while it was prepared; start again"):
        prepare_one(config_for(copy, tmp_path, tokenizer=str(prepared / "tokenizer.model")))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_a_prepared_mixture_takes_no_lock_and_watches_its_text(corpus, tmp_path, monkeypatch):
    cfg = mixture(tmp_path, corpus)
    folders = prepare(cfg, silent)
    with monkeypatch.context() as patched:
        patched.setattr("data.prepare._one_at_a_time", killed)  # on a disk that can only be read it would fail
        assert prepare(cfg, silent) == folders
    with (tmp_path / "other.jsonl").open("a") as file:
        file.write(json.dumps({"body": "more"}) + "\n")
    shutil.rmtree(folders[1])
    with pytest.raises(ConfigError, match=r"other\.jsonl changed since this tokenizer was trained on it"):
        prepare(cfg, silent)


def test_sources_of_one_name_are_told_apart(corpus):
    twice = [{"source": str(corpus)}, {"source": str(corpus), "text_field": "body"}]
    assert source_names(make_config(data={"sources": [{"source": "a"}, {"source": "b"}]})) == ["a", "b"]
    given = make_config(data={"sources": twice, "tokenizer": str(corpus)})
    assert len(set(source_names(given))) == 2 and source_names(make_config()) == []


@pytest.mark.parametrize("content", ["[]", "{}", "not JSON", '{"files": {"a": 1}}'])
def test_somebody_elses_manifest_is_left_alone(content, corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is no manifest of prepared data; move .*out away"):
        prepare_one(config_for(corpus, tmp_path))
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match=r"out/manifest\.json: cannot be read: Not a directory$"):
        prepare_one(config_for(corpus, tmp_path))


def test_data_of_another_configuration_is_refused_without_the_launcher_too(prepared, write_config, tmp_path):
    path = write_config("other", data={"source": "python-stdlib", "path": str(prepared)}, checkpoint={})
    done = subprocess.run([sys.executable, "train.py", path], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and "was prepared with source = " in done.stderr, done.stderr
    assert launch(path, "--dry-run").returncode == 2 and not (tmp_path / "outputs").exists()


def test_a_killed_process_is_told_and_loses_nothing(corpus, prepared, tmp_path, monkeypatch):
    import concurrent.futures.process
    cfg = config_for(corpus, tmp_path, tokenizer=str(prepared / "tokenizer.model"))

    def broken(*unused):
        raise concurrent.futures.process.BrokenProcessPool

    with monkeypatch.context() as patched:
        patched.setattr("concurrent.futures.Future.result", broken)
        with pytest.raises(ConfigError, match=r"a process that tokenizes was killed \(is the host out of memory\?\)"):
            prepare_one(cfg)
    assert list(tmp_path.glob(".out.tmp/begun.json"))
    prepare_one(cfg)
