"""minimal.py is the specification: train.py makes its fresh weights, losses, gradient norms and
checkpoints, on 1, 2 and 4 ranks."""

import contextlib
import functools
import io
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import MISSING

import numpy as np
import pytest
import tomli
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import config
import minimal
from config import flatten
from data.folder import identity
from model.llama import named_parameters
from optim import local_tensor
from parallel.ranks import on_rank_zero
from tests.conftest import REPO, build, is_near, mesh_for, tables, train_run, write_prepared
from tests.distributed import distributed, run_on_ranks

# 4 ranks divide none of them. The embedding has two blocks of generators: ranks draw parts of them.
MODEL = {"dim": 250, "n_layers": 2, "n_heads": 5, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 323}
# The norm is above the limit, and AdamW divides a gradient's size out again, but for one that is
# small against its eps.
BASE = {
    "model": MODEL,
    "train": {"steps": 4, "micro_batch_size": None, "max_grad_norm": 0.3},
    "optim": {"lr": 3e-3, "eps": 1e-3, "weight_decay": 1.0, "warmup_steps": 2},
    "checkpoint": {},
}
# "epochs" are of 23 windows; of "few" one, of 76 windows, ends in the eighth step
LINES = """plain
recomputed parallel.recompute="full" parallel.prefetch_forward=2 parallel.prefetch_backward=2
    optim.schedule="linear" train.micro_batch_size=1
kept parallel.reshard_after_forward=false parallel.prefetch_forward=0 parallel.prefetch_backward=0
    parallel.reduce_dtype="bfloat16" optim.schedule="constant" train.max_grad_norm="off" run.seed=7
    train.micro_batch_size=2
tied model.tie_embeddings=true model.head_dim=10 model.n_heads=4 model.n_kv_heads=2 model.norm_eps=0.01
    model.rope_theta=100.0 optim.schedule="wsd" optim.decay_steps=2 optim.schedule_steps=5
    optim.min_lr_ratio=0.5 optim.betas=[0.8,0.9] train.micro_batch_size=2
tied-recomputed model.tie_embeddings=true train.micro_batch_size=1 parallel.recompute="full"
    parallel.prefetch_forward=2 parallel.prefetch_backward=2
bfloat16 parallel.param_dtype="bfloat16" train.micro_batch_size=2
bfloat16-wide-stream parallel.param_dtype="bfloat16" parallel.output_dtype="float32"
    parallel.reduce_dtype="bfloat16" train.micro_batch_size=1
narrow-stream parallel.output_dtype="bfloat16" train.micro_batch_size=2
epochs model.dim=20 model.n_layers=1 model.n_heads=1 model.ffn_dim=8 train.micro_batch_size=1
    train.seq_len=1000 train.global_batch_size=12 checkpoint.save_every_steps=2
few model.dim=20 model.n_layers=1 model.n_heads=1 model.ffn_dim=8 train.micro_batch_size=1
    train.steps=12 train.seq_len=30 train.global_batch_size=10"""
CASES = {}
for line in re.split(r"\n(?! )", LINES):
    case, *options = line.split()
    CASES[case] = tomli.loads("\n".join(options))
# relative differences of tensors in checkpoints
NARROW = {"exp_avg": 2**-6, "exp_avg_sq": 2**-6}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, dict]:
    """[data] of two prepared texts: of three files, and of one that is read several times."""
    folder = tmp_path_factory.mktemp("texts")
    sections = {}
    for name, documents, parts in (("three files", 235, 3), ("few", 23, 1)):
        sections[name] = {"source": f"{name}.jsonl", "path": str(folder / name)}
        cfg = config.from_dict(tables(model=MODEL, data=sections[name]), "test.toml")
        ids = np.random.default_rng(0).integers(0, 323, (documents, 100))
        write_prepared(cfg, [*ids], [ids[0]], parts)
    return sections


def toml(folder: pathlib.Path, *changes: dict) -> pathlib.Path:
    """Writes x.toml: BASE with changes, section by section."""
    merged = {**BASE, "run": {"name": "x", "output_dir": str(folder)}}
    for change in changes:
        for section, values in change.items():
            merged[section] = {**merged.get(section, {}), **values}
    path = folder / "x.toml"
    path.write_text(config.tables_to_toml(tables(**merged)))
    return path


def run_minimal(path: pathlib.Path) -> list[dict]:
    """What minimal.py prints on this rank."""
    options = minimal.read_options(str(path))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        minimal.train(options, minimal.open_data(options), torch.device("cpu"))
    return [json.loads(line) for line in printed.getvalue().splitlines()]


def check_rows(
    ours: list[dict], theirs: list[dict], loss: float = 1e-5, norm: float = 2e-4
) -> None:
    """loss, norm: relative differences that are allowed."""
    for key, difference in {"step": 0, "loss": loss, "grad_norm": norm}.items():
        expected = [row[key] for row in theirs]
        assert [row[key] for row in ours] == pytest.approx(expected, rel=difference)


