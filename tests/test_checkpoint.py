"""What counts as a checkpoint, what is kept, and what going on from one requires."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import typing
from types import SimpleNamespace

import pytest
import torch

import config
from checkpoint import catalog, compare, manifest
from checkpoint.checkpointer import Checkpointer, State
from checkpoint.load import restore, tensors_of
from config import ConfigError
from lifecycle.folder import lock
from model.build import meta_model
from model.llama import Llama
from optim import build_optimizer
from tests import cases
from tests.conftest import content, launch, make_config, rows, seal

pytestmark = [pytest.mark.early, pytest.mark.slow]


def configured(tmp_path, **keys):
    return make_config(run={"name": "r", "output_dir": str(tmp_path)}, checkpoint=keys)


def fake(cfg, step, **state):
    """A checkpoint as far as places can tell: a manifest that fits, and a state."""
    folder = catalog.path_of(cfg, step)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    (folder / "state.json").write_text(
        json.dumps({"step": step, "config": config.to_dict(cfg), **state})
    )
    seal(folder)
    return folder


def chosen(cfg, problems_of=catalog.problems_of):
    return catalog.choose(cfg, catalog.steps(cfg), problems_of)


def main(arguments: list[str]) -> int:
    from checkpoint import __main__ as tool

    return tool.main(arguments)


def names_in(cfg):
    return sorted(p.name for p in catalog.root(cfg).iterdir())


def test_a_look_without_hashing_reads_no_tensors(tmp_path, monkeypatch):
    """A launch's, before the ranks begin: of a checkpoint of terabytes, too. It sees a file of another size."""
    folder = fake(configured(tmp_path), 10)
    monkeypatch.setattr(manifest, "hash_part", None)
    assert catalog.problems_without_hashing(folder) == []
    spoil(folder, "longer")
    assert catalog.problems_without_hashing(folder)


def test_a_model_that_does_not_say_what_it_saves_saves_everything():
    """A fork's own; else the parameters that its pattern matches."""
    model = torch.nn.Linear(2, 3)
    assert tensors_of(model, None).keys() == {"model.weight", "model.bias"}
    model.saved = "b*"
    assert tensors_of(model, None).keys() == {"model.bias"}


def test_only_what_is_named_so_counts(tmp_path):
    cfg = configured(tmp_path)
    root = catalog.root(cfg)
    assert catalog.steps(cfg) == [] and chosen(cfg) == (0, {})
    for step in (9, 10, 123456789):
        fake(cfg, step)
    for name in (
        "step-99",
        "step-abc",
        "step-00000100.bak",
        "step-00000011.superseded",
        "step-00000012.corrupt",
        ".step-00000013.tmp",
    ):
        (root / name).mkdir()
    (root / "step-00000200").write_text("a file")
    (root / "step-00000300").symlink_to(root / "step-00000010")
    assert catalog.steps(cfg) == [9, 10, 123456789]
    assert chosen(cfg) == (123456789, {})

    assert catalog.find(config.run_folder(cfg)).name == "step-123456789"
    with pytest.raises(ConfigError, match=r"holds checkpoints, but \[checkpoint\] is off"):
        # it would begin anew
        chosen(make_config(run={"name": "r", "output_dir": str(tmp_path)}))


def spoil(folder, how):
    if how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "other step":
        folder.rename(folder.with_name("step-00000031"))
    elif how == "flipped":
        (folder / ".metadata").write_bytes(b"y")
    elif how == "longer":
        (folder / ".metadata").write_bytes(b"xx")
    elif how == "linked":
        (folder / ".metadata").rename(folder.parent / "elsewhere")
        (folder / ".metadata").symlink_to(folder.parent / "elsewhere")
    elif how == "pipe":
        (folder / ".metadata").unlink()
        os.mkfifo(folder / ".metadata")
    elif how == "manifest spaces":
        (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes() + b" ")
    elif how == "manifest deep":
        (folder / "manifest.json").write_text("[" * 200000)
    elif how == "manifest list":
        (folder / "manifest.json").write_text('{"files": [], "sha256": 1}')
    elif how == "path":
        entries = {**manifest.read_manifest(folder), "../x": {"size": 0, "sha256": []}}
        (folder / "manifest.json").write_bytes(manifest.render_manifest(entries))
    elif how == "huge size":
        entries = manifest.read_manifest(folder)
        entries[".metadata"]["size"] = 10**400
        (folder / "manifest.json").write_bytes(manifest.render_manifest(entries))
    elif how in ("part missing", "part too many"):
        entries = manifest.read_manifest(folder)
        entries[".metadata"]["sha256"] = entries[".metadata"]["sha256"] * (
            2 if how == "part too many" else 0
        )
        (folder / "manifest.json").write_bytes(manifest.render_manifest(entries))
    elif how in ("state list", "state type"):
        (folder / "state.json").write_text(
            "[1]" if how == "state list" else '{"step": "30", "config": {}}'
        )
        seal(folder)
    else:
        (folder / how).unlink()


