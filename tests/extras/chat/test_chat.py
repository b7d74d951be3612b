"""Conversations against transformers' templates, masks and losses; packing against a plain loop; the same run on any
mesh; what is refused."""

import contextlib
import hashlib
import io
import itertools
import json
import math
import pathlib
import random
import re
import shutil
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import config
import data.encode
import extras.chat.template
from config import ConfigError
from data.dataset import open_dataset
from data.loader import validation_batches
from data.prepare import prepare
from data.record import holds_out_documents, is_complete, read_manifest, validation_range
from data.tokenizer_training import train_tokenizer
from data.tokens import window_span
from data.writer import TokenWriter
from extras.chat import packing, terminal
from extras.chat.conversations import Chat, spelled
from extras.chat.messages import checked
from extras.chat.packing import Packed, pack
from model.llama import Llama
from parallel.materialize import materialize
from tests import cases
from tests.conftest import data_rank, launch, loader_of, make_config, rows, run_tool, words
from tests.data.test_tokenizer import sentencepiece_model

pytestmark = pytest.mark.early

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' -}}
{% if message.role == 'assistant' %}
{% generation %}
{{- message.content + '<|im_end|>' -}}
{% endgeneration %}
{{ '\n' -}}
{% else %}
{{- message.content + '<|im_end|>\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' -}}
{% endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}
SPECIAL = [
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


def without_blocks(template: str) -> str:
    for tag in (
        "{% generation %}\n",
        "{% endgeneration %}\n",
        "{%- generation %}",
        "{%- endgeneration %}",
    ):
        template = template.replace(tag, "")
    assert "generation %" not in template.replace("add_generation_prompt %", "")
    return template


def talk(*texts: str, system: str | None = None) -> list[dict]:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return turns


def conversations(count: int) -> list[list[dict]]:
    """One to three turns of one to twenty words, every third with a system prompt."""
    draw = random.Random(7)
    return [
        talk(
            *(
                words(draw.randrange(10**6), draw.randint(1, 20))
                for _ in range(2 * draw.randint(1, 3))
            ),
            system="be kind" if i % 3 == 0 else None,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> pathlib.Path:
    """A byte-level BPE tokenizer with 320 entries, as Llama 3's and Qwen's, and template files beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=318,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([words(i, 50) for i in range(20)], trainer)
    made.add_tokens(["<tool_call>", "</tool_call>"])  # not special, as Qwen's
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}))
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
        (folder / f"{name}-prefixes.jinja").write_text(without_blocks(template))
    return folder


@pytest.fixture(scope="module")
def theirs(tokenizer):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(tokenizer)


def here(cfg: config.Config, one_in: int = 10**9) -> pathlib.Path:
    """prepare() in this process; one in so many is held out, by a hash of the test's own; 0: by the data's. Where that
    is none, nothing is."""
    rule = (lambda text: sum(text.encode()) % one_in == 0) if one_in else data.encode.is_validation

    decide = TokenWriter.decide_validation

    def by_hash_alone(writer: TokenWriter) -> None:
        if holds_out_documents(writer.manifest):
            decide(writer)
        else:
            writer.manifest["validation"] = ["heldout", 0, writer.tokens["heldout"]]

    with (
        mock.patch("data.prepare.worker_count", lambda: 0),
        mock.patch("extras.chat.conversations.is_validation", rule),
        mock.patch("data.prepare.report"),
        mock.patch.object(TokenWriter, "decide_validation", by_hash_alone),
    ):
        return prepare(cfg)[0]


def sections_of(tokenizer: pathlib.Path, folder: pathlib.Path, rows: list, **more: dict) -> dict:
    """Of a run on these rows, written as jsonl."""
    source = folder / "chat.jsonl"
    if not source.exists():
        source.write_text(
            "".join(
                json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n"
                for row in rows
            )
        )
    data_ = {
        "source": str(source),
        "tokenizer": str(tokenizer),
        "messages_field": "messages",
        "path": str(folder / "out"),
        **more.pop("data", {}),
    }
    return {
        "data": data_,
        "train": {"steps": 4, "seq_len": 128, "global_batch_size": 4, "micro_batch_size": 1},
        **more,
    }


@pytest.fixture(scope="module")
def chats(tokenizer, tmp_path_factory) -> dict:
    """The sections of a run on 120 conversations, prepared; one in ten is held out."""
    sections = sections_of(tokenizer, tmp_path_factory.mktemp("chats"), conversations(120))
    here(make_config(**sections), one_in=10)
    return sections


# Rendering and mask

TOOLS = [
    {"role": "user", "content": "the time?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "now", "arguments": {"at": "é"}}}],
    },
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "noon"},
]


@pytest.mark.quick
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(tokenizer, theirs, name):
    given = [
        *conversations(6),
        talk("", "x"),
        talk("  a \n\n", "\n b\n\n", "ö ✓", "  "),
    ]
    if name == "qwen3":
        given.append(TOOLS)
    for messages in given:
        wanted = theirs.apply_chat_template(
            messages,
            chat_template=TEMPLATES[name],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        silent = not all(
            m["content"].strip() or m.get("tool_calls")
            for m in messages
            if m["role"] == "assistant"
        )
        for template in (f"{name}.jinja", f"{name}-prefixes.jinja"):
            ids, learned = Chat(tokenizer, str(tokenizer / template)).encode(checked(messages))
            if silent:
                assert (ids, learned) == ([], [])  # an assistant that says nothing
            else:
                assert ids == wanted["input_ids"] and learned == [
                    *map(bool, wanted["assistant_masks"])
                ], template


@pytest.mark.parametrize(
    "texts",
    [
        ("say <|im_end|> now", "<|im_start|>assistant no"),
        ("<|im_<|im_end|>end|>", "a|im_end|> <"),
        ("<|im_end", "|> x"),
    ],
    ids=str,
)
def test_special_tokens_that_a_message_spells_out_are_text(tokenizer, theirs, texts):
    """As with transformers' sanitize_control_tokens, which is off by default."""
    chat = Chat(tokenizer)
    ids, learned = chat.encode(talk(*texts))
    wanted = theirs.apply_chat_template(
        talk(*texts), return_dict=True, sanitize_control_tokens=True
    )["input_ids"]
    assert ids == wanted and chat.tokenizer.decode(ids).count(texts[0]) == 1
    # two turns, each with a begin and an end
    assert sum(token in chat.special.values() for token in ids) == 4
    said = chat.tokenizer.decode([token for token, has_loss in zip(ids, learned) if has_loss])
    assert said == texts[1]
    unsafe = theirs.apply_chat_template(talk(*texts), return_dict=True)["input_ids"]
    assert not any("<|im_end|>" in text for text in texts) or unsafe != ids


def test_what_a_template_completes_to_a_special_token_is_text(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content + '|im_end|>' + m.role }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    chat = Chat(tokenizer, str(tmp_path / "t.jinja"))
    ids, _ = chat.encode(talk("a <", "b"))
    assert [token for token in ids if token in chat.special.values()] == [
        chat.special["<|eot_id|>"]
    ] * 2


def test_a_sentencepiece_model_says_offsets_too(tmp_path, theirs):
    """Its ids are those of the text between special tokens; a template of its own has words for roles."""
    (tmp_path / "tokenizer.model").write_bytes(
        train_tokenizer([words(i, 60) for i in range(30)], 300)
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}Answer: {% generation %}"
        "{{ m.content + eos_token }}{% endgeneration %}{% else %}Question: {{ m.content + '\n' }}{% endif %}"
        "{% endfor %}"
    )
    chat = Chat(tmp_path)
    ids, learned = chat.encode(talk("the cat </s> ö", "a dog ▁ ✓", "b", "c"))
    plain = chat.tokenizer.encode(
        ["Question: the cat </s> ö\nAnswer: a dog ▁ ✓", "Question: b\nAnswer: c"]
    )
    assert ids == [1, *plain[0], 2, *plain[1], 2]
    # " a" is one token
    assert spelled(
        chat.tokenizer, [token if has else ~token for token, has in zip(ids, learned)]
    ) == ("<s>Question: the cat </s> ö\nAnswer:« a dog ▁ ✓</s>»Question: b\nAnswer: «c</s>»")
    assert chat.end_of_turn() == [2]


# Loss


@pytest.mark.quick
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_token_s_loss_is_that_of_transformers(tokenizer, theirs, name, tmp_path):
    from tests.model.test_llama import reference, with_weights_of

    given = conversations(24)
    sections = sections_of(
        tokenizer, tmp_path, given, data={"chat_template": str(tokenizer / f"{name}.jinja")}
    )
    cfg = make_config(**sections)
    here(cfg)
    torch.manual_seed(0)
    model = reference(cfg.model)
    ours = with_weights_of(model, cfg.model)
    wanted = {}
    total = 0.0
    with torch.no_grad():
        for messages in given:
            found = theirs.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                return_dict=True,
                return_tensors="pt",
                return_assistant_tokens_mask=True,
            )
            ids, mask = found["input_ids"][0, :128], found["assistant_masks"][0, :128].bool()
            losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            wanted[tuple(ids.tolist())] = losses[mask[1:]]
            total += losses[mask[1:]].sum().item()
        (packed,) = open_dataset(cfg).train
        loader = loader_of(cfg, packed)
        seen = 0
        sums = 0.0
        valid = 0
        steps = packed.windows // 4
        for batch in (next(loader) for _ in range(steps)):
            for inputs, targets, positions, documents in batch.micro_batches:
                logits = ours(inputs, None, positions, documents)
                sums += ours(inputs, targets, positions, documents)[0]["loss"].item()
                for row in range(len(inputs)):
                    for place in documents[row].unique().tolist()[:-1]:
                        at = documents[row] == place
                        has_loss = at & (targets[row] >= 0)
                        found = F.cross_entropy(
                            logits[row][has_loss], targets[row][has_loss], reduction="none"
                        )
                        torch.testing.assert_close(
                            found, wanted.pop(tuple(inputs[row][at].tolist())), rtol=1e-5, atol=1e-5
                        )
                        seen += 1
            valid += batch.valid_tokens
        loader.close()
    left = sum(map(len, wanted.values()))
    assert seen > 10 and valid == sum(len(losses) for losses in wanted.values()) + valid - left
    if not wanted:
        assert sums == pytest.approx(total, rel=1e-5)


# Packing


def best_fit_decreasing(lengths: list[int], room: int) -> int:
    """The number of windows, by a plain loop."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else room) - length)
    return len(free)


def test_windows_are_those_of_best_fit_decreasing():
    draw = random.Random(0)
    for room in (1, 7, 64, 100):
        for count in (1, 2, 50, 400):
            lengths = np.array([draw.randint(1, room) for _ in range(count)])
            members, starts = pack(lengths, room, seed=3)
            assert sorted(members.tolist()) == [*range(count)]  # each once
            assert len(starts) - 1 == best_fit_decreasing(lengths.tolist(), room)
            assert max(lengths[members[a:b]].sum() for a, b in itertools.pairwise(starts)) <= room
            again, other = pack(lengths, room, seed=3), pack(lengths, room, seed=4)
            assert (again[0] == members).all() and len(other[1]) == len(starts)
    # the seed mixes equals
    assert not (pack(np.full(100, 5), 10, 0)[0] == pack(np.full(100, 5), 10, 1)[0]).all()


def test_conversations_of_one_length_stand_in_the_order_of_a_hash():
    """splitmix64 of (seed, number), in Python's integers: a stored run reads the same windows in every version."""

    def splitmix64(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    for seed in (0, 7):
        digest = hashlib.blake2b(f"packing {seed}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        expected = [splitmix64((number + key) % 2**64) >> 24 for number in range(1009)]
        lengths = np.full(1009, 5)
        lengths[::3] = 4  # shorter ones follow
        order = sorted(range(1009), key=lambda i: (-lengths[i], expected[i]))
        members, starts = packing.pack(lengths, 5, seed)
        assert members.tolist() == order and starts.tolist() == [*range(1010)]


@pytest.mark.parametrize("count, is_sampled", [(2000, False), (2001, True), (6007, True)])
def test_a_launch_says_how_full_its_windows_are_and_how_much_is_learned(
    tmp_path, monkeypatch, count, is_sampled
):
    """Exactly of up to 2,000 conversations, and of more about."""
    monkeypatch.setattr(packing, "complete_manifest", lambda folder: {"reads": []})
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 90, count)  # the longest of 64 are cut
    ids = draw.integers(0, 300, lengths.sum()).astype("<i4")
    is_learned = draw.random(len(ids)) < 0.3
    ends = np.cumsum(lengths)
    for number in range(0, count, 7):  # nothing is learned of these
        is_learned[ends[number] - lengths[number] : ends[number]] = False
    (tmp_path / "train.bin").write_bytes(np.where(is_learned, ids, ~ids).tobytes())
    kept = np.minimum(lengths, 64)
    members, starts = packing.pack(kept, 64, seed=0)
    learned = []
    for begin, size in zip(ends - lengths, kept):
        learned.append(int(is_learned[begin : begin + size].sum()))
    with (tmp_path / "train.bin").open("rb") as file:
        stream = SimpleNamespace(path=tmp_path / "train.bin", file=file, end=ends.__getitem__)
        numbers = {"left_out": 31, "cut": 1234, "filled": int(kept.sum())}
        said = packing.Packed(stream, 64, members, starts, **numbers).summary()
    windows = len(starts) - 1
    full = kept.sum() / (64 * windows)
    assert said.startswith(
        f"{tmp_path}: {count:,} conversations in {windows:,} windows of 64 tokens, {full:.1%} full; "
        "1,234 cut at a window's end; 31 left out, "
    )
    about, share, without = re.search(
        r"; (about )?(\d+)% of the tokens have a loss; (?:about )?([\d,]+) cut before any", said
    ).groups()
    true_share = 100 * sum(learned) / kept.sum()
    true_count = learned.count(0)
    assert (about is not None) is is_sampled and said.count("about") == 2 * is_sampled
    if is_sampled:
        assert float(share) == pytest.approx(true_share, abs=2)
        assert int(without.replace(",", "")) == pytest.approx(true_count, rel=0.15)
    else:
        assert (share, without) == (f"{true_share:.0f}", f"{true_count:,}")


@pytest.mark.parametrize("room", [2048, 8192])
def test_windows_are_full_and_planned_in_no_time(room):
    """Lengths of 100,000 conversations: lognormal, median 450 tokens, sigma 1."""
    lengths = (
        np.random.default_rng(0)
        .lognormal(math.log(450), 1.0, 100_000)
        .astype(np.int64)
        .clip(8, room)
    )
    began = time.process_time()
    _, starts = pack(lengths, room, 0)
    assert time.process_time() - began < 2 and lengths.sum() / (room * (len(starts) - 1)) > 0.97


def test_a_window_has_each_conversation_with_what_follows_from_it(chats):
    cfg = make_config(**chats, eval={})
    dataset = open_dataset(cfg)
    (packed,), (heldout,) = dataset.train, dataset.validation
    assert packed.document_count + heldout.document_count == 120 and heldout.document_count > 3
    said = packed.summary()
    assert dataset.notes[0].startswith(said) and f" {packed.document_count} conversations" in said
    tokens = learned = 0
    for window in range(packed.windows):
        stream, first, stop = window_span(packed, window, 128)
        raw, ids = stream.read(first, stop)
        documents = stream.documents(first, stop)
        assert stop - first == 129 == len(ids) and documents[-1][1] - first == len(raw) // 4 <= 128
        assert (ids[len(raw) // 4 :] == -1).all()
        tokens, learned = tokens + len(raw) // 4, learned + int((ids >= 0).sum())
    assert tokens == packed.filled and f"{learned / tokens:.0%} of the tokens" in said
    seen = []
    for window in range(packed.windows):
        seen += [number for number, *_ in packed.conversations(window)]
    assert sorted(seen) == [*range(packed.document_count)]
    # validation: each window once, over any number of ranks
    counts = []
    for ranks in (1, 2):
        count = 0
        for rank in range(ranks):
            for tensors in validation_batches(heldout, cfg, data_rank(rank, ranks)):
                count += int((tensors[1] >= 0).sum())
        counts.append(count)
    assert counts[0] == counts[1] > 20


@pytest.mark.parametrize("learned", ["answers", "all"])
def test_valid_tokens_and_digests_are_those_of_the_step_on_any_rank(chats, learned, monkeypatch):
    """Also where a conversation's first token has a loss, as behind a template without a prompt: it is no target."""
    cfg = make_config(**chats)
    (packed,) = open_dataset(cfg).train
    if learned == "all":
        stored = Packed.stored

        def all_with_loss(packed: Packed, begin: int, end: int) -> np.ndarray:
            ids = stored(packed, begin, end)
            return np.maximum(ids, ~ids)

        monkeypatch.setattr(Packed, "stored", all_with_loss)
    found = {}
    for ranks in (1, 2, 4):
        loaders = [loader_of(cfg, packed, rank=rank, ranks=ranks) for rank in range(ranks)]
        batches = [next(loader) for loader in loaders]
        [loader.close() for loader in loaders]
        targets = 0
        for batch in batches:
            targets += sum(int((tensors[1] >= 0).sum()) for tensors in batch.micro_batches)
        assert {batch.valid_tokens for batch in batches} == {targets}
        found[ranks] = sum(batch.digest for batch in batches) % config.DIGEST_MODULUS, targets
    assert len({*found.values()}) == 1


def test_gradients_and_runs_do_not_depend_on_the_mesh(on_ranks, chats, tokenizer, tmp_path):
    """Against conversations one by one, with neither windows nor masks; and resumed on another mesh."""
    sections = {**chats, "eval": {}, "checkpoint": {}, "optim": {"schedule_steps": 4}}
    cfg = make_config(**sections)
    (packed,) = open_dataset(cfg).train
    model = Llama(cfg.model)
    materialize(model, cfg.run.seed, torch.device("cpu"))
    from data.order import make_order

    order, count = make_order(cfg, [packed]), 0
    for number in range(4):
        for _, begin, end in packed.conversations(order(number).window):
            stored = torch.tensor(packed.stored(begin, end).astype(np.int64))
            ids = torch.where(stored >= 0, stored, -1 - stored)
            losses = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")[
                stored[1:] >= 0
            ]
            count += len(losses)
            losses.sum().backward()
    wanted = {name: p.grad / count for name, p in model.named_parameters()}
    norm = math.sqrt(sum(g.square().sum().item() for g in wanted.values()))
    meshes = {
        2: [{}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2, "dp_shard": 1}],
        1: [{}],
        4: [{}, {"dp_replicate": 2, "dp_shard": 2}],
    }
    other, straight = str(tmp_path / "resumed"), str(tmp_path / "straight")
    training = {2: [(2, {"cp": 2}, other)], 1: [(4, {}, other), (4, {}, straight)], 4: []}
    rows = {}
    for ranks, shapes in meshes.items():
        found, rows[ranks] = on_ranks(
            ranks, cases.chat_gradients, sections, shapes, training[ranks]
        )[0]
        for mesh, gradients in zip(shapes, found):
            off = math.sqrt(
                sum(
                    (torch.from_numpy(gradients[name]) - g).square().sum().item()
                    for name, g in wanted.items()
                )
            )
            assert off < 1e-6 * norm, (ranks, mesh, off / norm)
    resumed, alone = rows[1]
    assert [row["batch_digest"] for row in resumed] == [row["batch_digest"] for row in alone]
    assert [row["loss"] for row in resumed] == pytest.approx(
        [row["loss"] for row in alone], rel=1e-5
    )
    evaluation = [
        json.loads(line)
        for line in (pathlib.Path(straight) / "r/metrics.jsonl").read_text().splitlines()
    ]
    (evaluation,) = [row for row in evaluation if row["kind"] == "eval"]
    assert evaluation["bits_per_byte"] is None and 3 < evaluation["loss"] < 7
    checkpoint = pathlib.Path(straight, "r/checkpoints/step-00000004")
    assert (checkpoint / "chat_template.jinja").read_text() == CHATML
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    exported_and_spoken_to(tmp_path / "checkpoint", tmp_path)


def exported_and_spoken_to(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The template goes along with an export, and generate --chat speaks by it."""
    import generate
    from extras.huggingface import convert

    assert run_tool(convert.main, "export", checkpoint, tmp_path / "hf") == 0
    assert (tmp_path / "hf/chat_template.jinja").read_text() == CHATML
    settings = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert settings["eos_token_id"] == SPECIAL.index("<|im_end|>")
    out = io.StringIO()
    out.reconfigure = lambda **_: None
    with (
        mock.patch(
            "sys.stdin", io.StringIO("the cat\n\n" + words(1, 300) + "\na dog\n/quit\nno\n")
        ),
        contextlib.redirect_stdout(out),
    ):
        assert run_tool(generate.main, checkpoint, "--chat", "--tokens", 8, "--temperature", 0) == 0
    said = out.getvalue()
    assert said.count("> ") == 5 and "too long for a context of 128 tokens" in said, said


@pytest.mark.parametrize(
    "context, most, dropped",
    [
        (107, 2, 0),  # 105 tokens and 2
        (106, 2, 2),  # 75
        (139, 99, 0),  # a quarter, 34
        (138, 99, 2),
        (99, 25, 2),
        (98, 25, 4),
        (7, 2, 4),  # 5
        (6, 2, 4),
        (5, 2, None),
    ],
)
def test_the_oldest_exchanges_go_until_a_reply_fits(context, most, dropped):
    """The limit of a reply, or a quarter of the context and at least a token, is kept free for it."""
    chat = SimpleNamespace(prompt=lambda lengths: [0] * sum(lengths))
    history = [10, 20, 30, 40]
    if dropped is None:
        with pytest.raises(ConfigError, match="too long for a context of 5 tokens"):
            terminal.fit(chat, history, [5], context, most)
        return
    prompt, count = terminal.fit(chat, history, [5], context, most)
    assert (len(prompt), count) == (sum(history[dropped:]) + 5, dropped)
    assert terminal.fit(chat, [], [2], 3, 9) == ([0, 0], 0)
    with pytest.raises(ConfigError):
        terminal.fit(chat, [], [3], 3, 9)


def test_a_conversation_keeps_what_fits_and_ends_turns(tokenizer, monkeypatch, capsys):
    chat, prompts = Chat(tokenizer), []
    answer, end = chat.tokenizer.encode(["dog ö ✓"])[0], chat.special["<|im_end|>"]

    def reply(ids, count):
        prompts.append((ids, count))
        for token in [*answer, end, 5]:
            yield [token]

    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n" * 3))
    one = len(chat.prompt(talk("the cat")))
    three = len(chat.prompt(talk("the cat", "dog ö ✓", "the cat", "dog ö ✓", "the cat")))
    # the third no longer leaves room for four tokens
    terminal.converse(tokenizer, [], three + 3, 4, reply)
    said = capsys.readouterr().out
    assert said.count("> dog ö ✓\n") == 2 and "(2 messages, the oldest, no longer fit" in said, said
    assert [ids for ids, _ in prompts] == [
        chat.prompt(talk("the cat")),
        chat.prompt(talk("the cat", "dog ö ✓", "the cat")),
        chat.prompt(talk("the cat", "dog ö ✓", "the cat")),
    ] and one < three


# What is shown and refused


def test_show_marks_what_has_a_loss(chats, tmp_path):
    from data import show

    cfg = make_config(**chats)
    text = "\n".join(show.samples(cfg, 1))
    assert text.count("=== step 1, sample") == 4 and "--- conversation " in text
    assert (
        "<|im_start|>assistant\n«" in text
        and "<|im_end|>»\n<|im_start|>" in text
        and "«<|im_start|>" not in text
    )


def test_of_few_conversations_the_last_are_held_out_whole(tokenizer, tmp_path):
    """Where no conversation is held out by its hash."""
    rows = conversations(60)
    cfg = make_config(**sections_of(tokenizer, tmp_path, rows), eval={})
    with (
        mock.patch("data.prepare.worker_count", lambda: 0),
        mock.patch("extras.chat.conversations.is_validation", lambda text: False),
    ):
        folder = prepare(cfg)[0]
    manifest = read_manifest(folder)
    validation, tokens = validation_range(manifest), manifest["tokens"]["train"]
    ends = np.fromfile(folder / "train.ends.bin", "<i8").tolist()
    assert validation.file == "train" and validation.end == tokens == ends[-1]
    assert validation.first in ends and 2 <= tokens - validation.first < tokens // 10
    dataset = open_dataset(cfg)
    (train,), (held,) = dataset.train, dataset.validation
    count = sum(end > validation.first for end in ends)
    assert sorted(held.members.tolist()) == [*range(60 - count, 60)]
    assert sorted(train.members.tolist()) == [*range(60 - count)]
    (tmp_path / "x").mkdir()
    lonely = make_config(
        **sections_of(
            tokenizer,
            tmp_path / "x",
            rows[:1],
            data={"source": str(tmp_path / "one.jsonl"), "path": str(tmp_path / "one")},
        )
    )
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": rows[0]}) + "\n")
    here(lonely, one_in=1)
    with pytest.raises(
        ConfigError, match="its 1 are held out for validation; bring more, or name data.validation"
    ):
        open_dataset(lonely)


def test_what_says_nothing_is_left_out_and_counted(tokenizer, tmp_path):
    rows = [talk("a"), talk("a", ""), talk("a", " \n"), [], *conversations(30)]
    cfg = make_config(**sections_of(tokenizer, tmp_path, rows, train={"steps": 4, "seq_len": 24}))
    assert read_manifest(here(cfg))["left_out"] == 4
    (packed,) = open_dataset(cfg).train
    assert packed.document_count == 30 and packed.cut > 5
    assert f"{packed.cut} cut at a window's end; 4 left out" in packed.summary()
    assert "earlier version" not in packed.summary()
    for window in range(packed.windows):  # cut at its end: begins with its first token
        assert packed.read(*window_span(packed, window, 24)[1:])[1][0] == ~1
    # of an earlier version, which learned the turns that a weight of 0 excludes
    manifest = packed.path.parent / "manifest.json"
    known = json.loads(manifest.read_text())
    del known["reads"]
    manifest.write_text(json.dumps(known))
    assert "an earlier version prepared them, which did not read weight, train" in packed.summary()


def test_a_hundred_steps_in_a_row_without_a_target_end_the_run(tokenizer, tmp_path, write_config):
    """All prompts are longer than a window. The steps of two launches count; train.skip_nonfinite = 0 does not."""
    too_long = [talk(words(i, 30), "yes") for i in range(500)]
    sections = sections_of(
        tokenizer,
        tmp_path,
        too_long,
        train={"steps": 120, "seq_len": 32, "global_batch_size": 4, "micro_batch_size": 2},
    )
    path = write_config(
        "cut",
        **sections,
        optim={"schedule_steps": 120},
        log={"every_steps": 50},
        checkpoint={},
        eval={"batches": 1},
    )
    begun = launch(path, "--train.steps=60", nproc=2)
    assert begun.returncode == 0, begun.stderr
    assert re.findall(r"such steps so far: (\d+)", begun.stdout) == ["1", "2", "4", "8", "16", "32"]
    assert "step 50/60  loss    none  grad  0.00" in begun.stdout
    told = "no validation loss: no token of the validation data has a loss"
    assert f"step 60  {told}" in begun.stdout
    shown = launch(path, "--eval-only")
    assert shown.returncode == 0 and shown.stderr.splitlines()[-1] == told
    assert json.loads(shown.stdout.splitlines()[-1])["loss"] is None
    done = launch(path, nproc=2)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step 100: no token of the last 100 steps has a loss" in done.stderr.splitlines()[-1]
    assert rows(tmp_path / "outputs/cut")[-1]["step"] == 100


@pytest.mark.quick
def test_a_mixture_of_jsonl_and_parquet(tokenizer, tmp_path):
    """A parquet file has null for a key that only some messages have."""
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import table

    rows = [
        [{**message, "name": "x" if i == 0 else None} for message in row]
        for i, row in enumerate(conversations(9))
    ]
    parquet.write_table(table({"messages": rows, "text": ["x"] * 9}), tmp_path / "b.parquet")
    sections = sections_of(tokenizer, tmp_path, conversations(20))
    given = [
        {"source": sections["data"].pop("source")},
        {"source": str(tmp_path / "b.parquet"), "weight": 0.5},
    ]
    cfg = make_config(**{**sections, "data": {**sections["data"], "sources": given}})
    here(cfg)
    dataset = open_dataset(cfg)
    assert [stream.document_count for stream in dataset.train] == [20, 9] and len(
        dataset.notes
    ) == 3
    loader = loader_of(cfg, *dataset.train)
    assert next(loader).valid_tokens > 50
    loader.close()
    assert checked([{"role": "assistant", "content": "a", "thinking": "b", "name": None}]) == [
        {"role": "assistant", "content": "a", "thinking": "b", "reasoning_content": "b"}
    ]


DEEP = "{% for a in range(99999) %}{% for a in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
TURN = talk("a", "b")


@pytest.mark.quick
@pytest.mark.parametrize(
    "row, template, wanted",
    [
        ({"texts": []}, None, "line 2: has no field 'messages' (data.messages_field), but texts"),
        (
            {"messages": "hello"},
            None,
            "line 2: field 'messages' must be a list of messages, or JSON of one, but its",
        ),
        (
            {"messages": ["hello"]},
            None,
            "message 1: needs the keys role and content, but is of type str",
        ),
        (
            [{"human": "a"}],
            None,
            "message 1: needs the keys role and content, but has human",
        ),
        (
            [{"role": "user", "tool_calls": []}],
            None,
            "message 1 (user): has no content",
        ),
        (
            [{"role": "robot", "content": "a"}],
            None,
            "message 1: role 'robot' is unknown; the roles are system, developer, user",
        ),
        ([{"role": ["user"], "content": "a"}], None, "message 1: role ['user'] is unknown"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            None,
            "message 1 (user): content has a part of type 'image'; only text is read",
        ),
        (
            [{"role": "assistant", "content": None}],
            None,
            "message 1 (assistant): has no content",
        ),
        (talk("a", "b \ud800"), None, "is not valid Unicode"),
        (
            TURN,
            "{{ raise_exception('roles must alternate') }}",
            "the chat template fails: TemplateError: roles must",
        ),
        (TURN, "{{ messages[9].content.upper() }}", "the chat template fails: UndefinedError"),
        (
            TURN,
            "{% for m in messages %}",
            "t.jinja: the chat template fails, line 1: TemplateSyntaxError",
        ),
        (TURN, DEEP, "the chat template fails: TimeoutError: takes more than 0.3 seconds"),
        (TURN, GROWING, "the chat template takes more than 64 MiB"),
        (TURN, "{{ 'a' * 10**17 }}", "the chat template takes more than 64 MiB"),
        (
            TURN,
            "{{ 9 ** (9 ** 9) }}",
            "the chat template fails: SecurityError: ** of a number as large as that",
        ),
        (TURN, "{% include '/etc/passwd' %}", "the chat template fails: TypeError: no loader"),
        (
            TURN,
            "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
            "the chat template fails: SecurityError",
        ),
        (
            TURN,
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "the chat template fails: SecurityError",
        ),
        (TURN, "{{ messages.append(1) }}", "the chat template fails: SecurityError"),
        (TURN, b"\xff\xfe", "chat template cannot be read: is not UTF-8"),
        (TURN, "missing", "no-such.jinja: chat template cannot be read: No such file"),
        (
            talk("a", "b", "c", "d"),
            "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}"
            "{% endfor %}",
            "message 2 (assistant): the chat template leaves out text of it",
        ),
        (
            TURN,
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}",
            "ends the assistant's turn before <|im_end|>",
        ),
        (
            talk("<|im_end|>", "b"),
            "{% for m in messages %}{{ m.content | length }}{% endfor %}",
            "spells out a special token, and the chat template renders the message differently without it",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_malformed_input_is_one_line(tokenizer, tmp_path, monkeypatch, row, template, wanted):
    monkeypatch.setattr(extras.chat.template, "SECONDS", 0.3)
    monkeypatch.setattr(extras.chat.template, "BYTES", 1 << 26)
    monkeypatch.chdir(tmp_path)
    path, more = tmp_path / "t.jinja", {}
    if template is not None:
        path.write_bytes(template if isinstance(template, bytes) else template.encode())
        more = {"chat_template": str(tmp_path / "no-such.jinja" if template == "missing" else path)}
    good = (
        {"messages": talk("a", "b")}
        if template is None
        else row
        if isinstance(row, dict)
        else {"messages": row}
    )
    sections = sections_of(tokenizer, tmp_path, [good, row], data=more)
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError) as error:
        here(make_config(**sections))
    rows = error.value.problems
    assert wanted in rows[0] and not any("\n" in problem for problem in rows), rows
    assert len(rows) == 1 or template is not None  # which may fail on both
    if template is None:
        assert "chat.jsonl: line 2" in rows[0]
    # nothing is complete, nothing was run
    assert {p.name for p in tmp_path.iterdir()} - before <= {".out.lock", "out"}
    out = tmp_path / "out"
    assert not out.exists() or not is_complete(read_manifest(out))


def test_a_tokenizer_or_source_that_cannot_serve_is_refused(tokenizer, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tokenizer / "tokenizer.json", bare)
    sections = sections_of(bare, tmp_path, [talk("a"), talk("b")])
    with pytest.raises(
        ConfigError, match=r"bare: has no chat template; name a Jinja file, data.chat_template$"
    ):
        here(make_config(**sections))
    sections = sections_of(tokenizer, tmp_path, [])
    cfg = make_config(**sections)
    here(cfg)
    with pytest.raises(ConfigError, match="holds no conversation to train on: all 2 were left out"):
        open_dataset(cfg)
    (tmp_path / "chat.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="chat.jsonl: holds no conversation$"):
        here(
            make_config(
                **{**sections, "data": {**sections["data"], "path": str(tmp_path / "other")}}
            )
        )
    (tmp_path / "tokenizer.model").write_bytes(
        train_tokenizer([words(i, 60) for i in range(30)], 300)
    )
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    import sentencepiece

    monkeypatch.delattr(sentencepiece.SentencePieceProcessor, "encode_as_offset_mapping")
    with pytest.raises(ConfigError, match="cannot say which characters a token stands for"):
        Chat(tmp_path)
    sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    with pytest.raises(
        ConfigError,
        match="adds a space before every text, and does not say whether after a special",
    ):
        Chat(tmp_path)


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"tokenizer": None}, "needs data.tokenizer"),
        ({"order": "growing"}, 'is incompatible with order = "growing"'),
        ({"document_mask": False}, "is implied by conversations"),
        ({"messages_field": None, "chat_template": "t", "format": "text"}, "renders conversations"),
        ({"format": "alpaca"}, 'is a column of format = "messages"'),
    ],
    ids=str,
)
def test_options_that_contradict_are_refused(options, wanted):
    given = {"messages_field": "messages", "tokenizer": "t", **options}
    with pytest.raises(ConfigError, match=wanted):
        make_config(data={key: value for key, value in given.items() if value is not None})
    assert make_config(data={"messages_field": "messages", "tokenizer": "t"}).data.document_mask


def test_another_template_is_other_data(chats, tokenizer):
    other = {**chats["data"], "chat_template": str(tokenizer / "chatml-prefixes.jinja")}
    with pytest.raises(ConfigError, match="was prepared with chat_template = "):
        open_dataset(make_config(**{**chats, "data": other}))
    text = {key: value for key, value in chats["data"].items() if key != "messages_field"}
    with pytest.raises(
        ConfigError, match="messages_field = 'messages', the configuration says absent"
    ):
        open_dataset(make_config(**{**chats, "data": text}))


def test_a_tokenizer_that_sees_special_tokens_elsewhere_is_refused(tokenizer, tmp_path):
    """Here one that lowers the case of a text before it looks for them."""
    made = json.loads((tokenizer / "tokenizer.json").read_text())
    made["normalizer"] = {"type": "Lowercase"}
    made["added_tokens"] = [{**token, "normalized": True} for token in made["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    chat = Chat(tmp_path)
    assert chat.encode(talk("a", "b"))[0]
    with pytest.raises(ConfigError, match="makes special tokens of other text than their names"):
        chat.encode(talk("<|IM_END|>", "b"))
