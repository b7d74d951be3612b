"""Every random number of a run is a function of run.seed and of what it is drawn for."""

import hashlib

import torch

from parallel.mesh import World


def seed_of(*key: str | int) -> int:
    """A generator's seed, of 63 bits: the hash of what is drawn with it."""
    text = "/".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_micro_batch(seed: int, step: int, number: int, world: World) -> None:
    """Call before each micro-batch: seeds the default generators of the CPU and of the device.

    What the model draws in training, such as dropout, is then a function of (run.seed, step, number
    of the micro-batch, data-parallel rank): a resume repeats it, and nothing that draws in between
    changes it. The tp and cp ranks of a data-parallel rank draw the same numbers, as tp needs for
    what all of its ranks compute alike, or as partial sums.
    """
    key = seed_of(seed, "step", step, "micro-batch", number, "rank", world.dp_rank)
    # torch.manual_seed() would seed all of the machine's devices, and format a stack trace each time.
    torch.default_generator.manual_seed(key)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(key)
