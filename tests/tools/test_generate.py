"""Generation against recomputing every token, against definitions; the tool."""

import copy
import json
import math
import pathlib
import random
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import config
import tools.generate as tool
from checkpoint import catalog, load, newest
from model.build import build_model
from model.llama import Llama
from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.materialize import materialize
from system import printable
from tests import forks
from tests.conftest import build, make_config, refuses, run_tool, seal, token_ids, train_run
from tests.distributed import distributed
from tests.model.test_llama import SCALING
from tools.generate import choose, encode, generate, print_stream
from tools.prepare.tokenizer import Tokenizer

CPU = torch.device("cpu")


def varied(**changes: Any) -> Llama:
    """With weights so large that the text does not run in a circle."""
    torch.manual_seed(1)
    model = build_model(make_config(model=changes).model).eval()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, float(p.ndim == 1), 0.3 if "blocks" in name else 0.1)
    return model


@torch.no_grad()
def recomputed(
    model: Llama, prompt: list[int], count: int, context: int, temperature: float, seed: int
) -> list[int]:
    """The same text without a cache: every token from a pass over the whole window."""
    tokens = list(prompt)
    begin = max(0, len(prompt) - context)
    draw = random.Random(seed)
    for _ in range(count):
        if len(tokens) - begin > context:
            begin = len(tokens) - (context + 1) // 2
        logits = model(torch.tensor([tokens[begin:]]))[0, -1]
        tokens.append(choose(logits, temperature, draw.random()))
    return tokens[len(prompt) :]


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 1, "rope_scaling": SCALING}], ids=str)
def test_cached_text_equals_text_recomputed(changes, temperature):
    """Without a cache; one prompt is longer than the context, and some become so."""
    ours = varied(**changes)
    cached = copy.deepcopy(ours)
    draw = random.Random(5)
    for length in (3, 1, 8, 20, 6):
        prompt = [draw.randrange(320) for _ in range(length)]
        for context in (8, 7, 1000):
            text = list(generate(cached, prompt, 20, context, CPU, temperature, seed=7))
            assert text == recomputed(ours, prompt, 20, context, temperature, 7)
            assert len(set(text)) > 10


def window(queries: int, keys: int) -> Tensor:
    """Each token attends to itself and the two before it, whatever the number of keys."""
    return torch.ones(queries, keys, dtype=torch.bool).tril().triu(-2)


