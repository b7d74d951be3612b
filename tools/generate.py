"""Sample text from a checkpoint, or from a run's newest one, with the tokenizer in its folder.

    ./run_train.sh -m generate outputs/tiny --prompt "def " --tokens 64

Shapes: T tokens, S cached positions, K key/value heads, E head dimension, V vocabulary.
"""

import argparse
import json
import math
import pathlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

import config
from checkpoint import compare, load, newest
from config import ConfigError, run_tool
from model.attention import BlockMask, attention
from model.build import meta_model
from model.llama import Llama
from parallel.fsdp import cast_residual_stream, unit_dtypes, unit_parameters, units
from parallel.materialize import initialize_buffers, materialize
from parallel.mesh import has_native_bfloat16
from system import print_error, printable
from tools.prepare.tokenizer import Tokenizer


class KVCache:
    """The keys and values of one block so far. attend() takes the place of Attention.attend for a
    forward pass.

    It is valid for the model's attention without a mask, once a block. A fork's attend(), or its
    mask, may read more than a new token's query, or less than all keys.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        """attend: that of the block."""
        self.block_attend = attend
        self.calls = 0  # in this pass
        self.is_valid = False  # in this pass
        self.keys: Tensor | None = None  # (1, K, S, E)
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Attention of new tokens to all so far: those of the prompt, or a single one."""
        self.calls += 1
        self.is_valid = self.calls == 1 and mask is None and self.block_attend is attention
        if self.is_valid:
            if self.keys is not None and self.values is not None:
                k = torch.cat([self.keys, k], dim=2)
                v = torch.cat([self.values, v], dim=2)
            self.keys = k
            self.values = v
        return self.block_attend(q, k, v, mask)


