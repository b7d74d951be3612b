"""minimal.py is the specification: of the same TOML, train.py makes its fresh weights, losses, gradient norms and
checkpoints on 1, 2 and 4 ranks."""

import ast
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import tomli
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import config
import minimal
from model.llama import named_parameters
from options import flatten
from tests import cases
from tests.conftest import REPO, prepare_one, rows, tables

# 4 ranks divide none of them. The embedding has two blocks of generators, of which ranks draw parts.
MODEL = {"dim": 250, "n_layers": 2, "n_heads": 5, "n_kv_heads": 1, "ffn_dim": 75, "vocab_size": 323}
# The norm is above the limit, and AdamW divides a gradient's size out again, but for one small against its eps.
BASE = {
    "model": MODEL,
    "train": {"steps": 4, "seq_len": 32, "global_batch_size": 8, "max_grad_norm": 0.3},
    "optim": {"lr": 3e-3, "eps": 1e-3, "weight_decay": 1.0, "warmup_steps": 2},
    "checkpoint": {},
}
CASES = {
    "plain": {"train": {"micro_batch_size": None}},
    "epochs": {
        "model": {"dim": 20, "n_layers": 1, "n_heads": 1, "ffn_dim": 8},  # of six windows each
        "train": {"steps": 2, "seq_len": 4000, "global_batch_size": 4, "micro_batch_size": 1},
    },
    "recomputed": {
        "parallel": {"recompute": "full", "prefetch_forward": 2, "prefetch_backward": 2},
        "optim": {"schedule": "linear"},
        "train": {"micro_batch_size": 1},
    },
    # Of float32 matrices, gradients rounded to bfloat16 are the same up to 1e-4, but not those that are not rounded.
    "kept": {
        "parallel": {
            "reshard_after_forward": False,
            "prefetch_forward": 0,
            "prefetch_backward": 0,
            "reduce_dtype": "bfloat16",
        },
        "optim": {"schedule": "constant"},
        "train": {"max_grad_norm": "off"},
        "run": {"seed": 7},
    },
    "tied": {
        "model": {
            "tie_embeddings": True,
            "head_dim": 10,
            "n_heads": 4,
            "n_kv_heads": 2,
            "norm_eps": 1e-2,
            "rope_theta": 100.0,
        },
        "optim": {
            "schedule": "wsd",
            "decay_steps": 2,
            "schedule_steps": 5,
            "min_lr_ratio": 0.5,
            "betas": [0.8, 0.9],
        },
    },
    "tied, recomputed": {
        "model": {"tie_embeddings": True},
        "train": {"micro_batch_size": 1},
        "parallel": {"recompute": "full", "prefetch_forward": 2, "prefetch_backward": 2},
    },
    "bfloat16": {"parallel": {"param_dtype": "bfloat16"}},
    "bfloat16, wide stream": {
        "parallel": {
            "param_dtype": "bfloat16",
            "output_dtype": "float32",
            "reduce_dtype": "bfloat16",
        },
        "train": {"micro_batch_size": 1},
    },
    "float32, narrow stream": {"parallel": {"output_dtype": "bfloat16"}},
}
RANKS = {
    1: ["plain", "tied", "bfloat16"],
    2: [*CASES, "long"],
    4: ["plain", "recomputed", "tied, recomputed"],
}
LONG = {
    "model": {"dim": 48, "n_heads": 4, "n_kv_heads": 2},
    "train": {"steps": 30},
    "checkpoint": {"save_every_steps": 10},
    "log": {"every_steps": 1},
    "eval": {"batches": 1},
}


def text_of(output: pathlib.Path, name: str, *changes: dict) -> str:
    """The TOML of a run: BASE with changes, section by section."""
    merged = {
        **BASE,
        "run": {"name": name.replace(" ", "-").replace(",", ""), "output_dir": str(output)},
    }
    for change in changes:
        for section, values in change.items():
            merged[section] = {**merged.get(section, {}), **values}
    return config.to_toml(config.from_dict(tables(**merged), "test.toml"))


