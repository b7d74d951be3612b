"""Generation against transformers, against recomputing every token, against definitions; a run's sample; the tool."""

import copy
import dataclasses
import json
import math
import pathlib
import random
import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import config
import tools.generate as tool
from checkpoint import catalog, load, newest
from config import ConfigError
from model.attention import attention
from model.build import build_model
from model.llama import Llama
from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.materialize import materialize
from system import printable
from tests import forks
from tests.conftest import build, make_config, run_tool, seal, token_ids, train_run
from tests.distributed import distributed
from tests.model.test_llama import SCALING, reference, with_weights_of
from tools.generate import choose, encode, generate, print_stream
from tools.prepare.tokenizer import Tokenizer

CPU = torch.device("cpu")
MODELS = [
    {},
    {"tie_embeddings": True},
    {"n_kv_heads": 1, "head_dim": 20},
    {"rope_scaling": SCALING, "tie_embeddings": True, "head_dim": 32},
]


def varied(m: config.Model) -> tuple[Llama, torch.nn.Module]:
    """Our model and transformers', of the same weights, large enough that the text does not run in a circle."""
    torch.manual_seed(1)
    theirs = reference(m).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.mul_(1 if parameter.ndim == 1 else 15 if "layers" in name else 5)
    return with_weights_of(theirs, m), theirs


def prompts_of(lengths: list[int]) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(320) for _ in range(length)] for length in lengths]


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
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_greedy_equals_transformers(changes):
    ours, theirs = varied(make_config(model=changes).model)
    theirs.generation_config.eos_token_id = None
    for prompt in prompts_of([9, 1, 30]):
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
        )
        expected = out[0, len(prompt) :].tolist()
        assert len(expected) == 32 and len(set(expected)) > 10
        assert list(generate(ours, prompt, 32, 64, CPU)) == expected


def test_blocks_with_terms_of_the_loss_generate():
    with forks.routed():
        ours = build_model(make_config().model).eval()
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        expected = recomputed(ours, [1, 2, 3], 8, 64, 0.0, 0)
        assert [*generate(ours, [1, 2, 3], 8, 64, CPU)] == expected


def own_attend(model: Llama) -> None:
    """Each token attends to itself and the two before it, whatever the number of keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        window = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().triu(-2)
        return attention(q, k, v, window)

    for block in model.blocks:
        block.attention.attend = attend


def own_mask(model: Llama) -> None:
    forward = model.forward

    def forward_of_window(tokens: Tensor, **options) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril().triu(-2)
        model.build_mask = lambda documents: mask
        return forward(tokens, **options)

    model.forward = forward_of_window


def no_attend(model: Llama) -> None:
    """A forward that calls no attend(): a running mean over the tokens."""
    for block in model.blocks:
        module = block.attention
        module.forward = lambda x, *unused, module=module: module.o_proj(
            module.q_proj(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        )


def shifted_tokens(model: Llama) -> None:
    """The feed-forward sees the token before, too."""
    for block in model.blocks:
        forward = block.feed_forward.forward
        block.feed_forward.forward = lambda x, forward=forward: forward(
            x + torch.nn.functional.pad(x, (0, 0, 1, -1))
        )


def counted_positions(model: Llama) -> None:
    """Positions are learned, and counted in forward."""
    table = torch.randn(64, 48)
    model.embedding.register_forward_hook(lambda module, args, x: x + table[: x.shape[1]])


def running_mean(model: Llama) -> None:
    """The head sees the mean of all tokens so far."""
    model.head.register_forward_pre_hook(
        lambda head, args: (args[0].cumsum(1) / torch.arange(1, args[0].shape[1] + 1)[:, None],)
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "change",
    [own_attend, own_mask, no_attend, shifted_tokens, counted_positions, running_mean],
)
def test_what_a_cache_would_get_wrong_is_recomputed(change):
    ours, _ = varied(make_config().model)
    plain = [*generate(ours, [1, 2, 3, 4], 12, 8, CPU)]
    change(ours)
    expected = recomputed(ours, [1, 2, 3, 4], 12, 8, 0.0, 0)
    assert [*generate(ours, [1, 2, 3, 4], 12, 8, CPU)] == expected != plain


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_text_is_recomputed_for_one_comparison_only(dtype):
    """A plain model's cache is near a pass over the whole text, in each dtype, at any length."""
    model, _ = varied(make_config(model={"n_layers": 8}).model)
    model.to(dtype)
    lengths: list[int] = []
    model.embedding.register_forward_pre_hook(lambda m, args: lengths.append(args[0].shape[1]))
    for prompt in prompts_of([1, 30, 300]):
        lengths.clear()
        tokens = [*generate(model, prompt, 6, 1000, CPU)]
        assert len(tokens) == 6 and lengths == [len(prompt), 1, len(prompt) + 1, 1, 1, 1, 1]


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_cached_text_equals_text_recomputed(temperature):
    """Without a cache; one prompt is longer than the context, and some become so."""
    ours, _ = varied(make_config().model)
    cached = copy.deepcopy(ours)
    for prompt in prompts_of([3, 1, 8, 20, 6]):
        for context in (8, 7, 1000):
            text = list(generate(cached, prompt, 20, context, CPU, temperature, seed=7))
            assert text == recomputed(ours, prompt, 20, context, temperature, 7)