SPOILED = {
    "empty": "manifest.json: expected a regular file: No such file",
    "other step": "expected step 31, found step 30",
    "flipped": ".metadata: bytes 0 to 0: expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}",
    "longer": ".metadata: expected 1 bytes, found 2",
    "linked": ".metadata: expected a regular file",
    "pipe": ".metadata: expected a regular file",
    "manifest spaces": "manifest.json: is not as it was written",
    "manifest deep": "manifest.json: is not as it was written",
    "manifest list": "manifest.json: is not as it was written",
    "part missing": "manifest.json: is not as it was written",
    "huge size": "manifest.json: is not as it was written",
    "part too many": "manifest.json: is not as it was written",
    "path": "'../x' is no name of a file",
    "state list": "state.json: expected an object",
    "state type": "state.json: expected an object",
    "state.json": "state.json: expected a regular file: No such file",
    "manifest.json": "manifest.json: expected a regular file: No such file",
    ".metadata": ".metadata: expected a regular file: No such file",
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys, how):
    cfg = configured(tmp_path)
    fake(cfg, 10), fake(cfg, 20)
    spoil(fake(cfg, 30), how)
    start, bad = chosen(cfg)
    assert start == 20 and re.search(SPOILED[how], "\n".join(*bad.values())), bad
    assert main(["verify", str(tmp_path / "r")]) == 1
    told = capsys.readouterr().out
    assert re.search(SPOILED[how], told) and "2 good, 1 bad" in told
    catalog.set_aside(cfg, start, bad)
    assert catalog.steps(cfg) == [10, 20] and names_in(cfg)[-1].endswith(".corrupt")
    assert main(["verify", str(tmp_path / "r")]) == 0


def test_a_large_file_has_a_hash_for_every_64_mib(tmp_path):
    folder, part = fake(configured(tmp_path), 10), 64 * 2**20
    content = bytes(part - 1) + b"ab" + bytes(part) + b"c"
    (folder / "large").write_bytes(content)
    seal(folder)
    entry = manifest.read_manifest(folder)["large"]
    assert entry["sha256"] == [
        hashlib.sha256(content[n : n + part]).hexdigest() for n in (0, part, 2 * part)
    ]
    with (folder / "large").open("r+b") as file:
        file.seek(part + 2**21)
        file.write(b"x")
    [problem] = catalog.problems_of(folder)
    assert f"large: bytes {part} to {2 * part - 1}: expected SHA-256" in problem
    os.truncate(folder / "large", 5)
    # told once
    assert catalog.problems_of(folder) == [
        f"{folder / 'large'}: expected {len(content)} bytes, found 5"
    ]


def test_a_file_has_a_hash_for_each_part_that_it_begins():
    part = 64 * 2**20
    sizes = (0, 1, part, part + 1, 2 * part, 2**62 + 1)
    assert [manifest.part_count(size) for size in sizes] == [0, 1, 1, 2, 2, 2**36 + 1]


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_ranks_share_the_hashing(saved_by_two, tmp_path, ranks):
    """Whatever file is damaged, one rank finds it, and one alone; ranks without a share find nothing."""
    folder = shutil.copytree(saved_by_two[0], tmp_path / "step-00000003")
    for name in manifest.read_manifest(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = [catalog.problems_of(folder, rank, ranks) for rank in range(ranks)]
        told = [
            problems
            for problems in found
            if problems and f"{name}: bytes 0 to {len(content) - 1}" in problems[0]
        ]
        assert len(told) == 1, (name, found)
        (folder / name).write_bytes(content)


def test_never_a_silent_fresh_start(tmp_path):
    cfg = configured(tmp_path)
    for step in (10, 20):
        spoil(fake(cfg, step), "flipped")
    with pytest.raises(
        ConfigError, match=r"(?s)00000020.*found.*00000010.*found.*no good checkpoint of 20, 10"
    ):
        chosen(cfg)
    assert catalog.steps(cfg) == [10, 20]
    assert main(["verify", str(tmp_path / "r")]) == 1  # 2 would be that there is nothing to verify
    fake(cfg, 30), fake(cfg, 5)
    with pytest.raises(ConfigError, match=r"(?s)00000010/.metadata.*no good checkpoint of 10"):
        chosen(configured(tmp_path, resume=10))


def test_what_cannot_be_read_now_is_not_called_damaged(tmp_path, monkeypatch):
    """Another user's file, a node that has lost its network disk: the checkpoint may be good."""
    cfg = configured(tmp_path)
    fake(cfg, 10), fake(cfg, 20)
    real = os.open

    def stale(path, *arguments, **keywords):
        if str(path).endswith("00000020/state.json"):
            raise OSError(116, "Stale file handle")
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(
        ConfigError, match=r"00000020/state\.json: cannot be read: Stale file handle"
    ):
        chosen(cfg)
    assert main(["verify", str(catalog.path_of(cfg, 20))]) == 1


def test_links_alone_are_no_fresh_start(tmp_path):
    cfg = configured(tmp_path)
    fake(cfg, 10).rename(tmp_path / "moved")
    catalog.path_of(cfg, 10).symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="step-00000010: links are not followed"):
        catalog.steps(cfg)
    fake(cfg, 8)  # to resume from it would go back without a word
    with pytest.raises(ConfigError, match="step-00000010: links are not followed"):
        catalog.steps(cfg)
    fake(cfg, 12)
    assert catalog.steps(cfg) == [8, 12]


