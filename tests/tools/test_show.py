"""show prints the text that a step reads, document by document."""

import itertools
import re

import numpy as np
import pytest

from tests.conftest import run_tool
from tools import show
from tools.prepare.tokenizer import Tokenizer

HEADING = r"=== step 3, sample (\d+): epoch 0, window (\d+), tokens (\d+) to (\d+)\n"


@pytest.mark.quick
def test_the_text_of_each_sample_is_that_of_its_tokens(prepared, write_config, capsys):
    assert run_tool(show.main, write_config(), "--step", 3) == 0
    _, *samples = re.split(HEADING, capsys.readouterr().out)
    assert len(samples) == 8 * 5  # its heading's numbers, and the text
    tokenizer = Tokenizer(prepared)
    stored = np.fromfile(prepared / "train-00000.bin", "<u2")
    ends = np.fromfile(prepared / "train-00000.ends.bin", "<u8")
    for i in range(8):
        number, window, first, last = map(int, samples[5 * i : 5 * i + 4])
        assert (number, first, last) == (16 + i, 32 * window, 32 * window + 32)
        lines = []
        inside = ends[(ends > first) & (ends <= last)].tolist()
        for begin, end in itertools.pairwise([first, *inside, last + 1]):
            before = "" if begin in [0, *ends] else " (begins before)"
            after = "" if end in ends else " (continues)"
            lines.append(f"--- document, {end - begin} tokens{before}{after}")
            lines.append(tokenizer.decode(stored[begin:end].tolist()))
        assert samples[5 * i + 4] == "".join(f"{line}\n" for line in lines)
