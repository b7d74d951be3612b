"""Ids of Hugging Face repositories, against a hub on loopback and the real client: which commit, which files, and what
is said when they cannot be had."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import save

import config
from config import ConfigError
from data import hub
from data.tokenizer import tokenizer_files
from extras.huggingface import config as hf_config
from extras.huggingface.weights import hf_name, shapes
from launch.command import usable
from schema import Given
from tests.conftest import REPO, launch, make_config, rows
from tests.extras.huggingface import hf_cases
from tests.hub import CUT, Hub

# What no one may read: it can run code, or is the same in another format
OTHERS = {
    "pytorch_model.bin": b"x",
    "modeling_me.py": b"x",
    "consolidated.safetensors": b"x",
    "original/model.safetensors": b"x",
    "README.md": b"x",
}


def repository(seed: int, tokenizer: bytes = b"\n") -> dict[str, bytes]:
    m, noise = make_config(model={"qk_norm": True}).model, torch.Generator().manual_seed(seed)
    tensors = {
        hf_name(name): 0.1 * torch.randn(shape, generator=noise)
        for name, shape in shapes(m).items()
    }
    return {
        "config.json": json.dumps(hf_config.render(m, 64, "float32", {})).encode(),
        "tokenizer.model": tokenizer,
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": save(tensors),
        **OTHERS,
    }


@pytest.fixture
def server():
    with Hub() as running:
        yield running


def of_weights(requests: list[str]) -> list[str]:
    return [
        request for request in requests if request.startswith("GET") and "safetensors" in request
    ]


def test_a_run_keeps_the_commit_that_it_began_with(
    server, write_config, corpus, prepared, tmp_path
):
    """On two ranks, of a private repository; and after the branch has moved, on a machine with an empty cache, the
    adapters go on over the same base. A revision that is named is another's."""
    tokenizer = (prepared / "tokenizer.model").read_bytes()
    sha = server.commit("me/base", repository(0, tokenizer), token="secret")
    path = tmp_path / "tuned.toml"
    path.write_text(f"""
[run]
output_dir = "{tmp_path}/outputs"
device = "cpu"
[model]
init_from = "me/base"
[data]
source = "{corpus}"
path = "{tmp_path}/data"
tokenizer = "me/base"
[lora]
rank = 2
[train]
steps = 2
seq_len = 32
[optim]
schedule_steps = 4
[checkpoint]
[log]
tensorboard = false
""")
    done = launch(path, nproc=2, **server.environment(tmp_path / "home", "secret"))
    assert done.returncode == 0 and f"from the weights of me/base@{sha}" in done.stdout, done.stderr
    fetched = [*server.requests]
    assert len(of_weights(fetched)) == 1
    for request in fetched:
        assert not any(name in request for name in OTHERS)
    folder = tmp_path / "home/hub/models--me--base/snapshots" / sha
    assert {entry.name for entry in folder.iterdir()} == repository(0).keys() - OTHERS.keys()
    run = tmp_path / "outputs/tuned"
    saved = json.loads((run / "checkpoints/step-00000002/state.json").read_text())["config"]
    written = config.load(str(run / "config.toml"))
    assert (
        saved["model"]["init_from"]
        == saved["data"]["tokenizer"]
        == written.model.init_from
        == f"me/base@{sha}"
    )

    server.commit("me/base", repository(1, tokenizer), token="secret")
    done = launch(path, "--train.steps=4", **server.environment(tmp_path / "another", "secret"))
    assert done.returncode == 0 and f"from the weights of me/base@{sha}" not in done.stderr, (
        done.stderr
    )
    assert [row["step"] for row in rows(run)][-1] == 4 and len(
        of_weights(server.requests[len(fetched) :])
    ) == 1
    assert [
        entry.name for entry in (tmp_path / "another/hub/models--me--base/snapshots").iterdir()
    ] == [sha]

    server.close()  # all is in the cache
    done = launch(
        path, "--eval-only", "--eval.batches=1", **server.environment(tmp_path / "another")
    )
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["step"] == 4, (
        done.stderr
    )
    server.open()
    done = launch(
        path,
        "--train.steps=5",
        "--model.init_from=me/base@main",
        **server.environment(tmp_path / "another", "secret"),
    )
    assert (
        done.returncode == 2
        and "its weights have the hash" in done.stderr
        and "Traceback" not in done.stderr
    )