def read_by_torch(checkpoint: pathlib.Path, path: pathlib.Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, path)
    return flatten(torch.load(path))


# train.py computes the same

RANKS = {1: ["plain", "tied", "bfloat16", "epochs"], 2: [*CASES], 4: ["plain", "tied-recomputed"]}
ROWS = [(ranks, case) for ranks, cases in RANKS.items() for case in cases]


@pytest.mark.parametrize("ranks, case", ROWS)
@distributed()
def test_train_computes_what_minimal_does(world, texts, tmp_path, ranks, case):
    data = texts["few" if case == "few" else "three files"]
    path = tmp_path / "x.toml"
    on_rank_zero(lambda: toml(tmp_path, {"data": data}, CASES[case]))
    cfg = config.load(str(path))
    theirs = train_run(cfg, world)
    ours = run_minimal(path)
    if world.rank > 0:
        assert ours == []
        return
    files = minimal.open_data(minimal.read_options(str(path)))
    assert (len(files) > 1) == (case != "few")  # windows lie in two
    check_rows(ours, theirs, *((2**-11, 2**-10) if "bfloat16" in case else ()))
    checkpoint = f"checkpoints/step-{cfg.train.steps:08d}"
    expected = read_by_torch(config.run_folder(cfg.run) / checkpoint, tmp_path / "theirs")
    tensors = read_by_torch(tmp_path / "x-minimal" / checkpoint, tmp_path / "ours")
    # train.py stores it in state.json
    assert tensors.pop("samples") == cfg.train.steps * cfg.train.global_batch_size
    assert tensors.keys() == expected.keys()
    is_narrow = "bfloat16" in case or case == "narrow-stream"
    for name, tensor in expected.items():
        assert tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype
        difference = 1e-4
        if is_narrow:
            difference = NARROW.get(name.rpartition(".")[2], 2**-10)
        elif case == "kept":  # gradients are rounded; those that are not would differ by 1e-3
            difference = 4e-4
        assert is_near(tensors[name], tensor, difference), name