def running_mean(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def own_mask(model: Any) -> None:
    def set_mask(model: Any, args: tuple) -> None:
        model.build_mask = lambda documents: window(args[0].shape[1], args[0].shape[1])

    model.register_forward_pre_hook(set_mask)


def mixing_head(model: Any) -> None:
    model.head.register_forward_pre_hook(lambda head, args: (running_mean(args[0]),))


@pytest.mark.quick
@pytest.mark.parametrize("change", [own_mask, mixing_head])
def test_what_a_cache_would_get_wrong_is_recomputed(change):
    ours = varied()
    plain = [*generate(ours, [1, 2, 3, 4], 12, 8, CPU)]
    change(ours)
    expected = recomputed(ours, [1, 2, 3, 4], 12, 8, 0.0, 0)
    assert [*generate(ours, [1, 2, 3, 4], 12, 8, CPU)] == expected != plain


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_text_is_recomputed_for_one_comparison_only(dtype):
    """A plain model's cache is near a pass over the whole text, in each dtype, at any length."""
    model = varied(n_layers=8).to(dtype)
    lengths: list[int] = []
    model.embedding.register_forward_pre_hook(lambda m, args: lengths.append(args[0].shape[1]))
    for size in (1, 30, 300):
        lengths.clear()
        prompt = token_ids(1, size)[0].tolist()
        assert len([*generate(model, prompt, 6, 1000, CPU)]) == 6
        assert lengths == [size, 1, size + 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "sections", [{"keep_fp32": ["head", "blocks.1"]}, {"output_dtype": "float32"}]
)
@distributed(ranks=2)
def test_logits_are_those_of_evaluation(world, write_config, monkeypatch, sections):
    monkeypatch.setattr(tool, "has_native_bfloat16", lambda device: True)
    parallel = {"param_dtype": "bfloat16", **sections}
    path = write_config("r", parallel=parallel, train={"steps": 1}, checkpoint={})
    cfg = config.load(str(path))
    train_run(cfg, world)
    folder = catalog.path_of(catalog.root_of(cfg), 1)
    sharded = build(cfg, world)
    load.restore(folder, sharded, None)
    plain = tool.load_model(folder, cfg, CPU)
    plain.head._forward_pre_hooks.clear()  # of the newest token alone
    tokens = token_ids(2, 16)
    with torch.no_grad():
        assert torch.equal(plain(tokens), sharded.eval()(tokens))


@distributed(ranks=1)
def test_a_checkpoint_s_model_has_its_buffers(world, write_config):
    """They are not saved: what the module declares is drawn again, whatever is recomputed."""
    cfg = config.load(str(write_config("r", checkpoint={}, train={"steps": 1})))
    with forks.with_parameters():
        train_run(cfg, world)
        model = tool.load_model(catalog.path_of(catalog.root_of(cfg), 1), cfg, CPU)
        again = Llama(cfg.model)
        apply_activation_checkpointing(again, "full", compiled=False)
        materialize(again, cfg.run.seed, CPU)
    buffers = dict(model.named_buffers())
    assert {name.rpartition(".")[2] for name in buffers} == {"factor"}
    for ours, expected in zip(buffers.values(), again.buffers(), strict=True):
        assert ours.isfinite() and torch.equal(ours, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_probabilities(temperature):
    """Evenly spaced draws give every token its share, to one draw at either end."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    exponents = [math.exp(x / temperature) for x in logits.tolist()]
    n = 4000
    drawn = [choose(logits, temperature, (i + 0.5) / n) for i in range(n)]
    for token, exponent in enumerate(exponents):
        assert abs(drawn.count(token) / n - exponent / sum(exponents)) <= 2 / n


def test_the_limits_of_choosing():
    last = 1 - 2**-53  # the largest draw
    for draw in (0.0, last):
        for temperature in (0.0, 1e-300):
            assert choose(torch.tensor([0.5, 2.0, -1.0]), temperature, draw) == 1
    assert choose(torch.tensor([0.5, 2.0, -1.0]), 1.0, last) == 2
    # what is impossible never
    assert choose(torch.tensor([0.0, -math.inf]), 1.0, last) == 0
    assert choose(torch.tensor([-math.inf, 0.0]), 1.0, 0.0) == 1
    with refuses("the model's output is not finite"):
        choose(torch.tensor([0.0, math.nan]), 1.0, 0.5)


# The tool


@pytest.fixture
def tokenizer(prepared) -> Tokenizer:
    return Tokenizer(prepared)


def test_text_appears_in_whole_characters(tokenizer, capsys):
    ids = tokenizer.encode(["a\N{SNOWMAN}b\N{GRINNING FACE}"])[0]
    assert len(ids) > 8
    print_stream(tokenizer, encode(tokenizer, "x "), iter([*ids, *tokenizer.eos, *ids]))
    assert capsys.readouterr().out == "x a\N{SNOWMAN}b\N{GRINNING FACE}\n"


@pytest.fixture(scope="module")
def checkpoint(saved_by_two, prepared, tmp_path_factory) -> pathlib.Path:
    """A checkpoint with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("generate") / "run/checkpoints/step-00000003"
    shutil.copytree(saved_by_two[0], folder)
    shutil.copy(prepared / "tokenizer.model", folder)
    (folder / "manifest.json").unlink()
    seal(folder)
    return folder


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    return run_tool(tool.main, *arguments), *capsys.readouterr()


CAT = ("--prompt", "the cat")


@pytest.mark.quick
def test_tool_writes_from_a_checkpoint_and_from_its_run(checkpoint, capsys):
    options = ("--tokens", 12, "--temperature", 0)
    code, one, errors = run(capsys, checkpoint, *CAT, *options)
    assert code == 0 and one.startswith("the cat") and len(one) > 9 and errors == ""
    assert run(capsys, checkpoint.parent.parent, *CAT, *options) == (0, one, "")
    code, long, errors = run(capsys, checkpoint, "--prompt", "the cat " * 32, *options)
    assert code == 0 and long.startswith("the cat " * 32)
    assert "the model reads the newest 32 (" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("changes", [{}, {"tokens": 9}, {"temperature": 1.7}, {"seed": 3}], ids=str)
def test_tool_samples_as_each_option_says(checkpoint, tokenizer, capsys, changes):
    """Alone among the defaults, each gives the text that recomputing every token gives."""
    model = Llama(newest.read_config(checkpoint).model)
    load.restore(checkpoint, model, None)
    options: dict[str, Any] = {"tokens": 128, "temperature": 0.8, "seed": 0, **changes}
    ids = encode(tokenizer, "the cat")
    new = recomputed(model, ids, options["tokens"], 32, options["temperature"], options["seed"])
    end = next((i for i, token in enumerate(new) if token in tokenizer.eos), None)
    expected = f"{printable(tokenizer.decode(ids + new[:end]))}\n"
    words = [word for name, value in changes.items() for word in (f"--{name}", value)]
    assert run(capsys, checkpoint, *CAT, *words)[:2] == (0, expected)


def test_tool_ends_a_text_at_any_eos_token_of_an_imported_folder(
    checkpoint, tokenizer, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(checkpoint, tmp_path / "imported")
    more = tokenizer.encode(["on the mat"])[0]
    monkeypatch.setattr(tool, "generate", lambda *unused: iter(more))
    for ids, length in ((None, len(more)), (more[2], 2), ([9999, more[1]], 1)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        text = tokenizer.decode([*encode(tokenizer, "the cat"), *more[:length]])
        assert run(capsys, folder, *CAT, "--tokens", 8) == (0, f"{text}\n", "")


def test_tool_commands_no_terminal(checkpoint, capsys):
    code, text, _ = run(capsys, checkpoint, "--prompt", "a\x1b[31m\x07\tred", "--tokens", 1)
    assert code == 0 and text.startswith("a\\x1b[31m\\x07\tred") and "\x1b" not in text


@pytest.mark.parametrize("option", ["--tokens 0", "--temperature nan", "--colour"])
def test_invalid_call_is_one_line(checkpoint, capsys, option):
    code, text, errors = run(capsys, checkpoint, *CAT, *option.split())
    assert code == 2 and text == "" and option in errors and errors.count("\n") == 1