def test_verify_has_nothing_to_do(tmp_path, capsys):
    cfg = configured(tmp_path)
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="is neither a checkpoint nor a run with one"):
            # which run_tool() prints
            main(["verify", str(nothing)])
    folder = fake(cfg, 10)
    (folder / "an empty file").touch()
    (folder / "large").write_bytes(bytes(12_345_678))
    seal(folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json")
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: good, 4 files, {size:,} bytes\n1 good, 0 bad\n"


def test_verify_names_each_bad_file(tmp_path, capsys):
    folder = fake(configured(tmp_path), 10)
    (folder / "state.json").write_text("{")
    (folder / ".metadata").write_bytes(b"y")
    assert main(["verify", str(folder)]) == 1
    first, metadata, state, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (f"{folder}: BAD", "0 good, 1 bad")
    assert metadata.startswith(f"  {folder}/.metadata: bytes 0 to 0: expected SHA-256")
    assert state.startswith(f"  {folder}/state.json: expected")


def test_what_is_no_checkpoint_is_not_called_a_bad_one(tmp_path, prepared, monkeypatch):
    with pytest.raises(ConfigError, match="is neither"):
        main(["verify", str(prepared)])  # which has a manifest.json, too

    def refuse(self: pathlib.Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match=f"{tmp_path}: cannot be read: Permission denied"):
        main(["verify", str(tmp_path)])


def test_resume_settings(tmp_path):
    fake(configured(tmp_path), 10), fake(configured(tmp_path), 20)
    assert chosen(configured(tmp_path, resume=10)) == (10, {})
    with pytest.raises(ConfigError, match="resume = 7.*it has 10, 20"):
        chosen(configured(tmp_path, resume=7))
    with pytest.raises(ConfigError, match='resume = "never"'):
        chosen(configured(tmp_path, resume="never"))


def test_other_data_is_refused(tmp_path):
    cfg = configured(tmp_path)

    def data(content: int) -> dict:
        return {
            "identity": {"source": "x", "subset": None},
            "sha256": {"train.bin": content, "heldout.bin": 2},
        }

    fake(cfg, 10, data=[data(1)])
    compare.check_same_data(cfg, 10, [data(1)])
    compare.check_same_data(cfg, 0, [data(3)])
    with pytest.raises(
        ConfigError,
        match=r"was trained on other data: source 1.sha256.train.bin was 1, is 3; choose",
    ):
        compare.check_same_data(cfg, 10, [data(3)])
    with pytest.raises(ConfigError, match="source 2.identity.source was None, is x; choose"):
        # and that alone
        compare.check_same_data(cfg, 10, [data(1), data(1)])
    for option in ("data.source", "data.max_tokens"):
        compare.check_same_data(configured(tmp_path, allow_changed=[option]), 10, [data(3)])
    with pytest.raises(ConfigError, match="was trained on other data"):
        # the mask says nothing of the corpus
        compare.check_same_data(
            configured(tmp_path, allow_changed=["data.document_mask"]), 10, [data(3)]
        )


def test_other_data_is_refused_with_the_option_that_explains_it(tmp_path):
    """Where what was prepared differs, so do the hashes, which are not named. Growing text is compared when read."""

    def data(**identity: str) -> list[dict]:
        return [
            {
                "identity": {"source": "x", "tokenizer": "t", **identity},
                "sha256": {"train.bin": hash(tuple(identity.items()))},
            }
        ]

    cfg = configured(tmp_path)
    fake(cfg, 10, data=[{**data()[0], "segments": ["a"], "validation_hash": "b"}])
    compare.check_same_data(cfg, 10, data())
    for identity, option, named in (
        ({"tokenizer": "u"}, "tokenizer", "source 1.identity.tokenizer was t, is u"),
        ({"source": "y"}, "source", "source 1.identity.source was x, is y"),
        (
            {"source": "y", "tokenizer": "u"},
            "source",
            "source 1.identity.source was x, is y; source 1.identity.tokenizer was t, is u",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            compare.check_same_data(cfg, 10, data(**identity))
        assert str(refused.value) == (
            f"{catalog.path_of(cfg, 10)}: was trained on other data: {named}; choose another "
            f'run.name, or allow it: checkpoint.allow_changed = ["data.{option}"]'
        )


def test_later_checkpoints_are_set_aside(tmp_path):
    cfg = configured(tmp_path)
    for step in (10, 20, 30):
        fake(cfg, step)
    catalog.set_aside(cfg, 10, {})
    fake(cfg, 20)
    catalog.set_aside(cfg, 10, {})
    assert names_in(cfg) == [
        "step-00000010",
        "step-00000020.1.superseded",
        "step-00000020.superseded",
        "step-00000030.superseded",
    ]


def test_unfinished_folders_are_removed_and_nothing_else(tmp_path):
    cfg = configured(tmp_path)
    root = catalog.root(cfg)
    for name in (".step-00000010.tmp", "step-00000020.tmp", ".step-1.tmp", "mine.tmp", "elsewhere"):
        (root / name).mkdir(parents=True)
    (root / ".step-00000030.tmp").symlink_to(root / "elsewhere")
    catalog.remove_unfinished(cfg)
    assert names_in(cfg) == [
        ".step-00000030.tmp",
        ".step-1.tmp",
        "elsewhere",
        "mine.tmp",
        "step-00000020.tmp",
    ]


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("model", "dim", 64),
        ("train", "seq_len", 16),
        ("train", "global_batch_size", 16),
        ("run", "seed", 1),
        ("data", "source", "other.jsonl"),
    ],
)
def test_another_run_is_refused_by_name(tmp_path, section, key, value):
    fake(configured(tmp_path), 10)

    def changed(**keys):
        raw = config.to_dict(configured(tmp_path, **keys))
        raw[section][key] = value
        return config.from_dict(raw, "changed.toml")

    advice = (
        "its weights have those shapes"
        if key == "dim"
        else f'allow it: .*allow_changed = ."{section}.{key}".$'
    )
    with pytest.raises(
        ConfigError, match=f"{section}.{key} = {value}.*was trained with .*{advice}"
    ):
        compare.check_same_run(changed(), 10)
    compare.check_same_run(changed(allow_changed=[f"{section}.{key}"]), 10)


def test_a_head_s_width_may_be_said_or_not(tmp_path):
    def with_width(width: int | None) -> config.Config:
        cfg = configured(tmp_path)
        return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, head_dim=width))

    width = configured(tmp_path).model.width_per_head
    for step, (before, now) in enumerate([(None, width), (width, None), (None, None)], 1):
        fake(with_width(before), step)
        compare.check_same_run(with_width(now), step)
        told = rf"^model\.head_dim = {2 * width}: .*was trained with {before or 'absent'}"
        with pytest.raises(ConfigError, match=told):
            compare.check_same_run(with_width(2 * width), step)


