"""Which sample at which step: permutations, mixtures, and the data of real runs, cut and resumed on other sizes."""

import itertools
import json
import math
import random
from fractions import Fraction

import pytest
import torch

import config
from config import LONGEST_PERIOD, ConfigError
from data.dataset import open_data
from data.loader import DIGEST_MODULUS, sample_digest
from data.mixture import Mixture, integer_weights
from data.order import Order, Permutation, SourceOrder, make_order, rank_samples
from data.prepare import prepare
from data.tokens import open_stream, window_count
from tests import cases
from tests.conftest import make_config, words

pytestmark = [pytest.mark.early, pytest.mark.slow, pytest.mark.quick]


def order_of(windows: list[int], mixture: object, seed: int) -> Order:
    """Of prepared sources with so many windows."""
    sources = [SourceOrder(seed, number, lambda window: window) for number in range(len(windows))]
    for source, count in zip(sources, windows):
        source.windows = count
    return Order(sources, mixture)


def test_a_window_has_a_target_for_its_last_token():
    """Of 32 tokens each: 64 tokens are one window, whose last target is the 33rd; 65 are two."""
    assert [window_count(tokens, 32) for tokens in (0, 1, 32, 33, 64, 65)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 64, 65, 100, 101, 1000, 4096, 20_011])
def test_permutation_is_a_bijection(n):
    for seed, epoch in [(0, 0), (0, 1), (7, 0)]:
        p = Permutation(n, seed, epoch)
        assert sorted(map(p, range(n))) == list(range(n))


def test_permutation_differs_by_seed_and_epoch():
    n = 1000
    orders = []
    for seed in range(5):
        orders += [tuple(map(Permutation(n, seed, epoch), range(n))) for epoch in range(5)]
    assert len(set(orders)) == 25
    # of two independent orders one place in n agrees on average: 1 of 1000, 25 * 24 / 2 pairs
    agree = sum(a == b for i, x in enumerate(orders) for y in orders[:i] for a, b in zip(x, y))
    assert abs(agree - 300) < 6 * math.sqrt(300)


def test_permutation_works_far_out():
    p = Permutation(10**15 + 37, 0, 0)
    found = {p(k) for k in range(1000)} | {p(p.n - 1 - k) for k in range(1000)}
    assert len(found) == 2000 and max(found) < p.n


