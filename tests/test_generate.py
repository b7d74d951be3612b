"""Generation against transformers, against recomputing every token, against definitions; and what the tool prints."""

import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import config
import generate as tool
from checkpoint import catalog, load
from config import ConfigError
from data.tokenizer import Tokenizer
from files import printable
from generate import Cache, choose, continue_text, encode, generate, print_stream
from model.build import build_model
from model.llama import Llama
from tests import cases, forks
from tests.conftest import REPO, make_config, run_tool, seal
from tests.model.test_llama import SCALING, reference, with_weights_of

CPU = torch.device("cpu")
MODELS = [
    {},
    {"tie_embeddings": True},
    {"n_kv_heads": 1, "head_dim": 20},
    {"rope_scaling": SCALING, "tie_embeddings": True, "head_dim": 32},
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These models are too small for several, which wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def rows_of(steps: Iterator[list[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*steps)]


@torch.no_grad()
def recomputed(
    model: Llama,
    prompt: list[int],
    row: int,
    count: int,
    context: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[int]:
    """The same text without a cache: every token from a pass over the row's whole window."""
    tokens = list(prompt)
    begin = 0
    draw = random.Random(f"{seed} {row}")
    for _ in range(count):
        if len(tokens) - begin > context:
            begin = len(tokens) - (context + 1) // 2
        logits = model(torch.tensor([tokens[begin:]]))[:, -1]
        tokens += choose(logits, temperature, top_p, [draw.random()])
    return tokens[len(prompt) :]


@pytest.mark.quick
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_greedy_equals_transformers(changes):
    """The prompts alone, and together in one batch."""
    ours, theirs = varied(make_config(model=changes).model)
    theirs.generation_config.eos_token_id = None
    prompts, expected = prompts_of([9, 1, 30]), []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert all(len(row) == 32 and len(set(row)) > 10 for row in expected)
    assert [rows_of(generate(ours, [prompt], 32, 64, CPU))[0] for prompt in prompts] == expected
    assert rows_of(generate(ours, prompts, 32, 64, CPU)) == expected


@pytest.mark.quick
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_cached_logits_equal_those_of_the_whole_row(changes):
    m = make_config(model=changes).model
    ours, _ = varied(m)
    lengths, total = [7, 3, 12], 24
    rows = torch.tensor(prompts_of([total] * 3))
    cache = Cache(lengths, total, m.n_layers, CPU)
    with torch.no_grad():
        whole = ours(rows)
        tokens = rows[:, :12]  # the shorter ones are followed by what they must not see
        for step in range(12):
            logits = ours(tokens, cache=cache)
            last = torch.tensor(lengths) + step - 1
            assert logits.shape == (3, 1, m.vocab_size)
            assert torch.allclose(logits[:, 0], whole[torch.arange(3), last], atol=1e-5, rtol=1e-5)
            tokens = rows[torch.arange(3), last + 1][:, None]


def test_blocks_with_terms_of_the_loss_generate():
    with forks.routed():
        ours = build_model(make_config().model).eval()
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        rows = torch.tensor(prompts_of([9]))
        cache = Cache([8], 9, 2, CPU)
        with torch.no_grad():
            ours(rows[:, :8], cache=cache)
            logits = ours(rows[:, 8:], cache=cache)
            assert torch.allclose(logits[:, 0], ours(rows)[:, 8], atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.8, 1.0), (1.3, 0.7)])
def test_cached_text_equals_text_recomputed(temperature, top_p):
    """Each row of a batch, alone and without a cache; one prompt is longer than the context, and some become so."""
    ours, _ = varied(make_config().model)
    prompts = prompts_of([3, 1, 8, 20, 6])
    for context in (8, 7, 1000):
        found = rows_of(generate(ours, prompts, 20, context, CPU, temperature, top_p, seed=7))
        assert found == [
            recomputed(ours, prompt, i, 20, context, temperature, top_p, 7)
            for i, prompt in enumerate(prompts)
        ]


def test_a_row_does_not_depend_on_the_rows_beside_it():
    ours, _ = varied(make_config().model)
    a, b, c = prompts_of([5, 20, 2])

    def sampled(prompts: list[list[int]], seed: int = 0) -> list[list[int]]:
        return rows_of(generate(ours, prompts, 30, 16, CPU, 0.9, 0.9, seed))

    both = sampled([a, b])
    assert both[0] == sampled([a])[0] == sampled([a, c, b])[0]
    assert both[1] == sampled([c, b])[1]
    assert sampled([a, a])[0] != sampled([a, a])[1]  # equal prompts, different draws
    assert sampled([a, b]) == both != sampled([a, b], seed=1)


def nucleus(p: list[float], top_p: float) -> dict[int, float]:
    """The smallest set of likeliest tokens with at least this probability, renormalised: by its definition."""
    chosen, total = [], 0.0
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        if total >= top_p:
            break
        chosen.append(token)
        total += p[token]
    return {token: p[token] / total for token in chosen}


@pytest.mark.parametrize(
    "temperature, top_p", [(1.0, 1.0), (1.0, 0.9), (0.5, 0.6), (2.0, 0.3), (1.0, 1e-9)]
)
def test_draws_follow_the_nucleus(temperature, top_p):
    """Evenly spaced draws give every token its share of the nucleus, to one draw at either end, and no other token."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    exponents = [math.exp(x / temperature) for x in logits.tolist()]
    expected = nucleus([x / sum(exponents) for x in exponents], top_p)
    assert top_p == 1 or len(expected) < 40
    n = 4000
    drawn = choose(logits.expand(n, -1), temperature, top_p, [(i + 0.5) / n for i in range(n)])
    shares = {token: drawn.count(token) / n for token in set(drawn)}
    assert shares.keys() <= expected.keys()
    assert all(abs(shares.get(token, 0) - share) <= 2 / n for token, share in expected.items())


def test_the_limits_of_choosing():
    logits = torch.tensor([[0.5, 2.0, -1.0], [3.0, 1.0, 2.9]])
    for draws in ([0.0, 0.0], [1 - 2**-53] * 2):
        assert choose(logits, 0.0, 1.0, draws) == choose(logits, 1e-300, 1.0, draws) == [1, 0]
        assert choose(logits, 2.0, 1e-300, draws) == [1, 0]
    assert choose(logits, 1.0, 1.0, [1 - 2**-53] * 2) == [2, 1]  # the least likely
    # what is impossible never
    assert choose(torch.tensor([[0.0, -math.inf]]), 1.0, 1.0, [1 - 2**-53]) == [0]


class Bytes:
    """A tokenizer whose tokens are bytes; 0 is BOS and 1 is EOS."""

    bos, eos = [0], [1]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i > 1).decode(errors="replace")


def written(prompts: list[str], *texts: bytes) -> list[str]:
    """What print_stream() writes while rows get these bytes."""
    parts: list[str] = []

    def steps() -> Iterator[list[int]]:
        for i in range(max(map(len, texts))):
            yield [text[i] if i < len(text) else 1 for text in texts]

    print_stream(
        Bytes(), [tool.encode(Bytes(), prompt) for prompt in prompts], steps(), parts.append
    )
    return parts


def test_text_appears_as_it_is_written_in_whole_characters():
    text = "a\N{SNOWMAN}b\N{GRINNING FACE}"
    parts = written(["x "], text.encode() + b"\x01not this")
    assert [part for part in parts if part] == ["x ", *text, "\n"]
    assert (
        "".join(written(["x"], b"\xe2\x98 y\xff"))
        == "x\N{REPLACEMENT CHARACTER} y\N{REPLACEMENT CHARACTER}\n"
    )


def test_several_texts_appear_whole_each_up_to_its_eos_token():
    assert written(["a", "b"], b"123\x01", b"5\x0167") == [
        "=== prompt 1 of 2\na123\n",
        "=== prompt 2 of 2\nb5\n",
    ]


def test_what_is_there_is_shown_when_interrupted():
    parts: list[str] = []
    with pytest.raises(KeyboardInterrupt):

        def steps() -> Iterator[list[int]]:
            yield [*b"45"]
            raise KeyboardInterrupt

        print_stream(Bytes(), [[*b"a"], [*b"b"]], steps(), parts.append)
    assert "".join(parts) == "=== prompt 1 of 2\na4\n=== prompt 2 of 2\nb5\n"


def test_continue_text_ends_at_the_eos_token_and_makes_every_pass():
    passes = []

    class Writes(torch.nn.Module):
        blocks = ()

        def forward(self, tokens, cache):
            passes.append(tokens.tolist())
            return torch.nn.functional.one_hot(
                torch.tensor([[b"yes\x01more"[len(passes) - 1]]]), 256
            ).float()

    assert continue_text(Writes(), Bytes(), "say ", 8, 0.0, 64, CPU) == "say yes"
    assert len(passes) == 8 and passes[0] == [[0, *b"say "]] and passes[2] == [[*b"e"]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_spread_model_writes_what_a_plain_one_does(on_ranks, ranks):
    """Over tp and cp too, where a single token cannot be cut."""
    options = [
        {"parallel": {"recompute": "full", "compile": True}},
        {
            "parallel": {"recompute": "selective", "prefetch_forward": 0},
            "model": {"tie_embeddings": True},
        },
        {"parallel": {"reshard_after_forward": False, "cpu_offload": True}},
    ]
    if ranks == 4:
        options = [{"parallel": mesh} for mesh in ({"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2})]
    for rank in on_ranks(ranks, cases.generated, options, prompts_of([5, 30, 2]), 24):
        for spread_greedy, spread_sampled, greedy, sampled in rank:
            assert spread_greedy == greedy and spread_sampled == sampled and greedy != sampled


# The tool itself.


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
        assert run(capsys, checkpoint.parent.parent, "--prompt", "the cat", *options) == (
            0,
            one,
            "",
        )
        _, several, _ = run(
            capsys, checkpoint, "--prompt", "the cat", "--prompt", "a dog sat on the hat", *options
        )
        assert several.startswith(
            f"=== prompt 1 of 2\n{one}=== prompt 2 of 2\na dog sat on the hat"
        )
    options = ("--tokens", 12, "--top-p", 0.5)
    assert run(capsys, checkpoint, "--prompt", "a", *options, "--seed", 1) != run(
        capsys, checkpoint, "--prompt", "a", *options, "--seed", 2
    )


@pytest.mark.parametrize(
    "changes", [{}, {"tokens": 9}, {"temperature": 1.7}, {"top-p": 0.5}, {"seed": 3}], ids=str
)
def test_tool_samples_as_each_option_says(checkpoint, capsys, changes):
    """Alone among the defaults, each gives the text that recomputing every token gives."""
    tokenizer, model = Tokenizer(checkpoint), Llama(catalog.read_config(checkpoint).model)
    load.restore(checkpoint, model, None)
    options, expected = {"tokens": 128, "temperature": 0.8, "top-p": 1.0, "seed": 0, **changes}, ""
    for row, prompt in enumerate(("the cat", "a dog sat")):
        ids = encode(tokenizer, prompt)
        new = recomputed(
            model,
            ids,
            row,
            options["tokens"],
            32,
            options["temperature"],
            options["top-p"],
            options["seed"],
        )
        end = next((i for i, token in enumerate(new) if token in tokenizer.eos), None)
        expected += f"=== prompt {row + 1} of 2\n{printable(tokenizer.decode(ids + new[:end]))}\n"
    words = [word for name, value in changes.items() for word in (f"--{name}", value)]
    assert run(capsys, checkpoint, "--prompt", "the cat", "--prompt", "a dog sat", *words)[:2] == (
        0,
        expected,
    )


def test_tool_ends_a_text_at_any_eos_token_of_an_imported_folder(
    checkpoint, tmp_path, monkeypatch, capsys
):
    folder, tokenizer = shutil.copytree(checkpoint, tmp_path / "imported"), Tokenizer(checkpoint)
    more = tokenizer.encode(["on the mat"])[0]
    monkeypatch.setattr(tool, "generate", lambda *unused: iter([[token] for token in more]))
    for ids, length in ((None, len(more)), (more[2], 2), ([9999, more[1]], 1)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        text = tokenizer.decode([*encode(tokenizer, "the cat"), *more[:length]])
        assert run(capsys, folder, "--prompt", "the cat", "--tokens", 8) == (0, f"{text}\n", "")


def test_tool_reports_when_text_outgrows_the_window(checkpoint, capsys):
    options = ("--prompt", "the cat", "--dtype", "bfloat16", "--tokens")
    code, text, errors = run(capsys, checkpoint, *options, 50)
    assert (
        code == 0
        and text
        and errors.startswith("beyond 32 tokens (train.seq_len)")
        and errors.count("\n") == 1
    )
    most = 32 - len(encode(Tokenizer(checkpoint), "the cat")) + 1  # the last is written, not read
    assert (
        run(capsys, checkpoint, *options, most)[2]
        == ""
        != run(capsys, checkpoint, *options, most + 1)[2]
    )


def test_tool_refuses_an_id_that_the_model_has_no_row_for(checkpoint, capsys, monkeypatch):
    cfg, largest = catalog.read_config(checkpoint), max(encode(Tokenizer(checkpoint), "the cat"))
    for rows, refused in ((largest, True), (largest + 1, False)):
        small = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=rows))
        monkeypatch.setattr("checkpoint.catalog.read_config", lambda *_, found=small: found)
        # its rows are not those of the checkpoint
        code, text, errors = run(capsys, checkpoint, "--prompt", "the cat")
        assert code == 2 and text == ""
        assert (f"has id {largest}, but the model's vocab_size is {rows}: " in errors) is refused, (
            errors
        )


def test_tool_commands_no_terminal(checkpoint, capsys):
    code, text, _ = run(capsys, checkpoint, "--prompt", "a\x1b[31m\x07\tred", "--tokens", 1)
    assert code == 0 and text.startswith("a\\x1b[31m\\x07\tred") and "\x1b" not in text


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--tokens", "0"], "--tokens 0: must be at least 1"),
        (["--tokens", "many"], "many"),
        (["--temperature", "-1"], "--temperature -1.0: must be at least 0"),
        (["--temperature", "nan"], "nan: must"),
        (["--temperature", "inf"], "--temperature inf"),
        (["--top-p", "0"], "--top-p 0.0: must be greater than 0"),
        (["--top-p", "1.1"], "--top-p 1.1"),
        (["--top-p", "nan"], "--top-p nan"),
        (["--dtype", "float16"], "float16"),
        (["--seed", "x"], "--seed"),
        (["--colour"], "--colour"),
    ],
    ids=str,
)
def test_bad_values_are_one_line(checkpoint, capsys, arguments, expected):
    code, text, errors = run(capsys, checkpoint, "--prompt", "a", *arguments)
    assert code == 2 and text == "" and expected in errors and errors.count("\n") == 1, errors


def test_a_missing_prompt_checkpoint_or_tokenizer_is_one_line(
    checkpoint, saved_by_two, tmp_path, capsys
):
    for arguments, expected in (
        ([checkpoint], "--prompt"),
        ([tmp_path, "--prompt", "a"], str(tmp_path)),
        ([saved_by_two[0], "--prompt", "a"], "tokenizer"),
    ):
        code, text, errors = run(capsys, *arguments)
        assert code == 2 and text == "" and expected in errors and errors.count("\n") == 1, errors


def test_interrupted_it_ends_its_line(checkpoint):
    """By Ctrl-C, on a terminal that has ASCII only, when the prompt has been printed."""
    # sampled, an EOS token comes soon
    command = [
        sys.executable,
        "-m",
        "generate",
        checkpoint,
        "--prompt",
        "\N{SNOWMAN}",
        f"--tokens={10**6}",
        "--temperature=0",
    ]
    process = subprocess.Popen(
        command,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},  # a shell's background job ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.read(6) == r"\u2603"
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and text.endswith("\n") and errors.count("\n") == 1, errors


def test_a_reader_may_leave(checkpoint, capsys, monkeypatch):
    end, begin = os.pipe()
    os.close(end)
    with os.fdopen(
        begin, "w"
    ) as stdout:  # closed without an error: what could not be printed is gone
        monkeypatch.setattr(sys, "stdout", stdout)
        assert tool.main([str(checkpoint), "--prompt", "the", "--tokens", "3"]) == 0
    assert capsys.readouterr().err == ""


def test_a_full_disk_and_no_output_are_reported(checkpoint, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        for stdout in (full, None):
            monkeypatch.setattr(sys, "stdout", stdout)
            assert tool.main([str(checkpoint), "--prompt", "the", "--tokens", "3"]) == 1
            errors = capsys.readouterr().err
            assert errors.startswith("stdout: ") and errors.count("\n") == 1, errors


def test_what_no_model_can_take_is_one_line():
    with pytest.raises(ConfigError, match="the model's output is not finite"):
        choose(torch.tensor([[0.0, math.nan]]), 1.0, 1.0, [0.5])
    silent = SimpleNamespace(bos=[], encode=lambda texts: [[] for _ in texts])
    with pytest.raises(ConfigError, match="--prompt: is empty, and the tokenizer has no BOS token"):
        tool.encode(silent, "")
    silent.bos = [1]
    assert tool.encode(silent, "") == [1]
    with pytest.raises(
        ConfigError, match="--prompt: is not valid Unicode: surrogates not allowed at character 1"
    ):
        tool.encode(None, "a\udcff")
