"""Ids of Hugging Face repositories, against a hub on loopback and the real client: which commit, which files."""

import json
import os
import pathlib
import sys

import pytest

import config
from config import GivenOptions
from extras.huggingface import config as hf_config
from extras.huggingface import hub
from parallel.materialize import open_pretrained
from tests.conftest import launch, make_config, refuses, rows
from tests.distributed import distributed
from tests.extras.huggingface.conftest import write_folder
from tests.hub import Hub

# What no one may read: it can run code, or is the same in another format
OTHERS = (
    "pytorch_model.bin modeling_me.py consolidated.safetensors original/model.safetensors README.md"
)


@pytest.fixture
def files(tmp_path, prepared) -> dict[str, bytes]:
    """Of a repository."""
    folder = write_folder(tmp_path / "base", prepared, qk_norm=True)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def server():
    with Hub() as running:
        yield running


def of_weights(requests: list[str]) -> list[str]:
    return [each for each in requests if each.startswith("GET") and "safetensors" in each]


def test_a_run_keeps_the_commit_that_it_began_with(server, files, corpus, tmp_path):
    """On two ranks, of a private repository; and after the branch has moved, on a machine with an empty cache, the
    adapters resume over the same base. A revision that is named is another's."""
    sha = server.commit("me/base", files | dict.fromkeys(OTHERS.split(), b"x"), token="secret")
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
    done = launch(path, nproc=2, **server.environment(tmp_path / "home", "secret"))
    assert done.returncode == 0 and f"from the weights of me/base@{sha}" in done.stdout, done.stderr
    fetched = [*server.requests]
    assert len(of_weights(fetched)) == 1
    assert not any(name in request for name in OTHERS.split() for request in fetched)
    snapshots = "hub/models--me--base/snapshots"
    assert {entry.name for entry in (tmp_path / "home" / snapshots / sha).iterdir()} == {*files}
    run = tmp_path / "outputs/tuned"
    saved = json.loads((run / "checkpoints/step-00000002/state.json").read_text())["config"]
    pinned = config.load(str(run / "config.toml")).model.init_from
    assert saved["model"]["init_from"] == saved["data"]["tokenizer"] == pinned == f"me/base@{sha}"

    moved = files["model.safetensors"][:-1] + b"\1"
    server.commit("me/base", files | {"model.safetensors": moved}, token="secret")
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
    assert done.returncode == 2 and "its weights have the hash" in done.stderr


@distributed(ranks=4)
def test_each_machine_fetches_once(world, files, tmp_path):
    """Two machines of two ranks, each with a cache of its own; and where one may not read it, all ranks say so."""
    import torch.distributed as dist

    node, local_rank = divmod(world.rank, 2)
    server = Hub()
    public = server.commit("me/a", files)
    private = server.commit("me/b", files, token="secret")
    shared = [server.environment(tmp_path)["HF_ENDPOINT"]]
    dist.broadcast_object_list(shared, 0)
    token = "" if node else "secret"
    environment = server.environment(tmp_path / f"{node}", token) | {"HF_ENDPOINT": shared[0]}
    os.environ |= {**environment, "LOCAL_RANK": str(local_rank)}
    for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
        del sys.modules[name]  # it reads the environment when it is imported
    model = {"qk_norm": True}
    opened = open_pretrained(make_config(model={**model, "init_from": f"me/a@{public}"}), 0)
    (folder,) = {str(stored.path.parent) for stored in opened.stored.values()}
    assert folder == f"{tmp_path}/{node}/hub/models--me--a/snapshots/{public}"
    with refuses(f'^"me/b@{private}": .*RepositoryNotFoundError') as refused:
        open_pretrained(make_config(model={**model, "init_from": f"me/b@{private}"}), 0)
    assert "\n" not in str(refused.value)
    dist.barrier()
    if world.rank == 0:
        assert len(of_weights([request for request in server.requests if "/me/a/" in request])) == 2
    dist.barrier()


def test_an_adapter_names_its_base_as_peft_does():
    for base in (("me/base", "1" * 40), ("/folder/of@mine", None)):
        name = "@".join(filter(None, base))
        rendered = hf_config.render_adapter(config.Lora(), name)
        assert (rendered["base_model_name_or_path"], rendered["revision"]) == base


def test_what_is_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/Qwen").mkdir(parents=True)
    ids = f"Qwen/Qwen3-0.6B meta-llama/Llama-3.1-8B@main a/b@{'0' * 40} a/b@refs/pr/1"
    assert all(hub.is_id(name) for name in ids.split())
    others = "Qwen3-0.6B /a/b ./a/b a/b/c a/ a/tokenizer.model a/b.json ~/a here/Qwen"
    for name in others.split():
        assert not hub.is_id(name) and hub.local(name) == pathlib.Path(name)


OLD, NAMED, NEWEST = ("1" * 40, "2" * 40, "c" * 40)


@pytest.mark.parametrize(
    "given, recorded, expected",
    [
        ("a/b", f"a/b@{OLD}", f"a/b@{OLD}"),
        ("a/b", f"a/c@{OLD}", f"a/b@{NEWEST}"),
        ("a/b", "a/b", f"a/b@{NEWEST}"),
        ("a/b", None, f"a/b@{NEWEST}"),
        ("a/b@main", f"a/b@{OLD}", f"a/b@{NEWEST}"),
        (f"a/b@{NAMED}", f"a/b@{OLD}", f"a/b@{NAMED}"),
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