@pytest.mark.parametrize("n", [10_007, 16_384])
def test_permutation_has_no_displacement_or_neighbour_correlation(n):
    order = list(map(Permutation(n, 1, 2), range(n)))
    # displacement p(k) - k of a random order has mean |.| n/3; its standard error is about 0.24 n / sqrt(n)
    mean = sum(abs(a - k) for k, a in enumerate(order)) / n
    assert abs(mean - n / 3) < 5 * 0.24 * math.sqrt(n)
    # the same for neighbours: |p(k+1) - p(k)|
    steps = [abs(a - b) for a, b in itertools.pairwise(order)]
    assert abs(sum(steps) / n - n / 3) < 5 * 0.24 * math.sqrt(n)
    assert sum(step == 1 for step in steps) < 12  # 2 expected
    x = torch.tensor(order, dtype=torch.float64)
    for lag in (1, 2, 3, 16, 128):
        correlation = torch.corrcoef(torch.stack([x[lag:], x[:-lag]]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(n)
    place = torch.corrcoef(torch.stack([x, torch.arange(n, dtype=torch.float64)]))[0, 1]
    assert abs(place) < 5 / math.sqrt(n)
    # eight by eight cells of (place, value): chi-squared with 49 degrees of freedom
    cells = torch.zeros(8, 8)
    for k, a in enumerate(order):
        cells[8 * k // n, 8 * a // n] += 1
    assert ((cells - n / 64) ** 2 / (n / 64)).sum() < 100


@pytest.mark.parametrize("ranks, micro", [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1)])
def test_ranks_share_a_step_among_them(ranks, micro):
    for step in (1, 2, 9):
        parts = [rank_samples(step, 12, micro, rank, ranks) for rank in range(ranks)]
        assert all(
            len(part) == 12 // (ranks * micro) and all(len(r) == micro for r in part)
            for part in parts
        )
        assert sorted(k for part in parts for r in part for k in r) == list(
            range((step - 1) * 12, step * 12)
        )


WEIGHTS = [
    [1],
    [3, 1],
    [0.7, 0.2, 0.1],
    [1, 1, 1],
    [1 / 6, 5 / 6],
    [0.5, 0.3, 0.1, 0.05, 0.03, 0.02],
    [10_000, 1],
    [random.Random(0).random() for _ in range(7)],
]


@pytest.mark.parametrize("shares", WEIGHTS, ids=str)
def test_mixture_is_true_to_its_weights_at_every_prefix(shares):
    mixture = Mixture(shares)
    exact = [Fraction(part, mixture.period) for part in mixture.weights]
    given = [Fraction(repr(weight)) / sum(Fraction(repr(w)) for w in shares) for weight in shares]
    assert all(abs(a - b) <= Fraction(1, LONGEST_PERIOD) for a, b in zip(exact, given))
    counts = [0] * len(shares)
    for number in range(min(3 * mixture.period, 40_000)):
        source, index = mixture(number)
        assert index == counts[source]
        counts[source] += 1
        for count, share in zip(counts, exact):
            assert abs(count - share * (number + 1)) < 1
    far = 10**15 * mixture.period
    assert mixture(far + 1)[1] == mixture(1)[1] + 10**15 * mixture.weights[mixture(1)[0]]


def test_of_one_source_a_sample_keeps_its_number():
    mixture = Mixture([0.3])
    numbers = (0, 1, 2, 10**15)
    assert [mixture(number) for number in numbers] == [(0, number) for number in numbers]


def test_weights_are_exact_where_they_can_be():
    assert integer_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert integer_weights([1 / 3, 2 / 3]) == [1, 2]
    assert integer_weights([30, 10]) == [3, 1]
    assert sum(integer_weights([0.123456789, math.pi, math.e])) == LONGEST_PERIOD
    shares = [0.25 + 0.6 / LONGEST_PERIOD, 0.25 + 0.1 / LONGEST_PERIOD, 0.5 - 0.7 / LONGEST_PERIOD]
    # what is cut off goes to the first, which lost most
    assert integer_weights(shares) == [16_385, 16_384, 32_767]
    with pytest.raises(ConfigError, match="a weight must be at least 1/65536 of the sum"):
        make_config(data={"sources": [{"source": "a", "weight": 1e-9}, {"source": "b"}]})


def test_every_sample_once_an_epoch_of_its_source():
    """Prime numbers of samples, in a mixture; three epochs of each."""
    windows = [101, 211, 7]
    order = order_of(windows, Mixture([2, 5, 1]), 3)
    seen: list[list[list[int]]] = [[[], [], []] for _ in windows]
    for number in range(3 * 101 * 8 // 2 + 8):
        # two of eight samples are the first source's, whose epochs are longest
        source, epoch, window = order(number)
        if epoch < 3:
            seen[source][epoch].append(window)
    for epochs, count in zip(seen, windows):
        assert (
            all(sorted(epoch) == list(range(count)) for epoch in epochs) and epochs[0] != epochs[1]
        )


def test_a_run_reads_on_as_earlier_versions_did():
    """Written down in November 2026: a run that a later version resumes must go on in the order in which it began, and
    digests of runs are compared. 40 bits of a sample's number and its tokens."""
    order = order_of([101, 7], Mixture([0.7, 0.3]), 3)
    assert [tuple(order(number)) for number in (0, 1, 2, 3, 4, 5, 100, 10**6)] == [
        (0, 0, 30),
        (0, 0, 85),
        (1, 0, 3),
        (0, 0, 22),
        (0, 0, 46),
        (1, 0, 4),
        (0, 0, 97),
        (0, 6930, 76),
    ]
    thirds = Mixture([1, 1, 1])  # of equal deadlines the first source's comes first
    assert [thirds(number) for number in range(6)] == [(k % 3, k // 3) for k in range(6)]
    far = Permutation(10**9 + 7, 5, 2, 1)
    assert [far(number) for number in (0, 1, 10**9)] == [293501951, 802955616, 794189453]
    assert (sample_digest(5, b"abc"), sample_digest(2**40, b"")) == (724713162302, 811618590936)
    assert max(sample_digest(number, b"") for number in range(99)) < 2**40


def test_sources_of_one_size_are_read_in_orders_of_their_own():
    order = order_of([50, 50], Mixture([1, 1]), 3)
    read: list[list[int]] = [[], []]
    for number in range(100):
        source, _, window = order(number)
        read[source].append(window)
    assert sorted(read[0]) == sorted(read[1]) == list(range(50)) and read[0] != read[1]


MIXED = {
    "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 24},
    "train": {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2},
    "optim": {"schedule_steps": 60, "warmup_steps": 2},
    "checkpoint": {
        "keep_last": 1,
        "allow_changed": ["train.micro_batch_size", "data.document_mask"],
    },
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, corpus) -> dict:
    """A mixture with a tokenizer of its own; the smaller source is read several times in 60 steps."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "small.jsonl").write_text(
        "".join(json.dumps({"text": words(-i, 8)}) + "\n" for i in range(1, 60))
    )
    sources = [
        {"source": str(corpus), "weight": 0.7},
        {"source": str(folder / "small.jsonl"), "weight": 0.3},
    ]
    sections = {**MIXED, "data": {"path": str(folder / "tokens"), "sources": sources}}
    prepare(make_config(**sections))
    return sections


def test_the_same_data_whatever_the_ranks_and_cuts(on_ranks, mixed, tmp_path):
    """60 steps, cut at random steps and resumed on 2, 1 and 4 processes, with and without a document mask, against a
    loop over the samples."""
    cfg = make_config(**mixed)
    streams = open_data(cfg, "train")
    order, expected = make_order(cfg, streams), []
    for step in range(60):
        digest = 0
        for number in range(8 * step, 8 * step + 8):
            source, _, window = order(number)
            digest += sample_digest(number, streams[source].read(window * 16, window * 16 + 17)[0])
        expected.append(digest % DIGEST_MODULUS)
    assert len(set(expected)) == 60
    assert max(order(number).epoch for number in range(8 * 60)) >= 3

    draw, sections = random.Random(0), mixed
    cuts = sorted(draw.sample(range(5, 55), 2))
    for ranks, micro, mask, steps in zip((2, 1, 4), (1, 2, 2), (False, True, True), [*cuts, 60]):
        sections = {
            **sections,
            "train": {**sections["train"], "micro_batch_size": micro},
            "data": {**sections["data"], "document_mask": mask},
        }
        found = on_ranks(ranks, cases.train_to, steps, sections, str(tmp_path))[0]
    assert [row["step"] for row in found] == list(range(1, 61))
    assert [row["batch_digest"] for row in found] == expected


def test_one_batch_of_samples_is_enough(prepared):
    def of(batch: int) -> config.Config:
        return make_config(train={"global_batch_size": batch, "micro_batch_size": 1})

    stream = open_stream(prepared, "train", 320)
    windows = window_count(stream.length, of(1).train.seq_len)
    make_order(of(windows), [stream])
    with pytest.raises(
        ConfigError, match=f"one batch of train.global_batch_size = {windows + 1} takes"
    ):
        make_order(of(windows + 1), [stream])


def test_a_mixture_needs_its_share_of_a_batch(mixed):
    cfg = make_config(**{**mixed, "train": {**MIXED["train"], "seq_len": 1000}})
    with pytest.raises(
        ConfigError, match="one batch of train.global_batch_size = 8 takes 2.4 of them"
    ):
        make_order(cfg, open_data(cfg, "train"))
