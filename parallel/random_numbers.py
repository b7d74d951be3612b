"""Seeds the random generators. Every random number of a run depends on run.seed and on its purpose."""

import hashlib

import torch

from parallel.mesh import World


def seed_generators(device: torch.device, *key: str | int) -> None:
    """Seeds the default generators of the CPU and of the device with the hash of a key."""
    text = "/".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1
    # torch.manual_seed() would seed all of the machine's devices, and format a stack trace each time.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_micro_batch(seed: int, step: int, number: int, world: World) -> None:
    """Call before each micro-batch.

    What the model draws in training, such as dropout, is then a function of (run.seed, step, number
    of the micro-batch, data-parallel rank). A resume repeats it, and draws in between do not change
    it. The tp and cp ranks of a data-parallel rank draw the same numbers. tp needs this for values
    that all of its ranks compute alike, or as partial sums.
    """
    seed_generators(world.device, seed, "step", step, "micro-batch", number, "rank", world.dp_rank)


def seed_update(seed: int, step: int, world: World) -> None:
    """Call before gradients are clipped. All ranks then draw the same numbers, so that replicas are
    updated alike. Noise for shards: docs/fork.md, Random numbers."""
    seed_generators(world.device, seed, "step", step, "update")