def test_the_format_of_rows_may_be_said_or_not(tmp_path):
    def of_format(name: str | None, field: str | None = None) -> config.Config:
        cfg = configured(tmp_path)
        data = dataclasses.replace(cfg.data, format=name, messages_field=field)
        return dataclasses.replace(cfg, data=data)

    same = [(None, "text", None), ("text", None, None), (None, "messages", "a")]
    for step, (before, now, field) in enumerate(same, 1):
        fake(of_format(before, field), step)
        compare.check_same_run(of_format(now, field), step)
        with pytest.raises(ConfigError, match=r"^data\.format = alpaca: .*was trained with "):
            compare.check_same_run(of_format("alpaca", field), step)


def test_another_start_is_refused(tmp_path):
    """But of adapters, whose base may lie elsewhere."""

    def started(folder: str) -> config.Config:
        cfg = configured(tmp_path)
        return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, init_from=folder))

    fake(started("/a"), 10)
    compare.check_same_run(started("/a"), 10)
    with pytest.raises(ConfigError, match=r"model\.init_from = /b: .*was trained with /a"):
        compare.check_same_run(started("/b"), 10)


def test_an_option_that_the_run_no_longer_gives_is_refused(tmp_path):
    """Without the table of its rotary frequencies it would be another model."""
    scaling = {"factor": 8.0, "original_max_position_embeddings": 32}
    run = {"name": "r", "output_dir": str(tmp_path)}
    fake(make_config(run=run, checkpoint={}, model={"rope_scaling": scaling}), 10)
    with pytest.raises(
        ConfigError, match=r"model\.rope_scaling\.factor = absent: .*was trained with 8\.0"
    ):
        compare.check_same_run(configured(tmp_path), 10)