@distributed()
@pytest.mark.parametrize("case", ["plain", "tied"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fresh_weights_are_equal_bit_for_bit(world, tmp_path, ranks, case):
    path = tmp_path / "x.toml"
    on_rank_zero(lambda: toml(tmp_path, CASES[case]))
    options = minimal.read_options(str(path))
    with torch.device("meta"):
        model = minimal.Llama(options.model, torch.float32)
    minimal.shard(model, options.parallel, minimal.dist.init_device_mesh("cpu", (world.size,)))
    minimal.initialize(model, options.model, options.run.seed, world.device)
    cfg = config.load(str(path))
    theirs = dict(named_parameters(build(cfg, mesh_for(cfg, world))))
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(local_tensor(parameter), local_tensor(theirs[name])), name


@pytest.mark.slow
def test_run_of_one_process_resumes_on_two_with_another_batch_size(texts, tmp_path):
    """By its own commands, on data that it finds in prepared/: as train.py on one process."""
    data = {"source": texts["three files"]["source"]}
    shutil.copytree(texts["three files"]["path"], tmp_path / "prepared" / "three files")
    (tmp_path / "theirs").mkdir()
    schedule = {"optim": {"schedule_steps": 12}, "checkpoint": {"save_every_steps": 5}}
    ours = []
    theirs = []
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for steps, batch_size, command in (7, 8, []), (12, 4, torchrun):
        train = {"steps": steps, "global_batch_size": batch_size, "micro_batch_size": 2}
        path = toml(tmp_path, schedule, {"data": data, "train": train})
        command = [sys.executable, *command, REPO / "minimal.py", path]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ours += [json.loads(line) for line in done.stdout.splitlines()]
        path = toml(tmp_path / "theirs", schedule, {"data": texts["three files"], "train": train})
        cfg = config.load(str(path))
        (theirs,) = run_on_ranks(1, functools.partial(train_run, cfg))
    check_rows(ours, theirs)
    saved = sorted(path.name for path in (tmp_path / "x-minimal/checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (5, 7, 10, 12)]


@distributed(ranks=2)
def test_gradient_that_is_not_finite_ends_the_run(world, texts, tmp_path, monkeypatch):
    path = tmp_path / "x.toml"
    on_rank_zero(lambda: toml(tmp_path, {"data": texts["three files"]}))
    monkeypatch.setattr(minimal, "learning_rate", lambda *arguments: math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):  # in the second step
        run_minimal(path)
    assert not (tmp_path / "x-minimal").exists()


# Prepared data


IDENTITIES = [
    {"source": "python-stdlib"},
    {"validation": "own.jsonl"},
    {"text_field": "body", "max_tokens": 1000, "split": "a", "subset": "b"},
    {"tokenizer": "sentencepiece.model"},
    {"tokenizer": "json"},
]


@pytest.mark.quick
@pytest.mark.parametrize("changes", IDENTITIES)
def test_the_folder_agrees_in_every_key_of_the_identity(tmp_path, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("json").mkdir()
    pathlib.Path("json/tokenizer.json").write_text('{"model": {}}')
    pathlib.Path("json/tokenizer_config.json").write_text('{"eos_token": "x"}')
    pathlib.Path("sentencepiece.model").write_bytes(b"\nmodel")
    path = toml(tmp_path, {"data": {"source": "texts.jsonl", **changes}})
    options = minimal.read_options(str(path))
    cfg = config.load(str(path))
    theirs = identity(cfg.data, cfg.model.vocab_size)
    for key in {*theirs, "python", "messages_field"}:
        write_folder(f"other-{key}", theirs | {key: "other"})
    write_folder("incomplete", theirs, complete=False)
    pathlib.Path("prepared/old").mkdir()
    pathlib.Path("prepared/old/manifest.json").write_text('{"identity": {"version": 4}}')
    with pytest.raises(ValueError, match="of: none; `./run_train.sh -m prepare"):
        minimal.open_data(options)
    write_folder("one", theirs)
    assert [tokens.tolist() for tokens in minimal.open_data(options)] == [[7, 7, 7]]
    write_folder("two", theirs)
    with pytest.raises(ValueError, match="of: prepared/one, prepared/two$"):
        minimal.open_data(options)


def write_folder(name: str, identity: dict, complete: bool = True) -> None:
    """A folder of three tokens in prepared/."""
    folder = pathlib.Path("prepared", name)
    folder.mkdir(parents=True)
    np.array([7, 7, 7], np.uint16).tofile(folder / "train-00000.bin")
    listed = {"train": [["train-00000.bin", "uint16", 3, 0, None, None, None]]}
    manifest = {"identity": identity, "complete": complete, "token_files": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest))


# Options


REFUSED = """parallel.tp=2 parallel.keep_fp32=["head"] optim.name="muon" model.qk_norm=true lora.rank=2
model.rope_scaling.factor=2 data.document_mask=true data.sources=[{source="x"}] train.skip_nonfinite=1
train.step=1 eval.batch=1 sections.x=1"""


@pytest.mark.quick
@pytest.mark.parametrize("option", REFUSED.split())
def test_option_that_is_not_implemented_is_refused(tmp_path, option):
    path = toml(tmp_path)
    minimal.read_options(str(path))
    name, _, value = option.partition("=")
    section, key = name.rsplit(".", 1)
    lines = path.read_text().splitlines()
    if f"[{section}]" not in lines:
        lines.append(f"[{section}]")
    lines.insert(lines.index(f"[{section}]") + 1, f"{key} = {value}")
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"not implemented: {section}"):
        minimal.read_options(str(path))


@pytest.mark.quick
@pytest.mark.parametrize(
    "text, expected",
    [
        ("[model]\nx\n", "line 2"),
        ((REPO / "configs/tiny.toml").read_text(), "run_train.sh -m prepare CONFIG"),
    ],
)
def test_wrong_input_exits_with_2(tmp_path, monkeypatch, capsys, text, expected):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("x.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["minimal.py", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        minimal.main()
    assert ended.value.code == 2 and expected in capsys.readouterr().err


@pytest.mark.quick
def test_defaults_are_those_of_train():
    for section, defaults in minimal.OPTIONS:
        for option, default in defaults.items():
            theirs = config.SCHEMA.options[f"{section}.{option}"].default
            theirs = [*theirs] if isinstance(theirs, tuple) else theirs
            assert default == (None if theirs is MISSING else theirs), option


@pytest.mark.quick
def test_options_that_change_no_loss_are_ignored(tmp_path):
    changes = {"parallel": {"compile": True, "dp_replicate": 2}, "log": {"every_steps": 3}}
    changes |= {"eval": {"batches": 1}, "profile": {"at_step": 2}, "checkpoint": {"keep_last": 2}}
    assert minimal.read_options(str(toml(tmp_path, changes))).run.seed == 0
    for section, names in minimal.IGNORED.items():
        assert {f"{section}.{name}" for name in names} <= config.SCHEMA.options.keys()


@pytest.mark.quick
def test_it_is_one_page_that_imports_torch_alone():
    lines = (REPO / "minimal.py").read_text().splitlines()
    assert len(lines) <= 400 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    modules = {*re.findall(r"^ *(?:from|import) (\w+)", text, re.M)}
    assert modules <= {"torch", "tomli", *sys.stdlib_module_names}
    assert not re.search(r"^ *global |^[a-z]\w* = ", text, re.M)
