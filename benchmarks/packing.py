"""How full the windows of conversations are, and what planning them takes.

    python -m benchmarks.packing --conversations 10_000_000 --seq-len 2048 8192

Lengths are lognormal, with a median of 450 tokens and sigma 1 (a mean of 742), at least 8; longer ones are cut.
"""

import argparse
import math
import resource
import sys
import time

import numpy as np

from benchmarks import count
from extras.chat.packing import pack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=count, default=10_000_000)
    parser.add_argument("--seq-len", type=count, nargs="+", default=[2048, 8192])
    args = parser.parse_args()
    lengths = (
        np.random.default_rng(0)
        .lognormal(math.log(450), 1.0, args.conversations)
        .astype(np.int64)
        .clip(8)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for room in args.seq_len:
        cut = np.minimum(lengths, room)
        began, processor = time.perf_counter(), time.process_time()
        _, starts = pack(cut, room, seed=0)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
        windows = len(starts) - 1
        print(
            f"{args.conversations:,} conversations, {(lengths > room).mean():.1%} of them cut, in {windows:,} "
            f"windows of {room:,} tokens, {cut.sum() / (room * windows):.3%} full; planned in {seconds:.1f} s, "
            f"{processor:.1f} of a core; peak resident memory grew by {grown:.0f} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
