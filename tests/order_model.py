"""A naive model of the data order and the hold-out rule, written from data.md alone.

It keeps whole lists where the real program needs a closed form, and is meant to be read.
Functions look the borders up when they are called, so that a test may shrink them.
"""

import hashlib

FIRST_BORDER = 2**20  # also the part of the text whose last hundredth may be held out
LAST_DOUBLED = 2**29  # borders double up to this one; it has to be FIRST_BORDER * 2**m
BORDER_STEP = 2**28  # the distance of the borders behind it
VALIDATION_BORDER = 2**24  # growing: documents from this train token on are not held out

ROUNDS = 8
MASK64 = 2**64 - 1


def mix(x):
    """Return splitmix64's finalizer of `x`."""
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & MASK64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & MASK64
    x ^= x >> 31
    return x


def permute(n, key_text, index):
    """Return P(n, key) of `index`: a bijection of 0 ... n-1, by a Feistel network."""
    if not 0 <= index < n:
        raise ValueError(f"index {index} is not in 0 ... {n - 1}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = 2**half - 1
    digest = hashlib.blake2b(key_text.encode("utf-8"), digest_size=64).digest()
    keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "big") for r in range(ROUNDS)]
    while True:
        left, right = index >> half, index & low
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & low)
        index = (left << half) | right
        if index < n:
            return index


def border(i):
    """Return border `i`, the number of tokens before it; the first border is number 0."""
    position = FIRST_BORDER
    for _ in range(i):
        position += position if position < LAST_DOUBLED else BORDER_STEP
    return position


def held_out_range(train_tokens):
    """Return (first, end) of the tokens of train.bin held out where no document is."""
    n = min(FIRST_BORDER, train_tokens)
    return n - max(2, n // 100), n


def training_windows(train_tokens, seq_len, excluded):
    """Return the windows to train on, as file numbers k; list position = training number.

    Window k is tokens k S ... k S + S. Those that hold a token of `excluded`, None or
    (first, end), are left out, and the windows behind them take their numbers.
    """
    windows = []
    for k in range(max(0, (train_tokens - 1) // seq_len)):
        first, last = k * seq_len, k * seq_len + seq_len
        if excluded is None or last < excluded[0] or first >= excluded[1]:
            windows.append(k)
    return windows


def segments(train_tokens, seq_len, excluded):
    """Return each segment's training windows; a segment without windows is an empty list."""
    windows = training_windows(train_tokens, seq_len, excluded)
    result = []
    begin = end = 0
    while end < train_tokens:
        begin, end = end, min(border(len(result)), train_tokens)
        # Window k needs the first k S + S + 1 tokens.
        result.append([k for k in windows if begin < k * seq_len + seq_len + 1 <= end])
    return result


def permuted(windows, key_text):
    """Return `windows` in the order of P: position j holds the window number P(j)."""
    return [windows[permute(len(windows), key_text, j)] for j in range(len(windows))]


def global_epoch(train_tokens, seq_len, seed, source, excluded, epoch):
    """Return the windows of one epoch that is permuted over everything."""
    windows = training_windows(train_tokens, seq_len, excluded)
    return permuted(windows, f"{seed}/{epoch}/{source}")


def growing_first_epoch(train_tokens, seq_len, seed, source, excluded):
    """Return the windows of order growing's epoch 0: segment after segment, each permuted."""
    order = []
    for i, windows in enumerate(segments(train_tokens, seq_len, excluded)):
        order += permuted(windows, f"{seed}/0/{source}/{i}")
    return order


def take(count, epoch_order):
    """Return samples 0 ... count-1 as (epoch, window); `epoch_order` lists an epoch's windows."""
    samples = []
    epoch = 0
    while len(samples) < count:
        windows = epoch_order(epoch)
        if not windows:
            raise ValueError("the text has no window to train on")
        samples += [(epoch, window) for window in windows]
        epoch += 1
    return samples[:count]


def global_samples(train_tokens, seq_len, seed, source, excluded, count):
    """Return samples 0 ... count-1 of order "global" as (epoch, window)."""
    text = (train_tokens, seq_len, seed, source, excluded)
    return take(count, lambda epoch: global_epoch(*text, epoch))


def growing_samples(train_tokens, seq_len, seed, source, excluded, count):
    """Return samples 0 ... count-1 of order "growing" as (epoch, window)."""
    text = (train_tokens, seq_len, seed, source, excluded)
    return take(
        count,
        lambda epoch: growing_first_epoch(*text) if epoch == 0 else global_epoch(*text, epoch),
    )


def held_out_by_hash(text):
    """Return whether the digest of a document's text selects it for validation."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 == 99


def split(documents, growing):
    """Return (train ids, held-out ids) of (text, ids) pairs; ids include BOS and EOS.

    With `growing`, a document is held out only if it would begin before train token
    VALIDATION_BORDER. If no ids are held out, `held_out_range` says what is instead.
    """
    train, held_out = [], []
    for text, ids in documents:
        may_be_held_out = not growing or len(train) < VALIDATION_BORDER
        if may_be_held_out and held_out_by_hash(text):
            held_out += ids
        else:
            train += ids
    return train, held_out


def reading_order(names):
    """Return the names within a source in the order that growing reads the files."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode("utf-8")).digest())
