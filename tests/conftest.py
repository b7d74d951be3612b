"""What tests share: a tiny configuration, a prepared corpus, models on ranks, whole runs."""

import contextlib
import functools
import gc
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

# One thread a process: the models are tiny, and on busy cores threads that wait for each other are twenty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub of others
# hundreds of processes would compile every module anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import config
import system
from config import ConfigError
from data.dataset import open_dataset
from data.folder import identity
from data.loader import Loader
from model import loss as loss_module
from model.build import meta_model
from model.llama import Llama, named_parameters
from parallel.materialize import ReadShard, materialize
from parallel.mesh import World, build_mesh, fsdp_mesh
from parallel.parallelize import parallelize

torch.set_num_threads(1)
REPO = pathlib.Path(__file__).parent.parent
# Without tools/ the tests that prepare text, or sample, are not collected.
collect_ignore = []
if not (REPO / "tools").exists():
    for path in (REPO / "tests").rglob("test_*.py"):
        if re.search("^(from|import) tools", path.read_text(), re.M):
            collect_ignore.append(path)

TINY = {
    "model": dict(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=320),
    "train": {"steps": 4, "seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2},
    "optim": {"lr": 3e-3, "warmup_steps": 2},
    "parallel": {"param_dtype": "float32"},
    "run": {"device": "cpu"},
    "log": {"every_steps": 1, "tensorboard": False},
}


def pytest_configure(config: pytest.Config) -> None:
    """One backward with no GPU in sight. With a process' first, torch starts a thread for each device, after which no
    fork of it, as the ranks of tests are (tests/distributed.py), can compute gradients."""
    if config.getoption("markexpr") != "gpu":
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
            torch.ones(1, requires_grad=True).backward()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: run two at a time they should not end one by one. A test of a launch is slow."""
    for item in items:
        if "write_config" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(key=lambda item: not item.get_closest_marker("early"))
    items.sort(key=lambda item: not item.get_closest_marker("first"))
    gc.collect()
    gc.freeze()  # a collection need not look through all that imports have made


WORDS = "the a cat dog sat ran on under mat hat and but then red blue"


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=count))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> pathlib.Path:
    """400 documents of random words as jsonl."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": words(i, 60)}) + "\n" for i in range(400)))
    return path


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory) -> pathlib.Path:
    """The corpus as token files: an id a byte, and 2 at a document's end."""
    folder = tmp_path_factory.mktemp("prepared") / "words"
    cfg = make_config(data={"source": str(corpus), "path": str(folder)})
    texts = [json.loads(line)["text"].encode() for line in corpus.open()]
    documents = [np.array([*(byte + 3 for byte in text), 2]) for text in texts]
    write_prepared(cfg, documents[20:], documents[:20])
    return folder