def test_every_option_of_the_model_is_compared():
    """A run goes on with the same weights and order of data; an evaluation takes any data, and what gives the outputs
    of given weights must be the same."""
    names = [*config.SCHEMA.options]

    def of(*sections: str) -> set[str]:
        return {name for name in names if name.startswith(sections)}

    outputs = of("model.", "lora.") - {"model.init_from", "model.freeze", "lora.init_from"}
    assert {name for name in names if compare.SAME_OUTPUTS.fullmatch(name)} == outputs
    assert {name for name in names if compare.GUARDED.fullmatch(name)} == outputs | of("data.") - {
        "data.path"
    } | {
        "model.init_from",
        "model.freeze",
        "run.seed",
        "train.seq_len",
        "train.global_batch_size",
        "optim.name",
        "optim.state_dtype",
    }


def test_every_option_of_the_data_and_the_training_is_compared():
    """Of the data those that prepare other text; of the training those that make another run of one that resumes."""
    names = [*config.SCHEMA.options]

    def of(*sections: str) -> set[str]:
        return {name for name in names if name.startswith(sections)}

    text = of("data.") - {"data.path", "data.document_mask", "data.order"}
    prepared = {name for name in names if compare.PREPARED.fullmatch(name)}
    assert prepared == text | {"model.vocab_size"}
    dtypes = {"parallel.param_dtype", "parallel.reduce_dtype", "parallel.output_dtype"}
    training = of("model.", "data.", "optim.", "lora.", "train.") | dtypes
    training |= {"parallel.keep_fp32", "parallel.float8", "run.seed"}
    training -= {"model.init_from", "lora.init_from", "data.path", "data.tokenizer"}
    training -= {"train.micro_batch_size"}
    assert {name for name in names if compare.OF_TRAINING.fullmatch(name)} == training


def test_an_option_that_changes_the_weights_shapes_is_not_one_to_allow():
    """Those of the models themselves: whatever is allowed, the checkpoint would not load."""

    def shapes(**model: object) -> dict[str, torch.Size]:
        parameters = meta_model(make_config(model=model).model).named_parameters()
        return {name: parameter.shape for name, parameter in parameters}

    others = {
        "dim": 96,
        "n_layers": 3,
        "n_heads": 2,
        "n_kv_heads": 4,
        "ffn_dim": 96,
        "vocab_size": 336,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": {"factor": 2.0},
        "freeze": ["embedding*"],
    }
    for key, (annotation, field) in config.SCHEMA.section("model").items():
        if isinstance(field.default, bool):
            others[key] = not field.default
        elif typing.get_origin(annotation) is typing.Literal:
            others[key] = typing.get_args(annotation)[-1]
    assert others.keys() >= {"tie_embeddings", "qk_norm"}
    ours = shapes()
    for key, value in others.items():
        is_shape = compare.SHAPES.fullmatch(f"model.{key}") is not None
        assert is_shape == (shapes(**{key: value}) != ours), key


def test_an_option_that_changes_the_optimizers_state_is_refused_by_name(tmp_path):
    """Before weights are read: those of a folder without the options (an earlier version's) had the defaults."""
    cfg = configured(tmp_path)
    fake(cfg, 10)
    compare.check_same_run(cfg, 10)
    for key, value in {"name": "muon", "state_dtype": "bfloat16"}.items():
        other = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **{key: value}))
        with pytest.raises(
            ConfigError,
            match=rf"optim\.{key} = {value}: .* was trained with .*(adamw|float32).*; "
            "continue with that, or start another run",
        ):
            compare.check_same_run(other, 10)
        compare.check_same_run(other, 10, compare.SAME_OUTPUTS)


def test_an_option_that_is_newer_than_the_checkpoint_had_its_default(tmp_path):
    sources = {"data": {"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl", "weight": 2.0}]}}

    def cfg(**sections):
        return make_config(
            run={"name": "r", "output_dir": str(tmp_path)}, checkpoint={}, **{**sources, **sections}
        )

    folder = fake(cfg(), 10)
    state = json.loads((folder / "state.json").read_text())
    del state["config"]["model"]["tie_embeddings"], state["config"]["data"]["document_mask"]
    del state["config"]["data"]["sources"][0]["weight"]
    (folder / "state.json").write_text(json.dumps(state))
    compare.check_same_run(cfg(), 10)
    compare.check_same_run(cfg(), 10, compare.SAME_OUTPUTS)
    with pytest.raises(
        ConfigError, match=r"model\.tie_embeddings = true: .*trained with false, the default; "
    ):
        compare.check_same_run(cfg(model={"tie_embeddings": True}), 10)
    state["config"]["model"]["k_norm"] = True
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        ConfigError, match=r"model\.k_norm = absent: .*trained with true; this version has no such"
    ):
        compare.check_same_run(cfg(), 10)


