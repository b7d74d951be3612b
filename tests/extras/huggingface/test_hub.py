"""Ids of Hugging Face repositories, against a hub on loopback and the real client: which commit, which files, and what
is said when they cannot be had."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save

import config
from config import ConfigError, GivenOptions
from extras.huggingface import config as hf_config
from extras.huggingface import hub
from extras.huggingface.weights import hf_name, shapes
from parallel.materialize import open_pretrained
from tests.cases import process_group
from tests.conftest import REPO, launch, make_config, refuses, rows
from tests.hub import Hub
from tools.prepare.tokenizer import tokenizer_files

# What no one may read: it can run code, or is the same in another format
OTHERS = {
    "pytorch_model.bin": b"x",
    "modeling_me.py": b"x",
    "consolidated.safetensors": b"x",
    "original/model.safetensors": b"x",
    "README.md": b"x",
}


def repository(seed: int, tokenizer: bytes = b"\n") -> dict[str, bytes]:
    m = make_config(model={"qk_norm": True}).model
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(m).items():
        tensors[hf_name(name)] = 0.1 * torch.randn(shape, generator=noise)
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
    return [each for each in requests if each.startswith("GET") and "safetensors" in each]


def test_a_run_keeps_the_commit_that_it_began_with(
    server, write_config, corpus, prepared, tmp_path
):
    """On two ranks, of a private repository; and after the branch has moved, on a machine with an empty cache, the
    adapters resume over the same base. A revision that is named is another's."""
    tokenizer = (prepared / "tokenizer.model").read_bytes()
    sha = server.commit("me/base", repository(0, tokenizer), token="secret")
    path = tmp_path / "tuned.toml"
    path.write_text(f"""
run = {{ output_dir = "{tmp_path}/outputs", device = "cpu" }}
model = {{ init_from = "me/base" }}
data = {{ source = "{corpus}", path = "{tmp_path}/data", tokenizer = "me/base" }}
lora = {{ rank = 2 }}
train = {{ steps = 2, seq_len = 32 }}
optim = {{ schedule_steps = 4 }}
checkpoint = {{}}
log = {{ tensorboard = false }}
""")
    home = server.environment(tmp_path / "home", "secret")
    done = launch(path, nproc=2, **home)
    assert done.returncode == 0 and f"from the weights of me/base@{sha}" in done.stdout, done.stderr
    fetched = [*server.requests]
    assert len(of_weights(fetched)) == 1
    assert not any(name in request for name in OTHERS for request in fetched)
    snapshots = "hub/models--me--base/snapshots"
    files = {entry.name for entry in (tmp_path / "home" / snapshots / sha).iterdir()}
    assert files == repository(0).keys() - OTHERS.keys()
    run = tmp_path / "outputs/tuned"
    saved = json.loads((run / "checkpoints/step-00000002/state.json").read_text())["config"]
    pinned = config.load(str(run / "config.toml")).model.init_from
    assert saved["model"]["init_from"] == saved["data"]["tokenizer"] == pinned == f"me/base@{sha}"

    server.commit("me/base", repository(1, tokenizer), token="secret")
    another = server.environment(tmp_path / "another", "secret")
    done = launch(path, "--train.steps=4", **another)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)][-1] == 4
    assert len(of_weights(server.requests[len(fetched) :])) == 1
    assert [entry.name for entry in (tmp_path / "another" / snapshots).iterdir()] == [sha]

    server.close()  # all is in the cache
    done = launch(path, "--eval-only", **server.environment(tmp_path / "another"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 4
    server.open()
    done = launch(path, "--train.steps=5", "--model.init_from=me/base@main", **another)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "its weights have the hash" in done.stderr


CHILD = """
import json, sys
import config
from extras.huggingface import hub
from config import ConfigError
for name in sys.argv[1:]:
    try:
        tables = {"model": {"init_from": name}, "train": {"steps": 1}}
        cfg = config.from_dict(tables, "x.toml")
        print(json.dumps(str(hub.local(cfg.model.init_from, hub.WEIGHTS))))
    except ConfigError as error:
        print(json.dumps(error.problems))
"""


def in_child(*names: str, **environment: str) -> tuple[list, str]:
    """For each name: the folder with its weights, or what is wrong; and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *names],
        cwd=REPO,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_what_cannot_be_had_is_said_in_one_line(server, tmp_path):
    files = repository(0)
    commit = server.commit("me/good", files)
    server.commit("me/private", files, token="secret")
    server.commit("me/empty", {"README.md": b"x"})
    names = ["private", "nowhere", "good@v1", "empty", "good"]
    answers, progress = in_child(*(f"me/{name}" for name in names), **server.environment(tmp_path))
    by_name = dict(zip(names, answers))
    folder = pathlib.Path(by_name.pop("good"))
    assert folder.name == commit and (folder / "model.safetensors").exists()
    assert "Traceback" not in progress
    for name, words in {
        "private": "RepositoryNotFoundError: 401 .*; check the name, log in with `hf auth login`",
        "nowhere": "RepositoryNotFoundError",
        "good@v1": "RevisionNotFoundError: 404 .*`hf download me/good` on a machine with a network",
        "empty": r"has none of \*config.json, and nothing else is read",
    }.items():
        (line,) = by_name[name]
        assert line.startswith(f'x.toml: [model] init_from = "me/{name}": ') and "\n" not in line
        assert re.search(words, line), line
    before = [*server.requests]
    (cached, (missing,)), _ = in_child(
        "me/good", "me/nowhere", **server.environment(tmp_path, offline=True)
    )
    assert cached == str(folder) and server.requests == before
    assert "is not on this machine" in missing


def read_on_machines(names: list[str], environments: list[dict[str, str]]) -> tuple[str, str]:
    """(the folder that the first id's weights are read from, the error of reading the second's) of ranks two by two on
    machines, each with its environment variables."""
    node, local_rank = divmod(int(os.environ["RANK"]), 2)
    os.environ |= {**environments[node], "LOCAL_RANK": str(local_rank)}
    model = {"qk_norm": True, "norm_eps": 1e-5}
    with process_group():
        first = open_pretrained(make_config(model={**model, "init_from": names[0]}), 0)
        (folder,) = {str(stored.path.parent) for stored in first.stored.values()}
        with pytest.raises(ConfigError) as refused:
            open_pretrained(make_config(model={**model, "init_from": names[1]}), 0)
        return folder, str(refused.value)


def test_each_machine_fetches_once(server, on_ranks, tmp_path):
    """Two machines of two ranks, each with a cache of its own; and where one may not read it, all ranks say so."""
    public = server.commit("me/a", repository(0))
    private = server.commit("me/b", repository(0), token="secret")
    homes = [server.environment(tmp_path / "0", "secret"), server.environment(tmp_path / "1", "")]
    names = [f"me/a@{public}", f"me/b@{private}"]
    for rank, (folder, error) in enumerate(on_ranks(4, read_on_machines, names, homes)):
        assert folder == f"{tmp_path}/{rank // 2}/hub/models--me--a/snapshots/{public}"
        assert error.startswith(f'"{names[1]}": ') and "RepositoryNotFoundError" in error
        assert "\n" not in error
    assert len(of_weights([request for request in server.requests if "/me/a/" in request])) == 2


@pytest.mark.parametrize(
    "base, name, revision",
    [
        (f"me/base@{'1' * 40}", "me/base", "1" * 40),
        ("/folder/of@mine", "/folder/of@mine", None),
    ],
)
def test_an_adapter_names_its_base_as_peft_does(base, name, revision):
    rendered = hf_config.render_adapter(config.Lora(), base)
    assert (rendered["base_model_name_or_path"], rendered["revision"]) == (name, revision)


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses("me/without.: is .*ModuleNotFoundError.* huggingface_hub"):
        tokenizer_files("me/without")


# Ids


def test_what_is_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "Qwen/Qwen3-0.6B",
        "meta-llama/Llama-3.1-8B@main",
        f"a/b@{'0' * 40}",
        "a/b@refs/pr/1",
    ):
        assert hub.is_id(name)
    (tmp_path / "here/Qwen").mkdir(parents=True)
    others = "Qwen3-0.6B /a/b ./a/b ../a a/b/c a/ a/tokenizer.model a/b.json ~/a here/Qwen"
    for name in others.split():
        assert not hub.is_id(name) and hub.local(name) == pathlib.Path(name)


NEWEST = "c" * 40
OLD = "1" * 40


@pytest.mark.parametrize(
    "given, recorded, expected",
    [
        ("a/b", f"a/b@{OLD}", f"a/b@{OLD}"),
        ("a/b", f"a/c@{OLD}", f"a/b@{NEWEST}"),
        ("a/b", "a/b", f"a/b@{NEWEST}"),
        ("a/b", None, f"a/b@{NEWEST}"),
        ("a/b@main", f"a/b@{OLD}", f"a/b@{NEWEST}"),
        (f"a/b@{'2' * 40}", f"a/b@{OLD}", f"a/b@{'2' * 40}"),
    ],
)
def test_an_id_is_pinned_to_the_run_s_commit_or_the_newest(
    given, recorded, expected, tmp_path, monkeypatch
):
    if recorded:
        (tmp_path / "r").mkdir()
        (tmp_path / "r/config.toml").write_text(f'[data]\ntokenizer = "{recorded}"\n')
    monkeypatch.setattr(hub, "snapshot", lambda name, files: pathlib.Path(NEWEST))
    values = {"run.output_dir": str(tmp_path), "run.name": "r", "data.tokenizer": given}
    options = GivenOptions(config.SCHEMA, "x.toml", values, {"data.tokenizer": "x.toml"})
    hub.pin(options, "data.tokenizer")
    assert options.values["data.tokenizer"] == expected