def write_prepared(
    cfg: config.Config, train: list, heldout: list, parts: int = 1, **changes: object
) -> None:
    """The folder of a configuration's source, of these documents' arrays of ids. parts: files of the
    training text. changes: of its manifest."""
    folder = pathlib.Path(cfg.data.path or "")
    folder.mkdir(parents=True, exist_ok=True)
    texts = [("heldout", -1, heldout), *(("train", i, train[i::parts]) for i in range(parts))]
    token_files: dict[str, list] = {"train": [], "heldout": []}
    for split, number, documents in texts:
        names = [f"{split}-{number}{suffix}" for suffix in (".bin", ".ends.bin", ".sizes.bin")]
        ends = np.cumsum([len(ids) for ids in documents], dtype="<i8")
        np.concatenate(documents).astype("<u2").tofile(folder / names[0])
        ends.tofile(folder / names[1])
        (np.diff(ends, prepend=0) - 1).tofile(folder / names[2])  # bytes: one less than ids
        entry = [names[0], "uint16", int(ends[-1]), 0, names[1], None, names[2]]
        token_files[split].append(entry)
    source = pathlib.Path(cfg.data.source)
    source_files = []
    if source.exists():
        source_files.append([str(source), source.stat().st_size, source.stat().st_mtime_ns])
    manifest = {
        "identity": identity(cfg.data, cfg.model.vocab_size),
        "files": source_files,
        "validation_files": [],
        "revision": None,
        "tokenizer": "a hash",
        "vocab_size": 320,
        "complete": True,
        "token_files": token_files,
        "sha256": str(len(train)),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    (folder / "tokenizer.model").write_bytes(b"copied, but not read")


def tables(**sections: dict | None) -> dict:
    """TINY with sections changed key by key; None removes a section or a key."""
    merged = {}
    for name in TINY | sections:
        changes = sections.get(name, {})
        if changes is not None:
            values = {**TINY.get(name, {}), **changes}
            merged[name] = {key: value for key, value in values.items() if value is not None}
    return merged


def make_config(**sections: dict | None) -> config.Config:
    return config.from_dict(tables(**sections), "test.toml")


def refuses(*words: str) -> Any:
    """Expects a ConfigError whose text has these words, in this order. `"a|b"`: either."""
    return pytest.raises(ConfigError, match="(?s)" + ".*".join(f"(?:{word})" for word in words))


# Models


def mesh_for(cfg: config.Config, world: World) -> World:
    """The same ranks on the mesh of a configuration."""
    shape = config.mesh_shape(cfg, world.size)
    return World(world.rank, world.size, world.device, build_mesh("cpu", shape))


def build(cfg: config.Config, world: World, read: ReadShard | None = None) -> Llama:
    """The model of a configuration as a run has it on this rank."""
    model = meta_model(cfg.model, cfg.lora)
    parallelize(model, cfg, world)
    materialize(model, cfg.run.seed, world.device, read)
    return model


def over_meshes(tensors: list[Tensor], world: World) -> Iterator[tuple[str, nn.ParameterList]]:
    """(a mesh, these tensors as parameters on it), of every mesh of so many ranks. The last is on none."""
    n = world.size
    meshes = {"sharded": (1, n, 1, 1), "replicas": (n, 1, 1, 1)}
    if n == 4:
        meshes |= {"hybrid": (2, 2, 1, 1), "cp": (1, 2, 2, 1), "tp": (1, 2, 1, 2)}
    for name, shape in meshes.items():
        ours = World(world.rank, n, world.device, build_mesh("cpu", shape))
        mesh = fsdp_mesh(ours)
        placements = [Replicate(), Shard(0)][-mesh.ndim :]
        over: list[tuple] = [(mesh, placements)] * 3
        if ours.tp > 1:  # by columns, the same on all tp ranks, not known to tp
            both = ours.mesh["dp_shard", "tp"]
            over[:2] = [(both, [Shard(0), Shard(1)]), (both, [Shard(0), Replicate()])]
        sharded = [distribute_tensor(t, *on, src_data_rank=None) for t, on in zip(tensors, over)]
        yield name, nn.ParameterList([*sharded, tensors[-1].clone()])


@contextlib.contextmanager
def compiled_by(backend: str | Callable) -> Iterator[None]:
    """What is compiled within has this backend of torch.compile, not Inductor."""
    with (
        mock.patch("torch.compile", functools.partial(torch.compile, backend=backend)),
        mock.patch("model.loss.compiled", functools.cache(loss_module.compiled.__wrapped__)),
    ):
        yield


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    """By name: a hash of the full tensor's bits."""
    found = {}
    for name, tensor in tensors.items():
        bits = full(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(bits.numpy().tobytes()).hexdigest()
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, of the parameters that have one."""
    return {name: p.grad for name, p in named_parameters(model) if p.grad is not None}


def token_ids(*shape: int, vocab_size: int = 320, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def is_near(ours: Tensor, theirs: Tensor, bound: float = 1e-5) -> bool:
    """Whether they differ by at most so much, relative to the norm."""
    difference = (ours.double() - theirs.double()).norm()
    return bool(difference <= bound * theirs.double().norm())


def sentencepiece_model(path: pathlib.Path, **options: Any) -> Any:
    """A tokenizer of 300 entries as others train them."""
    import sentencepiece

    from tools.prepare.tokenizer import Tokenizer

    defaults = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    defaults |= {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True}
    defaults |= {"hard_vocab_limit": False, "minloglevel": 2}
    texts = (words(i, 50) for i in range(50))
    with path.open("wb") as file:
        given = {"sentence_iterator": texts, "model_writer": file, **defaults, **options}
        sentencepiece.SentencePieceTrainer.train(**given)
    return Tokenizer(path)


# Extras that were removed


def has_extra(name: str) -> bool:
    return (REPO / "extras" / name / "__init__.py").exists()


def needs_extra(*names: str) -> pytest.MarkDecorator:
    """Skips a test where one of these folders of extras/ was removed."""
    removed = [name for name in names if not has_extra(name)]
    return pytest.mark.skipif(bool(removed), reason=f"needs extras/{', extras/'.join(removed)}")


def nightly_if(takes_long: bool) -> list[pytest.MarkDecorator]:
    """The marks of a case that reaches nothing which the others do not."""
    return [pytest.mark.nightly] if takes_long else []


def lacks(**sections: dict | None) -> bool:
    """Whether a configuration needs an extra that was removed."""
    parallel = sections.get("parallel") or {}
    optim = sections.get("optim") or {}
    needed = {
        "huggingface": "init_from" in (sections.get("model") or {}),
        "lora": sections.get("lora") is not None,
        "profiler": sections.get("profile") is not None,
        "chat": "format" in (sections.get("data") or {}),
        "float8": parallel.get("float8", "none") != "none",
        "optimizers": optim.get("name") == "muon" or optim.get("state_dtype") == "bfloat16",
    }
    return any(is_needed and not has_extra(extra) for extra, is_needed in needed.items())


def shipped_configs() -> list[pathlib.Path]:
    """configs/*.toml, but those that need a removed extra."""
    paths = []
    for path in sorted((REPO / "configs").glob("*.toml")):
        try:
            config.load(str(path))
        except ModuleNotFoundError:
            continue
        paths.append(path)
    return paths


def copy_tracked(folder: pathlib.Path, without: tuple[str, ...] = ()) -> pathlib.Path:
    """The repository as a newcomer has it, tracked files alone, and without these folders."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).split():
        removed = any(name.startswith(f"{path}/") for path in without)
        if not removed and (REPO / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)
    return folder


def run_tool(main: Callable, *words: object) -> int:
    """The exit code of a tool, as from the shell."""
    arguments = mock.patch.object(sys, "argv", ["tool", *map(str, words)])
    with arguments, pytest.raises(SystemExit) as ended:
        config.run_tool(main)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def prepare_one(cfg: config.Config) -> pathlib.Path:
    """Prepares the one source of a configuration; its folder."""
    from tools.prepare.prepare import prepare

    return prepare(cfg.data, cfg.model.vocab_size)[0]


def config_for(source: object, tmp_path: pathlib.Path, **data: object) -> config.Config:
    """Of a run on a source that is prepared into tmp_path/out."""
    return make_config(data={"source": str(source), "path": str(tmp_path / "out"), **data})


def data_rank(rank: int = 0, ranks: int = 1, cp: int = 1) -> SimpleNamespace:
    """What of a World the data needs: a data rank, on a CPU; with cp the first of that many."""
    mesh = SimpleNamespace(get_local_rank=lambda name: 0)
    device = torch.device("cpu")
    return SimpleNamespace(dp_rank=rank, dp_size=ranks, cp=cp, device=device, mesh=mesh)


def loader_of(cfg: config.Config, rank: int = 0, ranks: int = 1, step: int = 0, cp: int = 1) -> Any:
    """The Loader of a data rank after a step."""
    samples = step * cfg.train.global_batch_size
    return Loader(open_dataset(cfg), cfg.train, data_rank(rank, ranks, cp), step, samples)


@pytest.fixture
def write_config(tmp_path, corpus, prepared):
    """Writes TINY, on the prepared corpus, with changes; returns its path. Runs go below tmp_path/outputs."""

    def write(name: str = "test", **sections: dict | None) -> pathlib.Path:
        sections = {"data": {"source": str(corpus), "path": str(prepared)}, **sections}
        sections["run"] = {"output_dir": str(tmp_path / "outputs"), **(sections.get("run") or {})}
        path = tmp_path / f"{name}.toml"
        content = config.to_toml(config.from_dict(tables(**sections), str(path)))
        temporary = path.with_suffix(f".{os.getpid()}.tmp")  # ranks may write it side by side
        system.write_atomic(path, content, temporary)
        return path

    return write


def launch(
    *arguments: object, nproc: int = 1, cwd: object = REPO, repo: pathlib.Path = REPO, **env: str
) -> subprocess.CompletedProcess:
    """repo/run_train.sh, to its end."""
    command = [repo / "run_train.sh", *map(str, arguments)]
    env = {**os.environ, "PYTHON": sys.executable, "NPROC": str(nproc), **env}
    return subprocess.run(
        command, cwd=str(cwd), capture_output=True, text=True, timeout=300, env=env
    )


def train_run(cfg: config.Config, world: World) -> list[dict]:
    """One run as train.py has it, on ranks that exist; its training rows."""
    import train
    from run.rank import resolve_param_dtype
    from run.run import Run
    from run.watchdog import Watchdog

    cfg = resolve_param_dtype(cfg, world)
    world = mesh_for(cfg, world)
    run = Run(cfg, world, Watchdog(world.rank, None), None)
    train.train(cfg, world, run)
    run.end()
    if run.run_lock:
        run.run_lock.release()  # as the end of the process does
    return rows(config.run_folder(cfg.run))


def rows(folder: pathlib.Path, kind: str = "train") -> list[dict]:
    """Those of a run that may still write: a row without its line end is not one yet."""
    *lines, _being_written = (folder / "metrics.jsonl").read_text().split("\n")
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def saved_tensors(folder: pathlib.Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a run's checkpoint, read by DCP alone."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    tensors = {}
    stored: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, item in stored.items():
        tensors[name] = torch.empty(item.size, dtype=item.properties.dtype)
    with warnings.catch_warnings():  # a single process is intended
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def content(folder: pathlib.Path) -> dict[pathlib.Path, bytes | None]:
    """Every file below it, and every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def saved_by_two(tmp_path_factory) -> tuple[pathlib.Path, dict[str, str]]:
    """(a real checkpoint of two ranks, its tensors' hashes). Not to be changed."""
    from tests.checkpoint.conftest import save_on_ranks

    return save_on_ranks(2, tmp_path_factory.mktemp("two"))


def seal(folder: pathlib.Path) -> None:
    """A manifest that says what is there, as an attacker would write it."""
    from checkpoint.manifest import entry_of, render_manifest

    paths = [path for path in folder.iterdir() if path.name != "manifest.json"]
    entries = {path.name: entry_of(path.read_bytes()) for path in paths}
    (folder / "manifest.json").write_bytes(render_manifest(entries))