def test_an_imported_checkpoint_is_evaluated_as_its_own_model_only(tmp_path):
    cfg = configured(tmp_path)
    compare.check_same_run(cfg, 0, compare.SAME_OUTPUTS)  # there is none
    fake(cfg, 0)
    compare.check_same_run(cfg, 0, compare.SAME_OUTPUTS)
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, rope_theta=3.0))
    with pytest.raises(
        ConfigError, match=r"model\.rope_theta = 3\.0: .*step-00000000 was trained with"
    ):
        compare.check_same_run(other, 0, compare.SAME_OUTPUTS)


def test_an_evaluation_with_another_tokenizer_is_refused(tmp_path):
    """Whatever data.tokenizer calls it: the files themselves are compared."""
    same, other = tmp_path / "a/tokenizer.model", tmp_path / "b/tokenizer.model"
    for path in (same, other):
        path.parent.mkdir()
        path.write_text(path.parent.name)
    cfg, folder = configured(tmp_path), fake(configured(tmp_path), 10)
    compare.check_same_tokenizer(cfg, 10, [other])  # an old checkpoint has none
    shutil.copy(same, folder)
    compare.check_same_tokenizer(cfg, 10, [same])
    settings = [
        path.with_name("tokenizer_config.json")
        for path in (same, other, folder / "tokenizer.model")
    ]
    for path in settings:
        path.write_text("{}")  # equal settings do not make two tokenizers one
    with pytest.raises(
        ConfigError,
        match=rf"{other}.*: is not the tokenizer that .*; data.tokenizer = \"{folder}\"",
    ):
        compare.check_same_tokenizer(cfg, 10, [other, settings[1]])
    compare.check_same_tokenizer(
        configured(tmp_path, allow_changed=["data.tokenizer"]), 10, [other]
    )


