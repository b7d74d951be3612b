"""Which window of which source each sample is, against a model that keeps whole lists."""

import itertools
import random
from fractions import Fraction

import pytest

from config import LONGEST_PERIOD
from data.order import Mixture, WindowOrder, integer_weights
from tests.conftest import make_config, refuses
from tests.data import order_model

SMALL = [(windows + 1, 1) for windows in (1, 2, 3, 5, 64, 65, 1000, 4096)]
LARGE = [(64, 32), (65, 32), (65_537, 257), (1 << 22, 10_000), (1_900_000_000, 2_999_999)]


@pytest.mark.quick
@pytest.mark.parametrize("tokens, seq_len", SMALL + LARGE)
def test_three_epochs_are_those_of_the_model(tokens, seq_len):
    for seed, epoch in itertools.product((0, 7), range(3)):
        ours = WindowOrder(seed, 3, seq_len, tokens)
        every = [*range(ours.epoch_length)]
        expected = order_model.epoch_order(tokens, seq_len, seed, epoch, 3)
        located = [ours.locate(epoch * len(every) + i) for i in every]
        assert located == [(3, epoch, window) for window in expected]
        assert sorted(expected) == every and (expected != every or len(every) < 6)


SEVEN = [random.Random(0).random() for _ in range(7)]
WEIGHTS = [[1], [3, 1], [0.7, 0.2, 0.1], [1, 1, 1], [1 / 6, 5 / 6], [10_000, 1], SEVEN]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_each_prefix_of_a_mixture_has_its_weights(weights):
    mixture = Mixture(weights)
    total = sum(Fraction(repr(weight)) for weight in weights)
    shares = [Fraction(weight, mixture.period) for weight in mixture.weights]
    for share, weight in zip(shares, weights):
        assert abs(share - Fraction(repr(weight)) / total) <= Fraction(1, LONGEST_PERIOD)
    counts = [0] * len(weights)
    for number in range(min(3 * mixture.period, 40_000)):
        source, index = mixture(number)
        assert index == counts[source] == mixture.count(source, number)
        counts[source] += 1
        for count, share in zip(counts, shares):
            assert abs(count - share * (number + 1)) < 1


@pytest.mark.quick
def test_weights_are_exact_where_they_can_be():
    assert integer_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert integer_weights([1 / 3, 2 / 3]) == [1, 2]
    # 13,113.36, 19,686.42 and 32,736.22 of 65,536: rounded down one is missing, and the second lost most
    assert integer_weights([20_010, 30_040, 49_953]) == [13_113, 19_687, 32_736]
    with refuses("a weight must be at least 1/65536 of the sum"):
        make_config(data={"sources": [{"source": "a", "weight": 1e-9}, {"source": "b"}]})
