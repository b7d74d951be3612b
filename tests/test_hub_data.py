"""data/hub.py against the fake hub of tests/hub.py: the same text whatever fails, or one clear line."""

import contextlib
import gzip
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

import config
import data.arrow  # noqa: F401  for the client
from config import ConfigError
from data import hub as hub_module
from data import hub_sources as data_hub
from data.identity import open_source
from data.local_files import SourceFile
from data.record import read_manifest
from tests import order_model
from tests.conftest import REPO, make_config, rows, words
from tests.hub import CUT, LOST, Hub
from tests.test_growing import digests, environment, small_borders  # noqa: F401  a fixture

REPOSITORY = "datasets/me/texts"
TEXTS = [words(i, 5 + i % 80) + ("" if i % 7 else "\n\u00e9\u732b") for i in range(900)]
CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*
  - split: validation
    path: en/val*
- config_name: tables
  data_files: tables/*
---
"""
CODE = """
import json, sys
import config
from tests.conftest import make_config
from data import hub_sources as hub
from data.identity import open_source
from data.local_files import SourceFile

def data(subset="en", split="train", source="me/texts", order="growing"):
    return make_config(data={"source": source, "subset": subset, "split": split, "order": order}).data

def find(d):
    revision, files = hub.find_files(d)
    return {"revision": revision, "files": files}

def texts(d, found=None):
    return [*open_source(d, None, found)]

def fetched(found, number=0):
    path, _ = hub.fetch("me/texts", found["revision"], SourceFile(*found["files"][number]))
    return path.read_text()[:20]

for line in sys.stdin:
    try:
        print(json.dumps(eval(json.loads(line))), flush=True)
    except config.ConfigError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    except OSError as error:
        print(json.dumps({"failed": f"{error.filename} {error.strerror}"}), flush=True)
"""


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def hub():
    import pyarrow
    import pyarrow.parquet

    def table(texts: list[str]) -> bytes:
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer, row_group_size=70)
        return buffer.getvalue()

    with Hub() as hub:
        hub.files = {
            "README.md": CARD,
            "en/train-0.jsonl": json_lines(TEXTS[:400]),
            "en/train-1.jsonl": json_lines(TEXTS[400:]),
            "en/val.jsonl": json_lines(["held out"]),
            "tables/a.csv": b"text\n1",
        }
        hub.commit(REPOSITORY, hub.files, token="secret")
        # `datasets` takes all of a repository's files for of one kind
        hub.commit(
            "datasets/me/gz",
            {
                "a.json.gz": gzip.compress(json_lines(TEXTS[:300]))
                + gzip.compress(json_lines(TEXTS[300:500])),
                "b.json.gz": gzip.compress(json_lines(TEXTS[500:])),
            },
        )
        hub.commit(
            "datasets/me/zst",
            {"a.jsonl.zst": pyarrow.compress(json_lines(TEXTS), "zstd", asbytes=True)},
        )
        hub.commit(
            "datasets/me/parquet",
            {"0.parquet": table(TEXTS[:600]), "1.parquet": table(TEXTS[600:])},
        )
        yield hub


class Client:
    """A process that uses the hub: ask() returns what an expression is there, and what it printed to stderr."""

    def __init__(self, hub: Hub, folder, **options):
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            cwd=REPO,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | hub.environment(folder, **options),
        )

    def ask(self, expression: str):
        self.process.stdin.write(json.dumps(expression) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def printed(self) -> str:
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.truncate(0)
        return text


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    client = Client(hub, tmp_path_factory.mktemp("client"), token="secret")
    yield client
    client.process.stdin.close()
    client.process.wait(10)


@pytest.fixture
def fault(hub):
    """Sets the fault of the requests of one file's content, one of these after the other."""

    def of(name: str, *faults: int):
        left = [*faults]
        hub.fault = lambda request: (
            left.pop(0) if left and request.method == "GET" and name in request.path else None
        )
        return left

    yield of
    hub.fault = lambda request: None


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet"])
def test_files_hold_the_text_that_datasets_reads(client, kind):
    """In the order of their names' hashes."""
    arguments = "" if kind == "jsonl" else f"None, source='me/{kind}', "
    found = client.ask(f"find(data({arguments}))")
    assert all(path.endswith(kind) and len(digest) == 40 for path, _, digest, _ in found["files"])
    texts = client.ask(f"texts(data({arguments}))")
    assert sorted(texts) == sorted(TEXTS)
    if kind != "zst":  # for which `datasets` needs another package
        assert sorted(texts) == sorted(client.ask(f"texts(data({arguments}order='global'))"))
    names = order_model.reading_order([path for path, *_ in found["files"]])
    begins = {"en/train-0.jsonl": 0, "a.json.gz": 0, "0.parquet": 0, "a.jsonl.zst": 0}
    first = begins.get(names[0], {"jsonl": 400, "gz": 500, "parquet": 600}.get(kind))
    assert texts[0] == TEXTS[first]


@pytest.mark.quick
def test_what_is_no_text_by_file_is_refused_by_name(client):
    refused = client.ask("find(data('tables'))")["refused"]
    assert refused == (
        '[data] order = "growing": reads files of .jsonl, .json, .parquet, .txt, .jsonl.gz, .json.gz, '
        '.jsonl.zst, .json.zst, .arrow, and me/texts has tables/a.csv; set order = "global"'
    )
    assert client.ask("find(data('en', 'dev'))")["refused"] == (
        "[data] split = dev: me/texts has train, validation"
    )
    assert "BuilderConfig 'fr' not found" in client.ask("find(data('fr'))")["refused"]
    assert client.printed() == ""


def test_a_moved_branch_changes_nothing(client, hub):
    client.ask("[found := find(data('en', 'validation')), globals().update(found=found)]")
    hub.commit(REPOSITORY, hub.files | {"en/val.jsonl": json_lines(["of another commit"])})
    assert client.ask("texts(data('en', 'validation'), found)") == ["held out"]
    assert client.ask("texts(data('en', 'validation'))") == ["of another commit"]


def in_new_commit(client: Client, hub: Hub, name: str, content: bytes) -> None:
    """Binds `found`, in the client, to a commit in which one file was never fetched."""
    hub.commit(REPOSITORY, hub.files | {f"en/train-{name}.jsonl": content})
    client.ask("[found := find(data()), globals().update(found=found)]")


def test_a_download_resumes(client, hub, fault):
    """After a lost connection, half an answer, and too many requests."""
    content = json_lines(words(i, 50) for i in range(3000))
    in_new_commit(client, hub, "00", content)
    hub.retry_after, left = 0, fault("train-00", CUT, 429, LOST)
    assert client.ask("fetched(found, 1)") == content[:20].decode() and not left


def test_a_file_that_changes_in_mid_download_is_not_read(client, hub):
    """Half of it is of other text, of the same size. When it is again what it was, it is."""
    good, sha = json_lines(["good text"] * 20000), None
    in_new_commit(client, hub, "01", good)
    sha = client.ask("found['revision']")
    files, seen = hub.commits[REPOSITORY, sha], []

    def change(request):
        if request.method == "GET" and "train-01" in request.path:
            seen.append(1)
            files["en/train-01.jsonl"] = good.replace(b"good", b"evil") if len(seen) == 2 else good
            return CUT if len(seen) == 1 else None

    hub.fault = change
    client.ask("setattr(hub, 'RETRY_SECONDS', 10.0)")
    assert client.ask("fetched(found, 1)") == good[:20].decode() and len(seen) == 3
    printed = client.printed()
    assert printed.count("trying again for 10 s") == 1 and (
        f"me/texts: en/train-01.jsonl cannot be read: OSError: what was downloaded is not the file of commit {sha[:12]}"
        in printed
    )
    in_new_commit(client, hub, "02", json_lines(["text"] * 9))
    files = hub.commits[REPOSITORY, client.ask("found['revision']")]
    files["en/train-02.jsonl"] += b"\n"
    hub.fault = lambda request: None
    client.ask("setattr(hub, 'RETRY_SECONDS', 0.0)")
    assert client.ask("fetched(found, 1)")["failed"].endswith(
        f"what was downloaded is not the file of commit {client.ask('found')['revision'][:12]}"
    )


def test_a_lost_network_is_waited_for(client, hub):
    content = json_lines(["late"] * 9)
    in_new_commit(client, hub, "03", content)
    client.ask("setattr(hub, 'RETRY_SECONDS', 60.0)")
    client.printed()
    hub.close()
    threading.Timer(2, hub.open).start()
    began = time.monotonic()
    assert client.ask("fetched(found, 1)") == content[:20].decode() and time.monotonic() - began > 2
    assert client.printed().count("\n") == 1
    in_new_commit(client, hub, "05", content)
    client.ask("setattr(hub, 'RETRY_SECONDS', 0.0)")
    hub.close()
    failed = client.ask("fetched(found, 1)")["failed"]  # nothing is wrong with the text
    hub.open()
    assert failed.startswith("me/texts: en/train-05.jsonl cannot be read: ")
    assert "--fetch-only" in failed


def test_access_and_offline(hub, client, tmp_path):
    """Without the token; with the cache of a client that had it, and without a network."""
    in_new_commit(client, hub, "04", json_lines(["cached"]))
    client.ask("fetched(found, 0)")
    found, home = client.ask("found"), client.errors.name.removesuffix("stderr")
    for options, told in (
        ({}, "RepositoryNotFoundError: 401 Client Error."),
        ({"offline": True}, "OfflineModeIsEnabled: Cannot reach"),
    ):
        folder = tmp_path / str(len(options))
        folder.mkdir()
        stranger = Client(hub, folder, **options)
        with contextlib.closing(stranger.process.stdin):
            refused = stranger.ask("find(data())")["refused"]
            assert told in refused, refused
            assert "\n" not in refused and stranger.printed() == ""
            if options:
                stranger.ask(
                    f"__import__('huggingface_hub').constants.__setattr__('HF_HUB_CACHE', {home!r} + 'hub')"
                )
                stranger.ask(f"globals().update(found={found!r})")
                assert stranger.ask("fetched(found, 0)") == json_lines(TEXTS)[:20].decode()
                refused = stranger.ask("fetched(found, 1)")["refused"]
                assert refused.startswith(
                    "[data] source = me/texts: en/train-04.jsonl cannot be read: OfflineModeIs"
                )


def test_files_are_fetched_ahead_and_removed_where_room_is_short(tmp_path, monkeypatch):
    """The next file is fetched while one is read; one whose text is recorded goes, if it was fetched here."""
    calls = []

    def fetch(source: str, revision: str, file: SourceFile):
        path = tmp_path / file.path
        is_new = not path.exists()
        path.write_bytes(json_lines([f"text of {file.path}"]))
        calls.append(file.path)
        return path, is_new

    names = [f"{n}.jsonl" for n in range(5)]
    monkeypatch.setattr(data_hub, "fetch", fetch)
    monkeypatch.setattr(
        data_hub,
        "find_files",
        lambda d, revision: ("commit", [SourceFile(name, 100, "0" * 40) for name in names]),
    )
    (tmp_path / order_model.reading_order(names)[0]).write_text("of another program")
    d = make_config(data={"source": "me/x", "order": "growing"}).data
    room = {"bytes": 10_000}
    monkeypatch.setattr(data_hub, "free_bytes", lambda path: room["bytes"])
    source = data_hub.HubFiles(d)
    reader = iter(source)
    read = [next(reader), next(reader)]
    for thread in source.fetches.values():
        thread.join()
    assert calls == order_model.reading_order(names)[:3]
    source.on_recorded(source.resume_state())  # enough room: all stay
    assert len(list(tmp_path.iterdir())) == 3
    room["bytes"] = 150  # less than the rest: and the next is still fetched ahead, 100 bytes
    read += [next(reader), next(reader)]
    source.on_recorded(source.resume_state())
    left = {path.name for path in tmp_path.iterdir()}
    assert order_model.reading_order(names)[0] in left  # was there before
    assert not left & {*order_model.reading_order(names)[2:3]}
    room["bytes"] = 50
    read += list(reader)
    assert read == [f"text of {name}" for name in order_model.reading_order(names)]


@pytest.mark.slow
def test_a_run_waits_stops_fails_and_resumes(tmp_path, prepared, write_config):
    """On two ranks. The network is lost at the third file: it waits, and on SIGTERM saves and stops at once. The fifth
    is gone: it saves, and ends with one line. All is well: it resumes, with the samples of an undisturbed run."""
    texts = [words(i, 60) for i in range(2400)]
    with Hub() as hub:
        hub.commit(
            REPOSITORY,
            {f"{n}.jsonl": json_lines(texts[300 * n : 300 * n + 300]) for n in range(8)},
        )
        path = write_config(
            "hub",
            data={
                "source": "me/texts",
                "path": str(tmp_path / "text"),
                "tokenizer": str(prepared / "tokenizer.model"),
                "order": "growing",
            },
            train={"steps": 60, "seq_len": 128, "global_batch_size": 16},
            eval=None,
            checkpoint={"save_every_steps": 1000},
            log={"every_steps": 1},
        )
        env = environment(2, 0.01) | hub.environment(tmp_path / "home")
        held = order_model.reading_order([f"{n}.jsonl" for n in range(8)])

        def fault(status: int, first: int) -> None:
            hub.fault = lambda request: status if request.path.endswith((*held[first:],)) else None

        def launched(log: str) -> subprocess.Popen:
            return subprocess.Popen(
                [REPO / "run_train.sh", path],
                env=env,
                stderr=subprocess.STDOUT,
                stdout=(tmp_path / log).open("w"),
            )

        fault(LOST, 2)
        waiting, run = launched("waits"), tmp_path / "outputs/hub"
        while "waiting for text: " not in (tmp_path / "waits").read_text():
            assert waiting.poll() is None, (tmp_path / "waits").read_text()
            time.sleep(0.1)
        time.sleep(1)
        before = len(rows(run))
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(60) == 75
        assert (tmp_path / "waits").read_text().count("trying again for 300 s") == 1
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "preempted" and status["step"] == before == len(rows(run)) > 1
        fault(404, 4)
        failing = launched("fails")
        assert failing.wait(100) == 2, (tmp_path / "fails").read_text()
        last = (tmp_path / "fails").read_text().splitlines()[-1]
        assert last.startswith(
            f"[data] source = me/texts: {held[4]} cannot be read: HfHubHTTPError: "
        )
        assert before < len(rows(run)) < 60
        assert (run / f"checkpoints/step-{len(rows(run)):08d}").exists()
        assert json.loads((run / "status.json").read_text())["state"] == "failed"
        hub.fault = lambda request: None
        again = launched("again")
        assert again.wait(200) == 0, (tmp_path / "again").read_text()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in hub.environment(tmp_path / "home").items():
                patch.setenv(name, value)
            cfg = config.load(str(path))
            assert [row["batch_digest"] for row in rows(run)] == digests(cfg, 60)
        manifest = read_manifest(tmp_path / "text")
        assert [entry[0] for entry in manifest["files"]] == held and manifest["revision"]


def silent_address(sockets: contextlib.ExitStack) -> tuple[str, int]:
    """Of a listener whose queue is full, so that it drops what comes."""
    server = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(3):
        client = sockets.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex(server.getsockname())
    return server.getsockname()


def test_a_hub_behind_a_silent_firewall_is_given_up_within_seconds(monkeypatch):
    """Its library would try for minutes."""
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_module, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub_module.connection_problem.cache_clear()
    with contextlib.ExitStack() as sockets:
        _, port = silent_address(sockets)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be reached: timed out"):
            hub_module.snapshot("nobody/nothing", hub_module.CONFIG)
        for order in ("growing", "global"):
            with pytest.raises(ConfigError, match="nothing: .* be reached: .* --fetch-only"):
                open_source(make_config(data={"source": "nobody/nothing", "order": order}).data)
        assert time.monotonic() - begin < 30  # with imports on a busy machine
    hub_module.connection_problem.cache_clear()


def test_a_hub_that_answers_with_an_error_is_reachable():
    """Even if its library had lost a connection before."""
    from huggingface_hub.errors import HfHubHTTPError

    lost = ConnectionError("reset")
    answer = HfHubHTTPError("500", response=mock.Mock())
    answer.__cause__ = lost
    assert hub_module.is_unreachable(lost) and not hub_module.is_unreachable(answer)


def test_all_addresses_of_a_hub_are_tried_at_once(monkeypatch):
    monkeypatch.setattr(hub_module, "CONNECT_SECONDS", 2.0)
    real = socket.getaddrinfo

    def look_up(host: str, *rest: object, **keywords: object) -> list:
        if host != "hub.invalid":
            return real(host, *rest, **keywords)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with contextlib.ExitStack() as sockets:
        addresses = [silent_address(sockets) for _ in range(4)]
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            hub_module.connect_to_any("hub.invalid", 443)
        assert time.monotonic() - begin < 6
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        addresses.append(server.getsockname())
        begin = time.monotonic()
        hub_module.connect_to_any("hub.invalid", 443)
        assert time.monotonic() - begin < 2