def test_tokens_of_another_tokenizer_are_told(write_config, corpus, tmp_path):
    """To who evaluates on them, as an error; to who allows to go on with them, as a warning."""
    path = write_config("words", checkpoint={})
    other = tmp_path / "other.jsonl"
    told = "is not the tokenizer that"
    lines = corpus.read_text().splitlines(keepends=True)
    other.write_text("".join(lines[: len(lines) * 3 // 4]))
    words = (f"--data.source={other}", f"--data.path={tmp_path / 'other'}")
    assert launch("-m", "data.prepare", path, *words).returncode == 0
    assert launch(path, nproc=2).returncode == 0
    done = launch(path, *words, "--eval-only", nproc=2)
    assert done.returncode == 2 and told in done.stderr, done.stdout + done.stderr
    for steps, data, times in ((5, (), 0), (6, words, 1)):
        done = launch(
            path,
            f"--train.steps={steps}",
            *data,
            '--checkpoint.allow_changed=["data.source"]',
            nproc=2,
        )
        assert done.returncode == 0 and done.stdout.count(told) == times, done.stdout + done.stderr


def test_a_precision_that_is_found_is_that_of_the_checkpoint(tmp_path):
    """The newest whose state can be read, or the one that `resume` names; an import was not trained here."""

    def of_dtype(dtype: str, **keys: object) -> config.Config:
        cfg = configured(tmp_path, **keys)
        return dataclasses.replace(
            cfg, parallel=dataclasses.replace(cfg.parallel, param_dtype=dtype)
        )

    assert catalog.saved_param_dtype(configured(tmp_path)) is None
    fake(of_dtype("float32"), 0)
    assert catalog.saved_param_dtype(configured(tmp_path)) is None
    fake(of_dtype("bfloat16"), 10)
    newest = fake(of_dtype("float32"), 20)
    assert catalog.saved_param_dtype(configured(tmp_path)) == "float32"
    assert catalog.saved_param_dtype(configured(tmp_path, resume=10)) == "bfloat16"
    assert catalog.saved_param_dtype(configured(tmp_path, resume=30)) is None
    (newest / "state.json").write_text("{")
    assert catalog.saved_param_dtype(configured(tmp_path)) == "bfloat16"


def test_a_checkpoint_of_an_earlier_version_has_counted_nothing_but_its_steps(
    tmp_path, monkeypatch
):
    cfg = configured(tmp_path)
    monkeypatch.setattr("checkpoint.checkpointer.restore", lambda *_: None)
    monkeypatch.setattr("checkpoint.checkpointer.on_rank_zero", lambda work: work())
    for step, saved, tokens in ((10, {}, 10 * 8 * 32), (20, {"tokens": 77}, 77)):
        fake(cfg, step, **saved)
        checkpointer = SimpleNamespace(start=step, found=[10, step], cfg=cfg)
        state = Checkpointer.restore(checkpointer, None, None)
        assert state == State(step=step, tokens=tokens)
    checkpointer = SimpleNamespace(start=0, found=[], cfg=cfg)
    assert Checkpointer.restore(checkpointer, None, None) == State()


def test_a_save_is_due_every_so_many_steps_at_the_last_and_when_the_run_stops(tmp_path):
    def due(saver: object, **sections: dict | None) -> list[int]:
        cfg = make_config(train={"steps": 7}, **sections)
        checkpointer = SimpleNamespace(saver=saver, cfg=cfg)
        return [step for step in range(1, 8) if Checkpointer.is_due(checkpointer, step, False)]

    assert due(object(), checkpoint={}) == [7]
    assert due(object(), checkpoint={"save_every_steps": 3}) == [3, 6, 7]
    assert due(None, checkpoint={"save_every_steps": 3}) == []  # it is only evaluated
    stopped = SimpleNamespace(saver=object(), cfg=make_config(checkpoint={}))
    assert Checkpointer.is_due(stopped, 2, True)


def test_another_optimizer_is_refused_in_one_line(saved_by_two):
    folder, _ = saved_by_two
    model = Llama(make_config().model)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    other.state = {p: {"momentum_buffer": torch.zeros_like(p)} for p in model.parameters()}
    with pytest.raises(
        ConfigError,
        match=r"exp_avg_sq \(torch.float32\), step .* of another optimizer, this run's has "
        r"momentum_buffer \(torch.float32\)$",
    ):
        restore(folder, model, other)


def test_steps_and_intervals_may_change(tmp_path):
    fake(configured(tmp_path), 10)
    raw = config.to_dict(configured(tmp_path, save_every_steps=5))
    raw["train"]["steps"] = 99
    raw["train"]["micro_batch_size"] = 1
    raw["log"]["every_steps"] = 7
    raw["optim"]["lr"] = 1.0
    raw["parallel"]["recompute"] = "full"
    raw["data"]["path"] = "elsewhere"
    compare.check_same_run(config.from_dict(raw, "changed.toml"), 10)


def test_any_number_of_ranks_reads_any(on_ranks, tmp_path):
    """Weights and optimizer state, element by element: saved on 1, 2 and 4 processes, read on each of them and 3."""
    wrote = {
        ranks: on_ranks(ranks, cases.save_trained, str(tmp_path / str(ranks)))[0]
        for ranks in (1, 2, 4)
    }
    for ranks in (1, 2, 3, 4):
        read = on_ranks(ranks, cases.load_trained, [str(tmp_path / str(saved)) for saved in wrote])[
            0
        ]
        assert read == list(wrote.values())
    assert all(
        len({digest for name, digest in w.items() if "norm" not in name}) > 20
        for w in wrote.values()
    )


def test_a_plain_model_reads_it_and_differences_are_named(saved_by_two):
    folder, wrote = saved_by_two
    cfg = make_config()
    model = Llama(cfg.model)
    optimizer = build_optimizer(model, cfg.optim)
    restore(folder, model, optimizer)
    assert cases.digests(tensors_of(model, optimizer)) == wrote
    deeper = Llama(make_config(model={"n_layers": 3}).model)
    with pytest.raises(ConfigError, match=r"has no model\.blocks\.2"):
        restore(folder, deeper, None)
    flatter = Llama(make_config(model={"n_layers": 1}).model)
    with pytest.raises(ConfigError, match=r"has model\.blocks\.1.*which this model does not"):
        restore(folder, flatter, build_optimizer(flatter, cfg.optim))
    frozen = Llama(cfg.model)
    frozen.embedding.weight.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"has optim\.embedding\.weight\.exp_avg, which this model does not"
    ):
        restore(folder, frozen, build_optimizer(frozen, cfg.optim))
    wider = Llama(make_config(model={"ffn_dim": 96}).model)
    with pytest.raises(
        ConfigError, match=r"gate_proj.weight is torch.float32 .*80, 48.*this model's is .*96, 48"
    ):
        restore(folder, wider, None)
    with pytest.raises(
        ConfigError, match="embedding.weight is torch.float32 .*, this model.s is torch.bfloat16"
    ):
        restore(folder, Llama(cfg.model).to(torch.bfloat16), None)


def test_a_run_keeps_what_it_should_and_says_no(write_config, tmp_path):
    path = write_config(
        "kept",
        train={"steps": 7},
        optim={"schedule_steps": 20},
        checkpoint={"save_every_steps": 2, "keep_last": 2},
        eval={"every_steps": 4},
    )
    assert launch(path).returncode == 0
    folder = tmp_path / "outputs/kept"
    assert [step for step, _ in catalog.step_folders(folder / "checkpoints")] == [6, 7]
    assert [row["step"] for row in rows(folder, "eval")] == [4, 7]
    # back to step 6: rows after it go, step 7 is set aside
    assert launch(path, "--checkpoint.resume=6", "--train.steps=8").returncode == 0
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in rows(folder, "eval")] == [4, 8]
    assert (folder / "checkpoints/step-00000007.superseded").is_dir()

    before = content(folder)
    for arguments, message in [
        (["--checkpoint.resume=5"], "resume = 5"),
        (["--checkpoint.resume=never"], "never"),
        (["--train.seq_len=16"], "train.seq_len = 16"),
        ([f"--run.output_dir={path}"], "is a file"),
        (["--checkpoint=off"], "[checkpoint] is off"),
        (["--run.device=cuda", "--checkpoint.resume=3"], "resume = 3"),  # and of the device
        (
            [
                "--train.steps=9",
                "--model.ffn_dim=96",
                '--checkpoint.allow_changed=["model.ffn_dim"]',
            ],
            "this model's is torch.float32 [96",
        ),
        (["--eval-only", "--model.norm_eps=0.5"], "model.norm_eps = 0.5"),
        (["--eval-only", "--checkpoint.resume=7"], "resume = 7"),
        (
            ["--checkpoint.resume=6", "--optim.state_dtype=bfloat16"],
            "optim.state_dtype = " if config.has_extra("optimizers") else "needs extras/optimizers",
        ),
        (["--train.steps=9", '--model.freeze=["embedding.*"]'], "start another run"),
    ]:
        done = launch(path, *arguments, nproc=1 + ("--eval-only" in arguments))
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )
    done = launch(path, "--eval-only", "--checkpoint.resume=6")
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 6, done.stderr
    assert content(folder) == before
    # what was read before was read, whatever a step's tokens are now
    assert (
        launch(
            path,
            "--train.steps=9",
            "--train.seq_len=16",
            '--checkpoint.allow_changed=["train.seq_len"]',
        ).returncode
        == 0
    )
    assert [row["tokens"] for row in rows(folder)][-2:] == [8 * 8 * 32, 8 * 8 * 32 + 8 * 16]


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_finished_again(write_config, tmp_path):
    path = write_config("flipped", checkpoint={"save_every_steps": 2})
    assert launch(path).returncode == 0
    folder = tmp_path / "outputs/flipped"
    shard = folder / "checkpoints/step-00000004/__0_0.distcp"
    before = shard.read_bytes()
    shard.write_bytes(before[:5000] + bytes([before[5000] ^ 1]) + before[5001:])
    done = launch(path, "--eval-only")
    assert done.returncode == 0 and json.loads(done.stdout)["step"] == 2
    assert re.search(
        r"corrupt, skipped: .*__0_0\.distcp: bytes 0 to \d+: expected SHA-256", done.stderr
    )
    done = launch(path, nproc=2)
    assert done.returncode == 0 and "resuming after step 2" in done.stdout, (
        done.stdout + done.stderr
    )
    assert re.search(
        r"corrupt, set aside: .*__0_0\.distcp: bytes 0 to \d+: expected SHA-256", done.stdout
    )
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000004.corrupt",
    ]
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]