CHILD = f"""
import json, shutil, sys
sys.path.insert(0, {str(REPO)!r})
import config
from data import hub
from schema import ConfigError
free = shutil.disk_usage
for name in sys.argv[1:]:
    shutil.disk_usage = lambda folder: free(folder)._replace(free=9) if "full" in name else free(folder)
    try:
        tables = {{"model": {{"init_from": name}}, "train": {{"steps": 1}}}}
        print(json.dumps(str(hub.local(config.from_dict(tables, "x.toml").model.init_from, hub.WEIGHTS))))
    except ConfigError as error:
        print(json.dumps(error.problems))
"""


def in_child(*names: str, **environment: str) -> tuple[list, str]:
    """For each name: the folder with its weights, or what is wrong; and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *names],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


LARGE = bytes(hub.SMALL + 1)  # downloaded by another process


def test_what_cannot_be_had_is_said_in_one_line(server, tmp_path):
    files = {**repository(0), "model.safetensors": LARGE}
    sha = {name: server.commit(f"me/{name}", files) for name in ("lost", "full", "good")}
    server.commit("me/private", files, token="secret")
    server.commit("me/empty", {"README.md": b"x"})
    server.fault = lambda request: (
        500
        if "/me/lost/" in request.path and of_weights([f"{request.command} {request.path}"])
        else None
    )
    names = ["private", "nowhere", "good@v1", "empty", "full", "lost", "good"]
    found, progress = in_child(*(f"me/{name}" for name in names), **server.environment(tmp_path))
    said = dict(zip(names, found))
    assert pathlib.Path(said.pop("good")).name == sha["good"]
    assert f"fetching me/good@{sha['good']}: 0.02 GiB into {tmp_path}/hub\n" in progress
    for name, words in {
        "private": "does not exist, or is private: check the name, or log in with `hf auth login` or HF_TOKEN",
        "nowhere": "does not exist, or is private",
        "good@v1": "has no such revision",
        "empty": "has none of *config.json, and nothing else is read",
        "full": "0.02 GiB are needed, 0.00 GiB are free",
        "lost": "cannot be fetched: HfHubHTTPError: Server error '500",
    }.items():
        (line,) = said[name]
        assert words in line and "\n" not in line, line
        beginning = (
            'x.toml: [model] init_from = "me/'
            if name in names[:4]
            else "/"
            if name == "full"
            else '"me/'
        )
        assert line.startswith(beginning), line
    assert "Traceback" not in progress
    server.fault = lambda request: None
    (resumed, without, other), _ = in_child(
        "me/lost", "me/private", f"me/good@{sha['good']}", **server.environment(tmp_path, "secret")
    )
    assert all(
        (pathlib.Path(folder) / "model.safetensors").stat().st_size == len(LARGE)
        for folder in (resumed, without, other)
    )
    before = [*server.requests]
    (cached, (missing,)), _ = in_child(
        "me/good", "me/nowhere", **server.environment(tmp_path, offline=True)
    )
    assert cached == other and server.requests == before
    assert "HF_HUB_OFFLINE is set, and not all of its files are in" in missing


def test_a_download_that_is_cut_is_resumed(server, tmp_path):
    server.commit("me/cut", {**repository(0), "model.safetensors": LARGE})
    times = iter([CUT])
    server.fault = lambda request: (
        next(times, None) if of_weights([f"{request.command} {request.path}"]) else None
    )
    (folder,), _ = in_child("me/cut", **server.environment(tmp_path))
    assert (pathlib.Path(folder) / "model.safetensors").read_bytes() == LARGE


def test_a_stop_ends_a_download_at_once(server, tmp_path):
    """Its process, too: it leaves what it has for the next one."""
    server.commit("me/slow", {**repository(0), "model.safetensors": LARGE})
    reached, go_on = threading.Event(), threading.Event()

    def fault(request) -> None:
        if of_weights([f"{request.command} {request.path}"]):
            reached.set()
            go_on.wait(60)

    server.fault = fault
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "me/slow"],
        env=os.environ | server.environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        # a shell may have started the tests in the background, without it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert reached.wait(60)
    child.send_signal(signal.SIGINT)
    # stderr is closed: the process that downloads ended
    assert "KeyboardInterrupt" in child.communicate(timeout=20)[1]
    go_on.set()
    server.fault = lambda request: None
    (folder,), _ = in_child("me/slow", **server.environment(tmp_path))
    assert (pathlib.Path(folder) / "model.safetensors").read_bytes() == LARGE


def test_what_is_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "Qwen/Qwen3-0.6B",
        "meta-llama/Llama-3.1-8B@main",
        f"a/b@{'0' * 40}",
        "a/b@refs/pr/1",
    ):
        assert hub.is_id(name)
    for name in (
        "Qwen3-0.6B",
        "/a/b",
        "./a/b",
        "../a",
        "a/b/c",
        "a/",
        "a/b@",
        "a/tokenizer.model",
        "a/b.json",
        "~/a",
    ):
        assert not hub.is_id(name) and hub.local(name) == pathlib.Path(name)
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert not hub.is_id("Qwen/Qwen3-0.6B") and hub.local("Qwen/Qwen3-0.6B") == pathlib.Path(
        "Qwen/Qwen3-0.6B"
    )


@pytest.mark.parametrize(
    "given, recorded, expected",
    [
        ("a/b", f"a/b@{'1' * 40}", f"a/b@{'1' * 40}"),
        ("a/b", f"a/c@{'1' * 40}", None),
        ("a/b", "a/b", None),
        ("a/b@main", f"a/b@{'1' * 40}", None),
        (f"a/b@{'2' * 40}", f"a/b@{'1' * 40}", f"a/b@{'2' * 40}"),
    ],
)
def test_the_commit_of_a_run_is_in_its_config(tmp_path, monkeypatch, given, recorded, expected):
    """Of this run alone, and of this repository."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").write_text(f'[model]\ninit_from = "{recorded}"\n')
    monkeypatch.setattr(hub, "snapshot", lambda name, files: pathlib.Path("newest"))
    for run, wanted in (
        ("r", expected or "a/b@newest"),
        ("s", expected if "@2" in given else "a/b@newest"),
    ):
        options = Given(
            config.SCHEMA,
            "x.toml",
            {"run.output_dir": str(tmp_path), "run.name": run, "model.init_from": given},
            {"model.init_from": "x.toml"},
        )
        hub.pin(options, "model.init_from")
        assert options.values["model.init_from"] == wanted