@torch.no_grad()
def generate(
    model: Llama,
    prompt: list[int],
    count: int,
    context: int,
    device: torch.device,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """Yields the next token `count` times; the caller may stop early. The prompt must not be empty.

    The model is a plain one. Of a longer prompt it reads the newest `context` tokens. Text that
    outgrows them restarts at position 0 with its newest half. Where a cache is not valid, or its
    first new token gets other logits than a pass over the whole text gives, each token reruns the
    whole text: a fork may mix tokens outside attention.
    """
    tokens = list(prompt[-context:])  # that the model attends to: of a long prompt the newest
    first = 0  # position of the first one that it has not seen yet
    uses_cache: bool | None = None  # unknown until its first new token is compared
    caches: list[KVCache] = []
    draws = random.Random(seed)
    for _ in range(count):
        if len(tokens) > context:
            tokens = tokens[-((context + 1) // 2) :]
            first = 0
        cached = cached_pass(model, tokens, first, caches, device) if first else None
        logits = cached if uses_cache and all(cache.is_valid for cache in caches) else None
        if logits is None:
            caches = [KVCache(block.attention.attend) for block in model.blocks]
            logits = cached_pass(model, tokens, 0, caches, device)
            if cached is not None:
                uses_cache = is_near(cached, logits)
        is_valid = uses_cache is not False and all(cache.is_valid for cache in caches)
        first = len(tokens) if is_valid else 0
        tokens.append(choose(logits, temperature, draws.random()))
        yield tokens[-1]


def cached_pass(
    model: Llama, tokens: list[int], first: int, caches: list[KVCache], device: torch.device
) -> Tensor:
    """The logits (V) of the last token, by a forward pass over the tokens from `first` on."""
    positions = torch.arange(first, len(tokens), device=device)[None]  # (1, T)
    new = torch.tensor([tokens[first:]], device=device)
    attends = [block.attention.attend for block in model.blocks]
    for block, cache in zip(model.blocks, caches, strict=True):
        cache.calls = 0
        cache.is_valid = False
        block.attention.attend = cache.attend
    try:
        return model(new, positions=positions)[0, -1]
    finally:
        for block, attend in zip(model.blocks, attends, strict=True):
            block.attention.attend = attend


def is_near(cached: Tensor, logits: Tensor) -> bool:
    """Whether logits (V) differ by no more than rounding does, in the model's dtype."""
    bound = max(1e-4, 4 * torch.finfo(logits.dtype).eps)  # relative to their spread
    spread = logits.double() - logits.double().mean()
    return bool((cached.double() - logits.double()).norm() <= bound * spread.norm())


def choose(logits: Tensor, temperature: float, draw: float) -> int:
    """A token by its logits (V): the likeliest at temperature 0, else as `draw` from [0, 1) says.

    On the host, in float64: equal on every device. Raises ConfigError for non-finite logits.
    """
    if not logits.amax().isfinite():
        raise ConfigError("the model's output is not finite")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.cpu().double()
    # subtracting the maximum first: no temperature makes a logit +inf
    cumulative = ((logits - logits.amax()) / temperature).softmax(0).cumsum(0)  # (V)
    index = torch.searchsorted(cumulative, draw * cumulative[-1], right=True)
    return min(int(index), len(cumulative) - 1)


def encode(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, after BOS if the tokenizer has one. Raises ConfigError if there are
    none."""
    ids = [*tokenizer.bos, *tokenizer.encode([prompt])[0]]
    if not ids:
        raise ConfigError("--prompt: is empty, and the tokenizer has no BOS token to start from")
    return ids


# The tool


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m generate", description=__doc__.splitlines()[0]
    )
    # one line, as every error here
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="CKPT_OR_RUN")
    parser.add_argument("--prompt", metavar="TEXT", required=True)
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="at most")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws")
    parser.add_argument(
        "--base",
        metavar="HF_DIR",
        help="of adapters: where their base lies now; default: as trained",
    )
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: must be at least 1")
    if not 0 <= args.temperature < math.inf:
        parser.error(f"--temperature {args.temperature}: must be at least 0, and finite")
    return args


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """A checkpoint's tokenizer. In an imported folder several tokens may end a text."""
    tokenizer = Tokenizer(folder)
    settings = folder / "generation_config.json"
    if settings.is_file():
        eos = json.loads(settings.read_bytes()).get("eos_token_id")
        tokenizer.eos = [*tokenizer.eos, *(eos if isinstance(eos, list) else [eos])]
    return tokenizer


def load_model(folder: pathlib.Path, cfg: config.Config, device: torch.device) -> Llama:
    """A checkpoint's model, with the dtypes in which training evaluates it. Raises ConfigError."""
    if cfg.lora:  # the checkpoint stores the adapters alone
        model = load_base(folder, cfg, device)
    else:
        with device:
            model = Llama(cfg.model)
        initialize_buffers(model, cfg.run.seed)
    load.restore(folder, model, None)
    # the logits of the newest token alone
    model.head.register_forward_pre_hook(lambda head, args: (args[0][:, -1:], *args[1:]))
    p = cfg.parallel
    if not has_native_bfloat16(device):  # emulated, it is ten times slower
        p = replace(p, param_dtype="float32", output_dtype=None)
    elif p.param_dtype == "auto":  # imported weights, which were never trained
        p = replace(p, param_dtype="bfloat16")
    for name, modules in units(model):
        dtype, _ = unit_dtypes(p, name)
        for parameter in unit_parameters(modules):
            if parameter.is_floating_point():  # as FSDP2: buffers stay as they are
                parameter.data = parameter.to(dtype)
    cast_residual_stream(model, p)
    return model.eval()


def load_base(folder: pathlib.Path, cfg: config.Config, device: torch.device) -> Llama:
    """A model with the base weights of a checkpoint's adapters. Raises ConfigError if they are not
    those that the adapters were trained on."""
    from extras.huggingface.weights import fingerprint, weights_to_read

    base = weights_to_read(cfg, step=1)
    assert base and base.sums is not None  # as adapters have a base
    model = meta_model(cfg.model, cfg.lora)
    materialize(model, cfg.run.seed, device, base.read_into)
    compare.check_base(folder, cfg.model.init_from, fingerprint([base.sums]))
    return model


def print_stream(tokenizer: Tokenizer, ids: list[int], steps: Iterator[int]) -> None:
    """Prints the text as it grows, up to the first EOS token."""
    ids = list(ids)
    written = 0  # characters
    try:
        while True:
            # hold back an incomplete UTF-8 character, which decodes as this one
            text = tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
            print(printable(text[written:]), end="", flush=True)
            written = len(text)
            token = next(steps, None)
            if token is None or token in tokenizer.eos:
                break
            ids.append(token)
    finally:
        print(printable(tokenizer.decode(ids)[written:]), flush=True)


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    return newest.read_newest(args.checkpoint, lambda folder: sample(folder, args))


def sample(folder: pathlib.Path, args: argparse.Namespace) -> int:
    cfg = newest.read_config(folder, args.base)
    context = cfg.train.seq_len
    tokenizer = load_tokenizer(folder)
    ids = encode(tokenizer, args.prompt)
    if max(ids) >= cfg.model.vocab_size:
        raise ConfigError(f"--prompt: has id {max(ids)}, and the model {cfg.model.vocab_size}")
    if len(ids) > context:
        print_error(
            f"--prompt: has {len(ids):,} tokens, of which the model reads the newest {context:,} "
            "(train.seq_len)"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a single process is intended
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    model = load_model(folder, cfg, device)
    steps = generate(model, ids, args.tokens, context, device, args.temperature, args.seed)
    # for characters that the terminal's encoding lacks
    # pyrefly: ignore[missing-attribute]  # typeshed declares a TextIO, which lacks it
    sys.stdout.reconfigure(errors="backslashreplace")
    print_stream(tokenizer, ids, steps)
    return 0


if __name__ == "__main__":
    run_tool(main)