def run_both(paths: list[str]) -> list[tuple[list[dict], list[dict], list[str]]]:
    """For each TOML: train.py's rows, minimal.py's, and the names of parameters whose fresh shards differ."""
    found = []
    with cases.process_group() as world:
        for path in paths:
            cfg, printed = config.load(path), io.StringIO()
            cases.run_training(cfg, spread := cases.world_for(cfg, world))
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                options = minimal.read_options(path)
                minimal.train(
                    options, minimal.open_data(options.data, options.model.vocab_size), world.device
                )
                with torch.device("meta"):
                    model = minimal.Llama(options.model)
                mesh = minimal.dist.init_device_mesh("cpu", (world.size,))
                minimal.shard(model, options.model.tie_embeddings, options.parallel, mesh)
                minimal.initialize(model, options.model, options.run.seed, world.device)
            theirs = dict(named_parameters(cases.build(cfg, spread)))
            ours = dict(model.named_parameters())
            assert ours.keys() == theirs.keys()
            differ = [
                name for name, p in ours.items() if not p.to_local().equal(theirs[name].to_local())
            ]
            folder = config.run_folder(cfg)
            found.append(
                (
                    rows(folder) if world.rank == 0 else [],
                    [*map(json.loads, printed.getvalue().splitlines())],
                    differ,
                )
            )
    return found


@pytest.fixture(scope="module")
def data(corpus, prepared, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("minimal") / "words"
    source = {"source": str(corpus), "path": str(folder)}
    prepare_one(config.from_dict(tables(model=MODEL, data=source), "test.toml"))
    return {"data": source}


@pytest.fixture(scope="module")
def trained(on_ranks, data, tmp_path_factory) -> tuple[dict, pathlib.Path]:
    """({(ranks, case): what each rank found}, the folder of runs below their number of ranks)."""
    output, found = tmp_path_factory.mktemp("runs"), {}
    for ranks, names in RANKS.items():
        paths = []
        for name in names:
            paths.append(output / f"{ranks} {name}.toml")
            paths[-1].write_text(
                text_of(output / str(ranks), name, data, LONG if name == "long" else CASES[name])
            )
        for rank in on_ranks(ranks, run_both, [*map(str, paths)]):
            for name, result in zip(names, rank):
                found.setdefault((ranks, name), []).append(result)
    return found, output


def read_by_torch(checkpoint: pathlib.Path, path: pathlib.Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, path)
    return flatten(torch.load(path))


def check_rows(ours: list[dict], theirs: list[dict], near: float = 1e-5) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=near)
    norms = 2e-4 if near == 1e-5 else 2**-10
    assert [row["grad_norm"] for row in ours] == pytest.approx(
        [row["grad_norm"] for row in theirs], rel=norms
    )


@pytest.mark.parametrize(
    "ranks, name", [(ranks, name) for ranks, names in RANKS.items() for name in names]
)
def test_train_computes_what_minimal_does(trained, tmp_path, ranks, name):
    found, output = trained
    (theirs, ours, _), *others = found[ranks, name]
    assert len(ours) >= 2 and not any(printed for _, printed, _ in others)
    assert not any(differ for _, _, differ in found[ranks, name])
    narrow = "bfloat16" in name or "narrow" in name
    check_rows(ours, theirs, 2**-11 if "bfloat16" in name else 1e-5)
    run, step = (
        output / str(ranks) / name.replace(" ", "-").replace(",", ""),
        f"step-{ours[-1]['step']:08d}",
    )
    wanted = read_by_torch(run / "checkpoints" / step, tmp_path / "theirs")
    tensors = read_by_torch(
        pathlib.Path(f"{run}-minimal") / "checkpoints" / step, tmp_path / "ours"
    )
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (tensors[key].shape, tensors[key].dtype) == (tensor.shape, tensor.dtype)
        near = (
            {"exp_avg": 2**-6, "exp_avg_sq": 2**-6}.get(key.rpartition(".")[2], 2**-10)
            if narrow
            else 1e-4
        )
        assert (tensors[key] - tensor).norm() <= near * tensor.norm(), key