@pytest.mark.parametrize(
    "sections", [{"keep_fp32": ["head", "blocks.1"]}, {"output_dtype": "float32"}]
)
@distributed(ranks=2)
def test_logits_are_those_of_evaluation(world, write_config, sections):
    cfg = config.load(
        str(
            write_config(
                run={"name": "r"},
                parallel={"param_dtype": "bfloat16", **sections},
                train={"steps": 1},
                checkpoint={},
            )
        )
    )
    train_run(cfg, world)
    folder = catalog.path_of(catalog.root_of(cfg), 1)
    tokens = token_ids(2, 16)
    sharded = build(cfg, world)
    load.restore(folder, sharded, None)
    plain = tool.load_model(folder, cfg, CPU)
    plain.head._forward_pre_hooks.clear()  # of the newest token alone
    with torch.no_grad():
        assert torch.equal(plain(tokens), sharded.eval()(tokens))


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
    logits = torch.tensor([0.5, 2.0, -1.0])
    for draw in (0.0, 1 - 2**-53):
        assert choose(logits, 0.0, draw) == choose(logits, 1e-300, draw) == 1
    assert choose(logits, 1.0, 1 - 2**-53) == 2
    # what is impossible never
    assert choose(torch.tensor([0.0, -math.inf]), 1.0, 1 - 2**-53) == 0
    assert choose(torch.tensor([-math.inf, 0.0]), 1.0, 0.0) == 1


class Bytes:
    """A tokenizer whose tokens are bytes; 0 is BOS and 1 is EOS."""

    bos, eos = [0], [1]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 1 < i < 256).decode(errors="replace")


def test_text_appears_in_whole_characters(capsys):
    text = "a\N{SNOWMAN}b\N{GRINNING FACE}"
    print_stream(Bytes(), tool.encode(Bytes(), "x "), iter(text.encode() + b"\x01not this"))
    assert capsys.readouterr().out == f"x {text}\n"


def test_what_is_there_is_shown_when_interrupted(capsys):
    def steps() -> Iterator[int]:
        yield ord("4")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        print_stream(Bytes(), [*b"a"], steps())
    assert capsys.readouterr().out == "a4\n"


# A run's sample

SAMPLED = [
    {"parallel": {"recompute": "full", "compile": True}},
    {"parallel": {"prefetch_forward": 0}, "model": {"tie_embeddings": True}},
    {"parallel": {"reshard_after_forward": False, "cpu_offload": True}},
]


# The tool


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


@pytest.mark.quick
def test_tool_writes_from_a_checkpoint_and_from_its_run(checkpoint, capsys):
    for temperature in (0, 0.8):
        options = ("--tokens", 12, "--temperature", temperature)
        code, one, errors = run(capsys, checkpoint, "--prompt", "the cat", *options)
        assert code == 0 and one.startswith("the cat") and len(one) > 9 and errors == ""
        run_folder = checkpoint.parent.parent
        assert run(capsys, run_folder, "--prompt", "the cat", *options) == (0, one, "")
    code, long, errors = run(capsys, checkpoint, "--prompt", "the cat " * 32, *options)
    assert code == 0 and long.startswith("the cat " * 32)
    assert "the model reads the newest 32 (" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("changes", [{}, {"tokens": 9}, {"temperature": 1.7}, {"seed": 3}], ids=str)