def test_two_runs_in_one_folder(write_config, tmp_path):
    path = write_config("locked")
    folder = tmp_path / "outputs/locked"
    folder.mkdir(parents=True)
    held = lock(folder)
    done = launch(path)
    held.release()
    assert done.returncode == 2 and "another run works here" in done.stderr
    assert [p.name for p in folder.iterdir()] == [".lock"]
    assert launch(path).returncode == 0


def test_what_was_left_undone_is_done(write_config, tmp_path):
    """Killed after the last save: evaluation, purge and status are made up for, without a step."""
    path = write_config("undone", checkpoint={"keep_last": 1}, eval={})
    assert launch(path).returncode == 0
    folder = tmp_path / "outputs/undone"
    kept = [
        line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line
    ]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    (folder / "checkpoints/.step-00000009.tmp").mkdir()
    for _ in range(2):  # and the second time not again
        status = json.loads((folder / "status.json").read_text())
        (folder / "status.json").write_text(json.dumps({**status, "state": "running"}))
        assert launch(path).returncode == 0
        assert [r["step"] for r in rows(folder)] == [1, 2, 3, 4] and [
            r["step"] for r in rows(folder, "eval")
        ] == [4]
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000004"]


def test_an_offloaded_run_saves_and_goes_on(write_config, tmp_path):
    path = write_config(
        "offloaded",
        train={"steps": 6},
        optim={"schedule_steps": 6},
        checkpoint={},
        parallel={"cpu_offload": True, "dp_replicate": 2},
    )
    assert launch(path, "--train.steps=3", nproc=2).returncode == 0
    done = launch(path, "--parallel.cpu_offload=false", "--parallel.dp_replicate=1")
    assert done.returncode == 0 and "resuming after step 3" in done.stdout, (
        done.stdout + done.stderr
    )
    assert [row["step"] for row in rows(tmp_path / "outputs/offloaded")] == [1, 2, 3, 4, 5, 6]
