"""show prints the text that a step reads, document by document."""

import itertools
import re

import numpy as np
import pytest

from tests.conftest import make_config, run_tool
from tools import show
from tools.prepare.tokenizer import Tokenizer

pytestmark = pytest.mark.quick

DATA_OF = re.compile(r"=== step 3, sample (\d+): epoch 0, window (\d+), tokens (\d+) to (\d+)")


def test_the_text_of_each_sample_is_that_of_its_tokens(corpus, prepared):
    cfg = make_config(data={"source": str(corpus), "path": str(prepared)})
    tokenizer = Tokenizer(prepared)
    stored = np.fromfile(prepared / "train-00000.bin", "<u2")
    ends = np.fromfile(prepared / "train-00000.ends.bin", "<u8")
    numbers = []
    for text in show.samples(cfg, 3):
        heading, *lines = text.split("\n")
        match = DATA_OF.fullmatch(heading)
        assert match, heading
        number, window, first, last = map(int, match.groups())
        numbers.append(number)
        assert (first, last) == (32 * window, 32 * window + 32)
        inside = ends[(ends > first) & (ends <= last)].tolist()
        borders = [first, *inside, last + 1]
        for i, (begin, end) in enumerate(itertools.pairwise(borders)):
            line = f"--- document, {end - begin} tokens"
            if begin not in [0, *ends]:
                line += " (begins before)"
            if end not in ends:
                line += " (continues)"
            assert lines[2 * i] == line
            assert lines[2 * i + 1] == tokenizer.decode(stored[begin:end].tolist())
        assert len(lines) == 2 * (len(borders) - 1)
    assert numbers == [*range(16, 24)]


def test_steps_count_from_one(write_config, capsys):
    assert run_tool(show.main, write_config(), "--step", 0) == 2
    assert "--step 0: steps count from 1" in capsys.readouterr().err
