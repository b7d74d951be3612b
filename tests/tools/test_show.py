"""show prints the text that a step reads, document by document."""

import itertools
import re

import numpy as np
import pytest

from tests.conftest import make_config, run_tool
from tools import show
from tools.prepare.tokenizer import Tokenizer

pytestmark = pytest.mark.quick
HEADING = r"=== step 3, sample (\d+): epoch 0, window (\d+), tokens (\d+) to (\d+)\n"


def test_the_text_of_each_sample_is_that_of_its_tokens(corpus, prepared):
    cfg = make_config(data={"source": str(corpus), "path": str(prepared)})
    tokenizer = Tokenizer(prepared)
    stored = np.fromfile(prepared / "train-00000.bin", "<u2")
    ends = np.fromfile(prepared / "train-00000.ends.bin", "<u8")
    for number, text in enumerate(show.samples(cfg, 3), 16):
        match = re.match(HEADING, text)
        assert match, text
        sample, window, first, last = map(int, match.groups())
        assert (sample, first, last) == (number, 32 * window, 32 * window + 32)
        lines = []
        inside = ends[(ends > first) & (ends <= last)].tolist()
        for begin, end in itertools.pairwise([first, *inside, last + 1]):
            before = "" if begin in [0, *ends] else " (begins before)"
            after = "" if end in ends else " (continues)"
            lines.append(f"--- document, {end - begin} tokens{before}{after}")
            lines.append(tokenizer.decode(stored[begin:end].tolist()))
        assert text[match.end() :] == "\n".join(lines)
    assert number == 23


def test_steps_count_from_one(write_config, capsys):
    assert run_tool(show.main, write_config(), "--step", 0) == 2
    assert "--step 0: steps count from 1" in capsys.readouterr().err
