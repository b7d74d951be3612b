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
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import config
import minimal
from data import record
from data.encode import is_validation
from data.identity import identity
from data.order import Permutation
from data.prepare import prepare
from data.tokens import Windows
from model.llama import named_parameters
from schema import flatten
from tests import cases
from tests.conftest import REPO, rows, tables, words

pytestmark = [pytest.mark.early, pytest.mark.slow]

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
    "growing": {  # an epoch has eight segments, and ends in the seventh step
        "model": {"dim": 20, "n_layers": 1, "n_heads": 1, "ffn_dim": 8},
        "train": {"steps": 9, "seq_len": 100, "global_batch_size": 40, "micro_batch_size": 4},
    },
    "few": {  # an epoch ends in the eighth step
        "model": {"dim": 20, "n_layers": 1, "n_heads": 1, "ffn_dim": 8},
        "train": {"steps": 12, "seq_len": 30, "global_batch_size": 10, "micro_batch_size": 1},
    },
}
CASES["few, growing"] = CASES["few"]
# The prepared text of a case, and data.order; of the others, all words in the global order.
TEXTS = {
    "growing": ("words", "growing"),
    "few": ("few", "global"),
    "few, growing": ("few", "growing"),
}
RANKS = {
    1: ["plain", "tied", "bfloat16", *TEXTS],
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


@contextlib.contextmanager
def short_segments():
    """Borders at 1024 tokens, doubling to 8192, then every 4096: a small text has several segments."""
    with (
        mock.patch.multiple(record, FIRST_BORDER=1 << 10, BORDER_STEP=1 << 12),
        mock.patch.multiple(minimal, FIRST_BORDER=1 << 10, BORDER_STEP=1 << 12),
    ):
        yield


def text_of(output: pathlib.Path, name: str, *changes: dict) -> str:
    """The TOML of a run: BASE with changes, section by section."""
    merged = {
        **BASE,
        "run": {"name": name.replace(" ", "-").replace(",", ""), "output_dir": str(output)},
    }
    for change in changes:
        for section, values in change.items():
            merged[section] = {**merged.get(section, {}), **values}
    return config.SCHEMA.to_toml(tables(**merged))


def run_both(paths: list[str]) -> list[tuple[list[dict], list[dict], list[str]]]:
    """For each TOML: train.py's rows, minimal.py's, and the names of parameters whose fresh shards differ."""
    found = []
    with cases.process_group() as world, short_segments():
        for path in paths:
            cfg, printed = config.load(path), io.StringIO()
            spread = cases.world_for(cfg, world)
            cases.run_training(cfg, spread)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                options = minimal.read_options(path)
                minimal.train(options, *minimal.open_data(options), world.device)
                with torch.device("meta"):
                    model = minimal.Llama(options.model, torch.float32)
                mesh = minimal.dist.init_device_mesh("cpu", (world.size,))
                minimal.shard(model, options.parallel, mesh)
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


def prepare_text(source: pathlib.Path, folder: pathlib.Path, order: str = "global") -> dict:
    """[data] of the text that is prepared into a folder, to its end."""
    section = {"source": str(source), "path": str(folder), "order": order}
    with short_segments():
        prepare(config.from_dict(tables(model=MODEL, data=section), "test.toml"), whole=True)
    return {"data": section}


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> pathlib.Path:
    """About 40 documents of random words, without those that would be held out."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    texts = [words(number, 60) for number in range(40)]
    kept = [json.dumps({"text": text}) + "\n" for text in texts if not is_validation(text)]
    path.write_text("".join(kept))
    return path


@pytest.fixture(scope="module")
def data(corpus, few, tmp_path_factory) -> dict[tuple[str, str], dict]:
    """[data] of each prepared text, by name and order."""
    folder, sources = tmp_path_factory.mktemp("minimal"), {"words": corpus, "few": few}
    return {
        (name, order): prepare_text(sources[name], folder / f"{name}-{order}", order)
        for name, order in [("words", "global"), *TEXTS.values()]
    }


@pytest.fixture(scope="module")
def trained(on_ranks, data, tmp_path_factory) -> tuple[dict, pathlib.Path]:
    """({(ranks, case): what each rank found}, the folder of runs below their number of ranks)."""
    output, found = tmp_path_factory.mktemp("runs"), {}
    for ranks, names in RANKS.items():
        paths = []
        for name in names:
            paths.append(output / f"{ranks} {name}.toml")
            text = data[TEXTS.get(name, ("words", "global"))]
            case = LONG if name == "long" else CASES[name]
            paths[-1].write_text(text_of(output / str(ranks), name, text, case))
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
    folder = data["words", "global"]["data"]["path"]
    shutil.copytree(folder, tmp_path / "prepared" / "words")
    schedule = {"data": {"source": str(corpus)}, "optim": {"schedule_steps": 30}}
    path, found = tmp_path / "long.toml", []
    for steps in (15, 30):
        path.write_text(text_of(tmp_path, "long", LONG, schedule, {"train": {"steps": steps}}))
        (stdout, stderr), *others = (
            [run_alone(str(path))] if steps == 15 else on_ranks(2, run_main, str(path))
        )
        assert not stderr and not any(map("".join, others))
        found += map(json.loads, stdout.splitlines())
    check_rows(found, trained[0][2, "long"][0][0])
    saved = sorted(p.name for p in (tmp_path / "long-minimal/checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (10, 15, 20, 30)]


def run_to_infinity(path: str) -> tuple[str, list[dict]]:
    """(the error, the rows) of a run whose first update makes the weights NaN."""
    options, printed = minimal.read_options(path), io.StringIO()
    with cases.process_group() as world, contextlib.redirect_stdout(printed):
        try:
            with mock.patch.object(minimal, "learning_rate", return_value=float("nan")):
                minimal.train(options, *minimal.open_data(options), world.device)
            error = ""
        except RuntimeError as caught:
            error = str(caught)
    return error, [*map(json.loads, printed.getvalue().splitlines())]


@pytest.mark.quick
def test_a_gradient_that_is_not_finite_ends_the_run(on_ranks, data, tmp_path):
    path = tmp_path / "infinite.toml"
    path.write_text(text_of(tmp_path, "infinite", data["words", "global"]))
    results = on_ranks(2, run_to_infinity, str(path))
    assert all("non-finite" in error for error, _ in results)
    assert [row["step"] for row in results[0][1]] == [1] and not results[1][1]
    assert not (tmp_path / "infinite-minimal").exists()


def test_texts_have_what_their_cases_are_for(data):
    manifests = {
        key: json.loads(pathlib.Path(section["data"]["path"], "manifest.json").read_text())
        for key, section in data.items()
    }
    assert len(manifests["words", "growing"]["segments"]) == 8
    assert manifests["words", "growing"]["validation"][0] == "heldout"
    for order in ("global", "growing"):
        file, _, end = manifests["few", order]["validation"]
        assert (file, end) == ("train", 1024) and end < manifests["few", order]["tokens"]["train"]


class Positions:
    """A text of which each token is its position."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, span: slice) -> torch.Tensor:
        return torch.arange(span.start, span.stop)


@pytest.mark.parametrize("held_out", [range(0), range(1038091, 1 << 20)])
def test_segments_of_a_long_text(held_out):
    """Of 2^31 tokens: at the borders of data/record.py, each segment in its permutation, then everything."""
    length, text = 1000, Positions(1 << 31)
    cfg = SimpleNamespace(
        run=SimpleNamespace(seed=3),
        train=SimpleNamespace(seq_len=length),
        data=SimpleNamespace(order="growing"),
    )
    numbering = Windows(length, (held_out.start, held_out.stop) if held_out else None)
    borders = [record.border_of(segment) for segment in range(16)]
    assert borders[-1] == len(text)
    ends = [0, *map(numbering.count, borders)]
    for segment in range(len(ends) - 1):
        first, end = ends[segment], ends[segment + 1]
        order = Permutation(end - first, 3, 0, f"0/{segment}")
        for index in (first, (first + end) // 2, end - 1):
            begin = length * numbering(first + order(index - first))
            tokens = minimal.read_sample(cfg, text, held_out, index)
            assert tokens.equal(torch.arange(begin, begin + length + 1))
    for epoch in (1, 2):
        begin = length * numbering(Permutation(ends[-1], 3, epoch)(7))
        assert minimal.read_sample(cfg, text, held_out, epoch * ends[-1] + 7)[0] == begin


@pytest.mark.parametrize("order", ["global", "growing"])
def test_an_epoch_has_every_window_but_those_with_validation_tokens(order):
    held_out, text = range(1014, 1024), Positions(2500)
    cfg = SimpleNamespace(
        run=SimpleNamespace(seed=0),
        train=SimpleNamespace(seq_len=30),
        data=SimpleNamespace(order=order),
    )
    windows = [range(begin, begin + 31) for begin in range(0, 2500 - 30, 30)]
    kept = [each.start for each in windows if not {*each} & {*held_out}]
    assert len(kept) == len(windows) - 2
    with short_segments():
        for epoch in range(2):
            samples = range(epoch * len(kept), (epoch + 1) * len(kept))
            found = [int(minimal.read_sample(cfg, text, held_out, number)[0]) for number in samples]
            assert sorted(found) == kept and found != kept


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "python-stdlib"},
        {"order": "growing", "validation": "own.jsonl"},
        {"text_field": "body", "max_tokens": 1000, "split": "a", "subset": "b"},
        {"tokenizer": "sentencepiece.model"},
        {"tokenizer": "json"},
        {"tokenizer": "json/tokenizer.json"},
    ],
)
def test_data_agrees_in_every_key_of_the_trainers_identity(tmp_path, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("json").mkdir()
    pathlib.Path("json/tokenizer.json").write_text('{"model": {}}')
    pathlib.Path("json/tokenizer_config.json").write_text('{"eos_token": "x"}')
    pathlib.Path("sentencepiece.model").write_bytes(b"\nmodel")
    for name in ("texts.jsonl", "own.jsonl"):
        pathlib.Path(name).write_text('{"text": "a"}\n')
    section = {"source": "texts.jsonl", **changes}
    pathlib.Path("x.toml").write_text(text_of(tmp_path, "x", {"data": section}))
    options, theirs = minimal.read_options("x.toml"), identity(config.load("x.toml"))

    def write(folder: str, **changes: object) -> None:
        """A complete folder of one token, prepared with these changes."""
        pathlib.Path("prepared", folder).mkdir(parents=True, exist_ok=True)
        pathlib.Path("prepared", folder, "train.bin").write_bytes(bytes(2))
        manifest = {"identity": theirs | changes, "tokens": {"train": 1}, "dtype": "uint16"}
        text = json.dumps({**manifest, "sha256": {}})
        pathlib.Path("prepared", folder, "manifest.json").write_text(text)

    for key in {*theirs, "order", "validation", "python", "messages_field"}:
        write(f"other-{key}", **{key: "other"})
    with pytest.raises(ValueError, match="none; `python -m data.prepare"):
        minimal.open_data(options)
    write("same")
    assert len(minimal.open_data(options)[0]) == 1


def test_a_folder_of_an_earlier_version_names_no_validation_text(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data["words", "global"]["data"]["path"], "words")
    manifest = json.loads(pathlib.Path("words/manifest.json").read_text())
    del manifest["validation"], manifest["segments"]
    pathlib.Path("words/manifest.json").write_text(json.dumps(manifest))
    section = {**data["words", "global"]["data"], "path": "words"}
    pathlib.Path("x.toml").write_text(text_of(tmp_path, "x", {"data": section}))
    tokens, validation = minimal.open_data(minimal.read_options("x.toml"))
    assert len(tokens) == manifest["tokens"]["train"] and not validation


def refusal(monkeypatch, capsys, folder: pathlib.Path, *changes: dict) -> str:
    """What minimal.py prints of a configuration in a folder, before it exits with 2."""
    monkeypatch.chdir(folder)
    pathlib.Path("x.toml").write_text(text_of(folder, "x", *changes))
    monkeypatch.setattr(sys, "argv", ["minimal.py", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        minimal.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_two_folders_that_match_are_both_named(data, corpus, tmp_path, monkeypatch, capsys):
    for order, name in [("global", "a"), ("global", "b"), ("growing", "c")]:
        folder = data["words", order]["data"]["path"]
        shutil.copytree(folder, tmp_path / "prepared" / name)
    said = refusal(monkeypatch, capsys, tmp_path, {"data": {"source": str(corpus)}})
    assert "data.path must name one complete folder" in said
    assert said.endswith("of: prepared/a, prepared/b\n")


@pytest.mark.parametrize("order", ["global", "growing"])
@pytest.mark.parametrize("named", [False, True])
def test_an_incomplete_folder(data, corpus, tmp_path, monkeypatch, capsys, order, named):
    folder = tmp_path / "prepared" / "words"
    shutil.copytree(data["words", order]["data"]["path"], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    section = {"source": str(corpus), "order": order}
    if named:
        section["path"] = str(folder)
    said = refusal(monkeypatch, capsys, tmp_path, {"data": section})
    assert "of: none; `python -m data.prepare CONFIG` prepares one" in said


def test_data_path_must_be_prepared_for_the_configuration(data, few, tmp_path, monkeypatch, capsys):
    said = refusal(
        monkeypatch, capsys, tmp_path, data["few", "global"], {"data": {"validation": str(few)}}
    )
    assert "python -m data.prepare" in said


@pytest.mark.parametrize(
    "name, value",
    [
        ("parallel.tp", "2"),
        ("parallel.cp", "2"),
        ("parallel.float8", '"rowwise"'),
        ("parallel.keep_fp32", '["head"]'),
        ("optim.state_dtype", '"bfloat16"'),
        ("optim.name", '"muon"'),
        ("model.freeze", '["head*"]'),
        ("model.init_from", '"x"'),
        ("model.qk_norm", "true"),
        ("model.rope_scaling.factor", "2"),
        ("data.document_mask", "true"),
        ("data.sources", '[{source = "x"}]'),
        ("data.messages_field", '"x"'),
        ("lora.rank", "2"),
        ("train.skip_nonfinite", "1"),
        ("train.step", "1"),
        ("sections.x", "1"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, name, value):
    path = tmp_path / "refused.toml"
    path.write_text(text_of(tmp_path, "refused"))
    minimal.read_options(str(path))
    section, key = name.rsplit(".", 1)
    lines = path.read_text().splitlines()
    if f"[{section}]" not in lines:
        lines.append(f"[{section}]")
    lines.insert(lines.index(f"[{section}]") + 1, f"{key} = {value}")
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"not implemented: {section}"):
        minimal.read_options(str(path))


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "No such file"),
        ("[model]\nx\n", "line 2"),
        ("[lora]", "not implemented: lora"),
        ("seed = 1", "not implemented: seed"),
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
    assert accepted == {"tiny", "smollm2-135m", "tinyllama-1.1b", "llama8b"}


def test_defaults_are_those_of_the_trainer():
    ours = {}
    for section, defaults in minimal.OPTIONS:
        ours |= {f"{section}.{option}": default for option, default in defaults.items()}
    trainers = {name: field.default for name, (_, field) in config.SCHEMA.options.items()}
    assert ours.keys() <= trainers.keys()
    for name, default in ours.items():
        theirs = None if trainers[name] is config.MISSING else trainers[name]
        assert default == ([*theirs] if isinstance(theirs, tuple) else theirs), name


def test_each_option_that_it_implements_has_another_value_in_some_case(tmp_path):
    """One that is accepted and has no effect would make that case's losses differ."""
    path, found = tmp_path / "x.toml", []
    for case in (*CASES.values(), LONG):
        path.write_text(text_of(tmp_path, "x", case))
        found.append(minimal.read_options(str(path)))
    for section, defaults in minimal.OPTIONS:
        if section == "data":  # of which test_data_agrees_in_every_key_of_the_trainers_identity
            continue
        for option, default in defaults.items():
            if option not in ("name", "output_dir", "device"):
                values = [getattr(getattr(cfg, section), option) for cfg in found]
                assert values.count(default) < len(values), f"{section}.{option}"


def test_what_changes_no_loss_is_ignored(tmp_path):
    changes = {
        "run": {"deterministic": True, "start_timeout_seconds": 9.0},
        "parallel": {"compile": True, "dp_replicate": 2, "dp_shard": 2},
        "log": {"every_steps": 3},
        "eval": {"batches": 1},
        "profile": {"at_step": 2},
        "checkpoint": {"keep_last": 2},
    }
    path = tmp_path / "x.toml"
    path.write_text(text_of(tmp_path, "x", changes))
    assert minimal.read_options(str(path)).run.seed == 0


def test_it_is_one_page_that_needs_torch_alone():
    text = (REPO / "minimal.py").read_text()
    tree = ast.parse(text)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert {name.split(".")[0] for name in names} <= {"torch", "tomli", *sys.stdlib_module_names}
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))
    constants = [t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    assert all(name.isupper() for name in constants)
