"""Sample text from a checkpoint, or from a run's newest one, with the tokenizer in its folder.

    ./run_train.sh -m generate outputs/tiny --prompt "def " --tokens 64

Shapes: T tokens, S cached positions, K key/value heads, E head dimension, V vocabulary.
"""

import argparse
import contextlib
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
    """The cached keys and values of one block. attend() replaces Attention.attend during a forward
    pass.

    The cache is valid if the block calls the model's attention() once, without a mask. A fork's
    attend() or mask may read more than a new token's query, or not all keys.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        """attend: the block's Attention.attend."""
        self.block_attend = attend
        self.calls = 0  # in the current pass
        self.is_valid = False  # in the current pass
        self.keys: Tensor | None = None  # (1, K, S, E)
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Attention of the new tokens to all tokens so far. The new tokens are the prompt, or a
        single token."""
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

    The model is not sharded. It reads the newest `context` tokens of a longer prompt. When the text
    outgrows the context, its newest half restarts at position 0.

    A fork may mix tokens outside attention. So this compares the first cached logits with a pass
    over the full text. If they differ, or a cache is not valid, each token reruns the full text.
    """
    tokens = list(prompt[-context:])  # the tokens that the model attends to
    first = 0  # position of the first token that is not in the caches
    uses_cache: bool | None = None  # None until the first cached logits have been compared
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
    """The logits (V) of the last token, from a forward pass over the tokens from `first` on."""
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
    """Whether two logits (V) differ by no more than rounding in the model's dtype."""
    bound = max(1e-4, 4 * torch.finfo(logits.dtype).eps)  # relative to the spread
    spread = logits.double() - logits.double().mean()
    return bool((cached.double() - logits.double()).norm() <= bound * spread.norm())


def choose(logits: Tensor, temperature: float, draw: float) -> int:
    """Samples a token by its logits (V) and the random number `draw` in [0, 1). Temperature 0
    returns the most likely token.

    Samples on the CPU in float64, so that the result is equal on every device. Raises ConfigError
    if the logits are not finite.
    """
    if not logits.amax().isfinite():
        raise ConfigError("the model's output is not finite")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.cpu().double()
    # subtract the maximum first, so that a small temperature makes no logit +inf
    cumulative = ((logits - logits.amax()) / temperature).softmax(0).cumsum(0)  # (V)
    index = torch.searchsorted(cumulative, draw * cumulative[-1], right=True)
    return min(int(index), len(cumulative) - 1)


def encode(tokenizer, prompt: str) -> list[int]:
    """The token ids of a prompt, with BOS in front if the tokenizer has one. Raises ConfigError if
    there are no ids."""
    ids = [*tokenizer.bos, *tokenizer.encode([prompt])[0]]
    if not ids:
        raise ConfigError("--prompt: is empty, and the tokenizer has no BOS token to start from")
    return ids


# The tool


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m generate", description=__doc__.splitlines()[0]
    )
    # print one line, like all other errors here
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="CKPT_OR_RUN")
    parser.add_argument("--prompt", metavar="TEXT", required=True)
    parser.add_argument("--tokens", type=int, default=128, help="at most; default: 128")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy; default: 0.8")
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
    """A checkpoint's tokenizer. Adds the EOS tokens in an imported generation_config.json, and the end
    of turn of the chat template."""
    tokenizer = Tokenizer(folder)
    if (folder / "chat_template.jinja").is_file():
        with contextlib.suppress(ConfigError, ImportError):  # a template that cannot be rendered
            from tools.prepare.chat.conversations import Chat

            tokenizer.eos = [*tokenizer.eos, *Chat(folder).end_of_turn()]
    settings = folder / "generation_config.json"
    if settings.is_file():
        eos = json.loads(settings.read_bytes()).get("eos_token_id")
        tokenizer.eos = [*tokenizer.eos, *(eos if isinstance(eos, list) else [eos])]
    return tokenizer


def load_model(folder: pathlib.Path, cfg: config.Config, device: torch.device) -> Llama:
    """A checkpoint's model, in the dtypes that validation uses. Raises ConfigError."""
    if cfg.lora:  # the checkpoint stores only the adapters
        model = load_base(folder, cfg, device)
    else:
        with device:
            model = Llama(cfg.model)
        initialize_buffers(model, cfg.run.seed)
    load.restore(folder, model, None)
    # compute the logits of only the newest token
    model.head.register_forward_pre_hook(lambda head, args: (args[0][:, -1:], *args[1:]))
    p = cfg.parallel
    if not has_native_bfloat16(device):  # emulation is ten times slower
        p = replace(p, param_dtype="float32", output_dtype=None)
    elif p.param_dtype == "auto":  # imported weights have no dtype of training
        p = replace(p, param_dtype="bfloat16")
    for name, modules in units(model):
        dtype, _ = unit_dtypes(p, name)
        for parameter in unit_parameters(modules):
            if parameter.is_floating_point():  # like FSDP2, leaves buffers unchanged
                parameter.data = parameter.to(dtype)
    cast_residual_stream(model, p)
    return model.eval()


def load_base(folder: pathlib.Path, cfg: config.Config, device: torch.device) -> Llama:
    """A model with the base weights for a checkpoint's adapters. Raises ConfigError if the adapters
    were trained on other weights."""
    from extras.huggingface.weights import fingerprint, weights_to_read

    base = weights_to_read(cfg, step=1)
    assert base and base.sums is not None  # adapters always have a base
    model = meta_model(cfg.model, cfg.lora)
    materialize(model, cfg.run.seed, device, base.read_into)
    compare.check_base(folder, cfg.model.init_from, fingerprint([base.sums]))
    return model


def print_stream(tokenizer: Tokenizer, ids: list[int], steps: Iterator[int]) -> None:
    """Prints the text while it is generated, up to the first EOS token."""
    ids = list(ids)
    written = 0  # characters
    try:
        while True:
            # hold back an incomplete UTF-8 character, which decodes to U+FFFD
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
    if len(ids) > context:
        print_error(
            f"--prompt: has {len(ids):,} tokens, of which the model reads the newest {context:,} "
            "(train.seq_len)"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # this tool needs only a single process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    model = load_model(folder, cfg, device)
    steps = generate(model, ids, args.tokens, context, device, args.temperature, args.seed)
    # the terminal's encoding may lack some characters
    # pyrefly: ignore[missing-attribute]  # typeshed declares a TextIO, which lacks it
    sys.stdout.reconfigure(errors="backslashreplace")
    print_stream(tokenizer, ids, steps)
    return 0


if __name__ == "__main__":
    run_tool(main)