def test_tool_samples_as_each_option_says(checkpoint, capsys, changes):
    """Alone among the defaults, each gives the text that recomputing every token gives."""
    tokenizer, model = Tokenizer(checkpoint), Llama(newest.read_config(checkpoint).model)
    load.restore(checkpoint, model, None)
    options = {"tokens": 128, "temperature": 0.8, "seed": 0, **changes}
    ids = encode(tokenizer, "the cat")
    new = recomputed(model, ids, options["tokens"], 32, options["temperature"], options["seed"])
    end = next((i for i, token in enumerate(new) if token in tokenizer.eos), None)
    expected = f"{printable(tokenizer.decode(ids + new[:end]))}\n"
    words = [word for name, value in changes.items() for word in (f"--{name}", value)]
    assert run(capsys, checkpoint, "--prompt", "the cat", *words)[:2] == (0, expected)


def test_tool_ends_a_text_at_any_eos_token_of_an_imported_folder(
    checkpoint, tmp_path, monkeypatch, capsys
):
    folder, tokenizer = shutil.copytree(checkpoint, tmp_path / "imported"), Tokenizer(checkpoint)
    more = tokenizer.encode(["on the mat"])[0]
    monkeypatch.setattr(tool, "generate", lambda *unused: iter(more))
    for ids, length in ((None, len(more)), (more[2], 2), ([9999, more[1]], 1)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        text = tokenizer.decode([*encode(tokenizer, "the cat"), *more[:length]])
        assert run(capsys, folder, "--prompt", "the cat", "--tokens", 8) == (0, f"{text}\n", "")


def test_tool_refuses_an_id_that_the_model_has_no_row_for(checkpoint, capsys, monkeypatch):
    cfg, largest = newest.read_config(checkpoint), max(encode(Tokenizer(checkpoint), "the cat"))
    for rows, refused in ((largest, True), (largest + 1, False)):
        small = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=rows))
        monkeypatch.setattr("checkpoint.newest.read_config", lambda *_, found=small: found)
        # its rows are not those of the checkpoint
        code, text, errors = run(capsys, checkpoint, "--prompt", "the cat")
        assert code == 2 and text == ""
        assert (f"has id {largest}, and the model {rows}" in errors) is refused, errors


def test_tool_commands_no_terminal(checkpoint, capsys):
    code, text, _ = run(capsys, checkpoint, "--prompt", "a\x1b[31m\x07\tred", "--tokens", 1)
    assert code == 0 and text.startswith("a\\x1b[31m\\x07\tred") and "\x1b" not in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "a", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0: must be at least 0"),
        (["--prompt", "a", "--temperature", "nan"], "nan: must"),
        (["--prompt", "a", "--temperature", "inf"], "--temperature inf"),
        (["--prompt", "a", "--colour"], "--colour"),
        ([], "--prompt"),
    ],
    ids=str,
)
def test_invalid_arguments_are_one_line(checkpoint, capsys, arguments, words):
    code, text, errors = run(capsys, checkpoint, *arguments)
    assert code == 2 and text == "" and words in errors and errors.count("\n") == 1


def test_missing_checkpoint_or_tokenizer_is_one_line(saved_by_two, tmp_path, capsys):
    for folder, words in ((tmp_path, str(tmp_path)), (saved_by_two[0], "tokenizer")):
        code, text, errors = run(capsys, folder, "--prompt", "a")
        assert code == 2 and text == "" and words in errors and errors.count("\n") == 1


def test_what_no_model_can_take_is_one_line():
    with pytest.raises(ConfigError, match="the model's output is not finite"):
        choose(torch.tensor([0.0, math.nan]), 1.0, 0.5)
    silent = SimpleNamespace(bos=[], encode=lambda texts: [[] for _ in texts])
    with pytest.raises(ConfigError, match="--prompt: is empty, and the tokenizer has no BOS token"):
        tool.encode(silent, "")
    silent.bos = [1]
    assert tool.encode(silent, "") == [1]


@distributed(ranks=1)
def test_a_checkpoint_s_model_has_its_buffers(world, write_config):
    """They are not saved: what the module declares is drawn again, whatever is recomputed."""
    cfg = config.load(str(write_config(run={"name": "r"}, checkpoint={}, train={"steps": 1})))
    with forks.with_parameters():
        train_run(cfg, world)
        model = tool.load_model(catalog.path_of(catalog.root_of(cfg), 1), cfg, CPU)
        again = Llama(cfg.model)
        apply_activation_checkpointing(again, "full", compiled=False)
        materialize(again, cfg.run.seed, CPU)
    buffers = dict(model.named_buffers())
    assert {name.rpartition(".")[2] for name in buffers} == {"factor"}
    for ours, expected in zip(buffers.values(), again.buffers(), strict=True):
        assert ours.isfinite()
        assert torch.equal(ours, expected)
