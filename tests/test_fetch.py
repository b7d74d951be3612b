"""data.prepare --fetch-only against the fake hub of tests/hub.py: a run without a network has what it needs."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

import config
from data.fetch import end_of_needed
from data.hub_sources import HubFiles
from data.record import read_manifest
from data.sources import Files, FilesState
from data.tokenizer import Tokenizer
from tests import order_model
from tests.conftest import REPO, make_config, needs_extra, words
from tests.hub import Hub
from tests.test_growing import digests, environment, small_borders  # noqa: F401  a fixture
from tests.test_hub_data import CARD, json_lines

NAMES = [f"en/train-{n}.jsonl" for n in range(8)]
IN_ORDER = order_model.reading_order(NAMES)


@pytest.fixture
def server():
    """Eight files of 300 documents, of some 75,000 tokens each."""
    texts = [words(i, 300) for i in range(2400)]
    files = {name: json_lines(texts[300 * n : 300 * n + 300]) for n, name in enumerate(NAMES)}
    with Hub() as running:
        running.commit(
            "datasets/me/texts", {"README.md": CARD, "en/val.jsonl": json_lines(texts[:9]), **files}
        )
        yield running


@pytest.fixture
def path(write_config, tmp_path, prepared):
    return write_config(
        "offline",
        data={
            "source": "me/texts",
            "subset": "en",
            "validation": "validation",
            "path": str(tmp_path / "text"),
            "tokenizer": str(prepared / "tokenizer.model"),
            "order": "growing",
            "max_tokens": 180_000,
        },
        train={"steps": 20, "seq_len": 128, "global_batch_size": 16},
    )


def run(*words: object, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [REPO / "run_train.sh", *map(str, words)],
        env=environment(1) | env,
        capture_output=True,
        text=True,
    )


def fetched(server: Hub, since: int = 0) -> set[str]:
    """The files of data whose content was asked for, after so many requests."""
    paths = [request.split()[1] for request in server.requests[since:] if request[:3] == "GET"]
    return {name for name in [*NAMES, "en/val.jsonl"] for asked in paths if asked.endswith(name)}


@pytest.mark.slow
def test_a_growing_run_without_a_network_trains_on_what_was_fetched(
    server,
    path,
    tmp_path,
    small_borders,  # noqa: F811
    monkeypatch,
):
    """The fourth file cannot be had at first; the second call fetches no file again. Samples, validation text and
    token files are those of a machine with a network."""
    tool = ("-m", "data.prepare", path)
    home = tmp_path / "home"
    missing = IN_ORDER[3]
    server.fault = lambda request: 404 if request.path.endswith(missing) else None
    failed = run(*tool, "--fetch-only", **server.environment(home))
    assert failed.returncode == 2 and f"me/texts: {missing} cannot be read" in failed.stderr
    server.fault = lambda request: None
    before = len(server.requests)
    done = run(*tool, "--fetch-only", **server.environment(home))
    assert done.returncode == 0, done.stderr
    assert not fetched(server, before) & {*IN_ORDER[:3]}
    # 180,000 tokens are in three files, and one more is fetched; the last ones are not
    assert {*IN_ORDER[:4], "en/val.jsonl"} <= fetched(server) and IN_ORDER[6] not in fetched(server)
    assert f"GiB, into {home}/hub" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"fetched; where there is no network, train with HF_HOME={home} HF_HUB_OFFLINE=1"
    )
    assert read_manifest(tmp_path / "text")["tokens"] == {"train": 0, "heldout": 0}
    with_network = run(
        *tool, f"--data.path={tmp_path}/online", **server.environment(tmp_path / "other")
    )
    assert with_network.returncode == 0, with_network.stderr
    server.close()
    for name, value in server.environment(home, offline=True).items():
        monkeypatch.setenv(name, value)
    online = config.load(str(path), [f"--data.path={tmp_path}/online"])
    assert digests(config.load(str(path)), 20) == digests(online, 20)
    completed = run(*tool, **server.environment(home, offline=True))
    assert completed.returncode == 0, completed.stderr
    manifests = [read_manifest(tmp_path / name) for name in ("text", "online")]
    assert manifests[0]["sha256"] == manifests[1]["sha256"]
    assert manifests[0]["validation_files"] == manifests[1]["validation_files"]


@needs_extra("huggingface")
@pytest.mark.slow
@pytest.mark.parametrize("is_offline", [True, False])
def test_a_job_without_a_network_names_the_command_that_fetches(
    server, path, tmp_path, is_offline, monkeypatch
):
    """Whether HF_HUB_OFFLINE says so, or nobody answers; data and base weights."""
    env = {"SLURM_JOB_ID": "7", **server.environment(tmp_path / "home", offline=is_offline)}
    server.close()
    online = "HF_HUB_OFFLINE=0 " if is_offline else ""
    command = f"HF_HOME={tmp_path}/home {online}./run_train.sh -m data.prepare {path}"
    for options in ((), ("--model.init_from=me/base", "--model.vocab_size=300")):
        refused = run(path, *options, **env)
        assert refused.returncode == 2, refused.stderr
        line = refused.stderr.splitlines()[-1]
        assert line.endswith(" ".join([command, *options, "--fetch-only"])), refused.stderr
        assert "Traceback" not in refused.stderr and not (tmp_path / "outputs").exists()


FULL_DISK = """
import collections, shutil, sys
import config
from data import hub, hub_sources
from data.prepare import main