def test_each_machine_fetches_once(server, on_ranks, tmp_path):
    """Two machines of two ranks, each with a cache of its own; and where one may not read it, all ranks say so."""
    shas = [
        server.commit(f"me/{name}", repository(0), token=token)
        for name, token in (("a", None), ("b", "secret"))
    ]
    homes = [
        server.environment(tmp_path / str(node), token)
        for node, token in enumerate(("secret", None))
    ]
    names = [f"me/{name}@{sha}" for name, sha in zip("ab", shas)]
    for rank, (folder, error) in enumerate(on_ranks(4, hf_cases.read_on_machines, names, homes)):
        assert folder == f"{tmp_path}/{rank // 2}/hub/models--me--a/snapshots/{shas[0]}"
        assert (
            error.startswith(f'"{names[1]}": ') and "is private" in error and error.count("\n") == 0
        )
    assert len(of_weights([request for request in server.requests if "/me/a/" in request])) == 2


def test_an_adapter_names_its_base_as_peft_does():
    lora = config.Lora()
    ours = hf_config.render_adapter(lora, f"me/base@{'1' * 40}")
    assert (ours["base_model_name_or_path"], ours["revision"]) == ("me/base", "1" * 40)
    ours = hf_config.render_adapter(lora, "/folder/of@mine")
    assert (ours["base_model_name_or_path"], ours["revision"]) == ("/folder/of@mine", None)


def test_without_the_package_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ConfigError,
        match="me/without.: is .*: needs huggingface_hub .*-m pip install huggingface_hub",
    ):
        tokenizer_files("me/without")
    path = tmp_path / "x.toml"
    path.write_text('[model]\ninit_from = "me/without"\n[train]\nsteps = 1\n')
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, package=None: name != "huggingface_hub"
    )
    assert not usable([str(path)])  # run_train.sh looks for another Python
