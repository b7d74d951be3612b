"""Windows of conversations: best-fit decreasing, read in full, learned as transformers would, the same on any ranks."""

import hashlib
import itertools
import random
from typing import Any

import numpy as np
import pytest

import config
from data.dataset import PreparedDataset
from data.folder import manifest_of
from extras.chat.packing import Packed, document_ends, pack
from tests.conftest import make_config, refuses
from tests.tools.prepare.chat.conftest import conversations, prepare_here, sections_of, talk


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
    for room, count in itertools.product((1, 7, 64, 100), (1, 2, 50, 400)):
        lengths = np.array([draw.randint(1, room) for _ in range(count)])
        members, starts = pack(lengths, room, seed=3)
        assert sorted(members.tolist()) == [*range(count)]  # each once
        assert len(starts) - 1 == best_fit_decreasing(lengths.tolist(), room)
        assert max(lengths[members[a:b]].sum() for a, b in itertools.pairwise(starts)) <= room


def test_conversations_of_one_length_stand_in_the_order_of_a_hash():
    """splitmix64 of (seed, number), in Python's integers: a run that resumes reads the same windows
    whatever numpy's version."""

    def splitmix64(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    for seed in (0, 7):
        digest = hashlib.blake2b(f"packing {seed}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        hashes = [splitmix64((number + key) % 2**64) >> 24 for number in range(1009)]
        lengths = np.full(1009, 5)
        lengths[::3] = 4  # shorter ones follow
        order = sorted(range(1009), key=lambda i: (-lengths[i], hashes[i]))
        members, starts = pack(lengths, 5, seed)
        assert members.tolist() == order and starts.tolist() == [*range(1010)]


@pytest.fixture(scope="module")
def chats(tokenizer, tmp_path_factory) -> dict[str, Any]:
    """The sections of a run on 120 conversations, prepared; some are held out by their hash."""
    folder = tmp_path_factory.mktemp("chats")
    given = conversations(120)
    sections = sections_of(tokenizer, folder, given, data={"validation": None}, eval={})
    prepare_here(make_config(**sections))
    return sections


def packed_of(cfg: config.Config) -> Packed:
    stream = PreparedDataset(cfg).sources[0].stream
    assert isinstance(stream, Packed)
    return stream


def test_a_window_has_each_conversation_with_what_follows_from_it(chats):
    cfg = make_config(**chats)
    dataset = PreparedDataset(cfg)
    packed = packed_of(cfg)
    heldout = dataset.sources[0].validation
    assert isinstance(heldout, Packed) and len(heldout.members) > 2
    assert len(packed.members) + len(heldout.members) == 120
    assert dataset.notes() == [packed.summary()]
    ids_of = [packed.read(128 * window, 128 * window + 129) for window in range(packed.windows)]
    numbers = []
    for window, ids in enumerate(ids_of):
        start = 128 * window
        *documents, (filled, end) = packed.documents(start, start + 129)
        assert len(ids) == 129 and end == start + 129 and filled <= start + 128
        assert (ids[filled - start :] == -1).all()
        for (begin, past), member in zip(documents, packed.conversations(window), strict=True):
            stored = packed.stream.read(member.begin, member.end)
            assert (ids[begin - start : past - start] == stored).all()
            numbers.append(member.number)
    assert sorted(numbers) == [*range(len(packed.members))]
    tokens = np.concatenate(ids_of)[np.concatenate(ids_of) != -1]
    assert len(tokens) == packed.filled
    assert f"{(tokens >= 0).mean():.0%} of the tokens" in packed.summary()


@pytest.mark.quick
def test_stored_ids_are_those_of_transformers_complemented_without_a_loss(
    tokenizer, theirs, tmp_path
):
    given = conversations(24)
    cfg = make_config(**sections_of(tokenizer, tmp_path, given))
    prepare_here(cfg)
    stream = packed_of(cfg).stream
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    rendered = [theirs.apply_chat_template(messages, **options) for messages in given]
    pairs = [zip(made["input_ids"], made["assistant_masks"]) for made in rendered]
    expected = [[token if learned else ~token for token, learned in pair] for pair in pairs]
    assert stream.read(0, stream.length).tolist() == [*itertools.chain(*expected)]
    assert document_ends(stream).tolist() == [*itertools.accumulate(map(len, expected))]


def test_of_few_conversations_the_last_are_held_out_whole(tokenizer, tmp_path, monkeypatch):
    """Where no conversation is held out by its hash."""
    monkeypatch.setattr("tools.prepare.chat.conversations.is_held_out", lambda text: False)
    given = conversations(60)
    cfg = make_config(**sections_of(tokenizer, tmp_path, given, data={"validation": None}, eval={}))
    tokens = manifest_of(prepare_here(cfg))["tokens"]
    assert 2 <= tokens["heldout"] < sum(tokens.values()) // 10
    held = PreparedDataset(cfg).sources[0].validation
    assert isinstance(held, Packed) and held.ends[-1] == tokens["heldout"]
    assert len(held.members) + len(packed_of(cfg).members) == 60


def test_a_source_without_a_conversation_to_learn_is_refused(tokenizer, tmp_path):
    cfg = make_config(**sections_of(tokenizer, tmp_path, [talk("a"), talk("b")]))
    prepare_here(cfg)
    with refuses("holds no conversation to train on: 2 were left out"):
        PreparedDataset(cfg)


def test_what_says_nothing_is_left_out_and_counted_as_what_is_cut(tokenizer, tmp_path):
    rows = [talk("a"), talk("a", ""), talk("a", " \n"), [], *conversations(30)]
    sections = sections_of(tokenizer, tmp_path, rows)
    cfg = make_config(**{**sections, "train": {**sections["train"], "seq_len": 24}})
    manifest = manifest_of(prepare_here(cfg))
    packed = packed_of(cfg)
    assert manifest["left_out"] == 4 and len(packed.members) == 30 and packed.cut > 5
    assert f"{packed.cut} cut at a window's end; 4 left out" in packed.summary()
    for window in range(packed.windows):  # cut at its end: begins with its first token
        assert packed.read(24 * window, 24 * window + 25)[0] == ~1


@pytest.mark.parametrize("option", ["chat_template", "messages_field"])
def test_another_template_or_format_is_other_data(chats, tokenizer, option):
    data = {**chats["data"], "format": "messages"}
    data[option] = str(tokenizer / "chatml-bare.jinja") if option == "chat_template" else "talk"
    with refuses(f"prepared with data.{option} = "):
        PreparedDataset(make_config(**{**chats, "data": data}))


def test_show_marks_what_has_a_loss(chats):
    show = pytest.importorskip("tools.show")
    text = "\n".join(show.samples(make_config(**chats), 1))
    assert text.count("=== step 1, sample") == 4 and "--- conversation " in text
    assert "<|im_start|>assistant\n«" in text and "«<|im_start|>" not in text
    assert "<|im_end|>»\n<|im_start|>" in text