hub.GIB = hub_sources.GIB = 1  # sizes in bytes
shutil.disk_usage = lambda folder: collections.namedtuple("Usage", "free")(2_000)
config.run_tool(main)
"""


def test_room_is_checked_before_anything_large_is_fetched(server, path, tmp_path):
    """Without data.max_tokens all files are needed: none is read to estimate how many."""
    text = path.read_text()
    assert "max_tokens = 180000\n" in text
    path.write_text(text.replace("max_tokens = 180000\n", ""))
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path, "--fetch-only"],
        env=environment(1) | server.environment(tmp_path / "home"),
        capture_output=True,
        text=True,
    )
    *_, count, line = done.stderr.splitlines()
    # the first one, for the format of its rows
    assert done.returncode == 2 and fetched(server) == {IN_ORDER[0]}
    [files] = server.commits.values()
    sizes = {name: len(files[name]) for name in [*NAMES, "en/val.jsonl"]}
    size = sum(sizes[name] for name in NAMES)
    assert (
        f"me/texts: 8 files, {size:,.2f} GiB; each is fetched when it is needed, into "
        f"{tmp_path}/home/hub\n"
    ) in done.stderr
    assert count == f"me/texts: 8 of 8 files are needed, {size:,.2f} GiB"
    missing = sum(sizes.values()) - sizes[IN_ORDER[0]]
    assert line == f"{tmp_path}/home/hub: {missing:,.2f} GiB are needed, 2,000.00 GiB are free"


class Local(HubFiles):
    """A dataset's files that are here."""

    list_files = Files.list_files
    path_of = Files.path_of
    with_current_version = Files.with_current_version


@pytest.mark.parametrize("first", [0, 3])
def test_as_many_files_are_fetched_as_the_limit_takes(first, tmp_path, prepared, monkeypatch):
    """And one or two more, as an estimate from a part of the first one needs; of files of any sizes, also where some
    were read before."""
    monkeypatch.setattr("data.fetch.SAMPLE_TOKENS", 1500)
    monkeypatch.setattr("data.encode.CHUNK", 3000)
    for name, documents in zip("abcdefgh", [31, 7, 101, 53, 2, 67, 19, 43]):
        texts = [words(ord(name) + i, 60) for i in range(documents)]
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines(texts))
    d = make_config(data={"source": f"{tmp_path}/*.jsonl", "order": "growing"}).data
    tokenizer = Tokenizer(prepared)
    tokens = []
    for file in Local(d).files:
        lines = pathlib.Path(file.path).read_text().splitlines()
        encoded = tokenizer.encode([json.loads(line)["text"] for line in lines])
        tokens.append(sum(len(ids) + 2 for ids in encoded))
    opened = FilesState(file=first)
    monkeypatch.setattr("data.fetch.open_recorded", lambda *unused: Local(d, opened))
    read = sum(tokens[:first])
    manifest = {**read_manifest(prepared), "tokens": {"train": read, "heldout": 0}}
    for missing in (1, 2000, 5000, 9000, 12_000, 10**6):
        limited = dataclasses.replace(d, max_tokens=read + missing)
        end = end_of_needed(prepared, manifest, limited)
        enough = [m for m in range(first + 1, 8) if sum(tokens[first:m]) >= missing]
        fewest = min([*enough, 8])
        assert fewest <= end <= min(8, fewest + 2)
    assert end_of_needed(prepared, manifest, d) == 8