def run_main(path: str) -> tuple[str, str]:
    """(stdout, stderr) of a process that torchrun starts beside the configuration."""
    os.chdir(pathlib.Path(path).parent)
    with (
        mock.patch.object(sys, "argv", ["minimal.py", path]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        minimal.main()
    return out.getvalue(), err.getvalue()


def run_alone(path: str) -> tuple[str, str]:
    """The same of `python minimal.py`."""
    done = subprocess.run(
        [sys.executable, REPO / "minimal.py", path],
        cwd=pathlib.Path(path).parent,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_run_of_one_process_resumes_on_two(trained, on_ranks, data, corpus, tmp_path):
    """30 steps, of which one process does 15, on data that is found below prepared/: as train.py without a break."""
    shutil.copytree(data["data"]["path"], tmp_path / "prepared" / "words")
    schedule = {"data": {"source": str(corpus)}, "optim": {"schedule_steps": 30}}
    path, found = tmp_path / "long.toml", []
    for steps in (15, 30):
        path.write_text(text_of(tmp_path, "long", LONG, schedule, {"train": {"steps": steps}}))
        (stdout, stderr), *others = (
            [run_alone(str(path))] if steps == 15 else on_ranks(2, run_main, str(path))
        )
        assert (
            stderr.count("ignored: ") == 1
            and "eval.batches" in stderr
            and "log.every_steps" in stderr
        )
        assert not any(map("".join, others))
        found += map(json.loads, stdout.splitlines())
    check_rows(found, trained[0][2, "long"][0][0])
    saved = sorted(p.name for p in (tmp_path / "long-minimal/checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (10, 15, 20, 30)]


@pytest.mark.parametrize(
    "name, value",
    [
        ("parallel.tp", "2"),
        ("parallel.cp", "2"),
        ("parallel.dp_replicate", "2"),
        ("parallel.dp_shard", "2"),
        ("parallel.recompute", '"selective"'),
        ("parallel.recompute", "2"),
        ("parallel.reshard_after_forward", "2"),
        ("parallel.float8", '"rowwise"'),
        ("parallel.keep_fp32", '["head"]'),
        ("parallel.replicated", '["head*"]'),
        ("parallel.cpu_offload", "true"),
        ("parallel.sync_every_micro_batch", "false"),
        ("optim.state_dtype", '"bfloat16"'),
        ("optim.name", '"muon"'),
        ("optim.schedule", '"other"'),
        ("model.freeze", '["head*"]'),
        ("model.init_from", '"x"'),
        ("model.qk_norm", "true"),
        ("model.rope_scaling.factor", "2"),
        ("data.document_mask", "true"),
        ("data.order", '"growing"'),
        ("data.messages_field", '"x"'),
        ("lora.rank", "2"),
        ("train.skip_nonfinite", "1"),
        ("train.step", "1"),
        ("run.sed", "1"),
        ("sections.x", "1"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, name, value):
    raw = tomli.loads(text_of(tmp_path, "refused"))
    path = tmp_path / "refused.toml"
    path.write_text(config.SCHEMA.to_toml(raw))
    minimal.read_options(str(path))
    section, key = name.rsplit(".", 1)
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} = ")]
    if f"[{section}]" not in lines:
        lines.append(f"[{section}]")
    lines.insert(lines.index(f"[{section}]") + 1, f"{key} = {value}")
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"{section}.*: not implemented"):
        minimal.read_options(str(path))


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "No such file"),
        ("[model]\nx\n", "line 2"),
        ("", "model.dim is missing"),
        ("[lora]", "lora.* = {}"),
        ((REPO / "configs/tiny.toml").read_text(), "python -m data.prepare"),
    ],
)
def test_bad_input_is_said_without_a_traceback(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        pathlib.Path("x.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["minimal.py", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        minimal.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_shipped_configurations():
    accepted = set()
    for path in (REPO / "configs").glob("*.toml"):
        with contextlib.suppress(ValueError):
            minimal.read_options(str(path))
            accepted.add(path.stem)
    assert accepted == {"tiny", "smollm2-135m", "tinyllama-1.1b"}


def test_defaults_are_those_of_the_trainer():
    for name, (_, field) in config.SCHEMA.options.items():
        section, key = name.rsplit(".", 1)
        if key in minimal.OPTIONS.get(section, {}):
            ours = minimal.OPTIONS[section][key]
            ours = ours[0] if isinstance(ours, tuple) else ours
            theirs = [*field.default] if isinstance(field.default, tuple) else field.default
            assert theirs == ours or (ours is ... and not isinstance(theirs, int | str)), name
        else:  # absent unless given, and then refused or ignored
            refused = section in ("lora", "model.rope_scaling") or name == "model.init_from"
            assert refused or name.startswith(minimal.IGNORED), name


def test_it_is_one_page_that_needs_torch_alone():
    text = (REPO / "minimal.py").read_text()
    tree = ast.parse(text)
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"torch", "tomli", *sys.stdlib_module_names}
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))
    constants = [t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    assert all(name.isupper() for name in constants)
