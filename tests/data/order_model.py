"""The order of one source, from docs/data.md ("The order, exactly") alone: whole lists where the
trainer has a closed form."""

import hashlib


def epoch_order(tokens: int, seq_len: int, seed: int, epoch: int, source: int) -> list[int]:
    """The windows of an epoch in the order in which a run reads them."""
    windows = (tokens - 1) // seq_len
    return [permuted(j, windows, f"{seed}/{epoch}/{source}/0") for j in range(windows)]


def permuted(j: int, n: int, key: str) -> int:
    """P(j)."""
    digest = hashlib.blake2b(key.encode(), digest_size=64).digest()
    h = max(1, -(-(n - 1).bit_length() // 2))
    while True:
        left, right = divmod(j, 2**h)
        for r in range(8):
            x = right ^ int.from_bytes(digest[8 * r : 8 * r + 8], "big")
            x ^= x >> 30
            x = x * 0xBF58476D1CE4E5B9 % 2**64
            x ^= x >> 27
            x = x * 0x94D049BB133111EB % 2**64
            x ^= x >> 31
            left, right = right, left ^ x % 2**h
        j = left * 2**h + right
        if j < n:
            return j
