"""Sample text from a checkpoint, or from a run's newest one, with the tokenizer in its folder.

    python -m generate outputs/tiny --prompt "def "
    python -m generate outputs/tiny --prompt "def " --prompt "class " --top-p 0.9 --tokens 64
    python -m generate outputs/tiny-chat --chat        a conversation in the terminal

A single prompt's text is streamed. Several prompts form one batch and are printed at the end, one
after the other.

Shapes: B batch, T tokens, S cached positions (columns), K key/value heads, E head dimension,
V vocabulary.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

import config
from checkpoint import catalog, compare, load
from config import ConfigError, run_tool
from data.dataset import Dataset
from data.tokenizer import Tokenizer
from files import printable
from metrics import log
from model.build import meta_model
from model.llama import Llama, parameter_count
from parallel.fsdp import reshard
from parallel.materialize import initialize_buffers, materialize
from parallel.mesh import World
from parallel.ranks import all_gather_objects

MAX_SAMPLED_PARAMETERS = 20e9  # a run logs no sample of a larger model
MIN_SAMPLED_STEPS = 100  # or after fewer steps: the text would be noise


class KVCache:
    """Implements model/attention.py's KVCache. The first pass allocates (B, K, S, E), in its
    dtype."""

    def __init__(self, capacity: int):
        self.capacity = capacity  # columns
        self.filled = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, new, head_dim = k.shape
        if not self.filled:
            shape = (batch, heads, self.capacity, head_dim)
            self.keys = k.new_empty(shape)
            self.values = v.new_empty(shape)
        begin = self.filled
        self.filled += new
        self.keys[:, :, begin : self.filled] = k
        self.values[:, :, begin : self.filled] = v
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class Cache:
    """Implements model/attention.py's Cache, without gradients.

    The first pass (prefill) takes `lengths` tokens per row, padded at the end, where causal
    attention ignores padding. Each later pass adds one token per row as one more column. A mask
    hides the padding, and positions continue from each row's own length. So a row's result does not
    depend on the other rows.
    """

    def __init__(self, lengths: list[int], columns: int, n_layers: int, device: torch.device):
        """columns: the maximum number of tokens per row, including padding."""
        self.lengths = torch.tensor(lengths, device=device)[:, None]  # (B, 1), prompt lengths
        self.prefilled = max(lengths)  # columns of the first pass
        self.filled = 0
        self.blocks = [KVCache(columns) for _ in range(n_layers)]

    def advance(self, new: int) -> tuple[Tensor | None, Tensor, Tensor]:
        begin = self.filled
        self.filled += new
        column = torch.arange(self.filled, device=self.lengths.device)  # (S,)
        if begin == 0:
            positions = column.expand(len(self.lengths), -1)  # (B, S)
            last = self.lengths - 1
            return None, positions, last
        is_text = (column < self.lengths) | (column >= self.prefilled)  # (B, S)
        mask = is_text[:, None, None]  # (B, 1, 1, S)
        positions = self.lengths + begin - self.prefilled  # (B, 1)
        last = torch.zeros_like(self.lengths)
        return mask, positions, last


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[list[int]],
    count: int,
    context: int,
    device: torch.device,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Yields the next token of every row, `count` times; the caller may stop early.

    Prompts must not be empty, and may differ in length. A row's tokens do not depend on the other
    rows: row i draws from its own generator, seeded by (seed, i). A row that outgrows `context`
    tokens restarts at position 0 with its newest half, and one pass refills the cache of all rows.
    Every pass all-gathers the parameters, so all ranks must pass equal arguments and consume
    equally many tokens.
    """
    rows = [list(prompt) for prompt in prompts]  # the tokens that the model attends to
    cache = None
    generators = [random.Random(f"{seed} {i}") for i in range(len(rows))]
    for done in range(count):
        for row in rows:
            if len(row) > context:
                del row[: len(row) - (context + 1) // 2]
                cache = None
        if cache is None:
            lengths = [len(row) for row in rows]
            longest = max(lengths)
            columns = min(context, longest + count - done)
            cache = Cache(lengths, columns, len(model.blocks), device)
            new = [row + [0] * (longest - len(row)) for row in rows]
        else:
            new = [row[-1:] for row in rows]
        logits = model(torch.tensor(new, device=device), cache=cache)[:, -1]  # (B, V)
        draws = [generator.random() for generator in generators]
        tokens = choose(logits, temperature, top_p, draws)
        for row, token in zip(rows, tokens):
            row.append(token)
        yield tokens


def choose(logits: Tensor, temperature: float, top_p: float, draws: list[float]) -> list[int]:
    """One token for each row of logits (B, V).

    Greedy at temperature 0, else nucleus (top-p) sampling (https://arxiv.org/abs/1904.09751) with
    the row's draw from [0, 1). Samples on the host in float64: deterministic and equal on every
    device. Raises ConfigError for non-finite logits.
    """
    if not logits.amax(-1).isfinite().all():
        raise ConfigError("the model's output is not finite: its weights are corrupt")
    if temperature == 0:
        return logits.argmax(-1).tolist()
    logits = logits.cpu().double()
    # subtracting the maximum first: no temperature makes a logit +inf
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    probability, token = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)  # (B, V)
    cumulative = probability.cumsum(-1)  # (B, V), of a token and all likelier ones
    # of the least likely token in the nucleus
    last = (cumulative < top_p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)  # (B, 1)
    draw = torch.tensor(draws, dtype=torch.float64)[:, None]  # (B, 1)
    index = torch.searchsorted(cumulative, draw * cumulative.gather(-1, last))  # (B, 1)
    return token.gather(-1, index)[:, 0].tolist()


def encode(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, after BOS if the tokenizer has one. Raises ConfigError if there are
    none."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that the locale cannot decode
        raise ConfigError(
            f"--prompt: is not valid Unicode: {error.reason} at character {error.start}"
        ) from None
    ids = [*tokenizer.bos, *tokenizer.encode([prompt])[0]]
    if not ids:
        raise ConfigError("--prompt: is empty, and the tokenizer has no BOS token to start from")
    return ids


def continue_text(
    model: nn.Module,
    tokenizer,
    prompt: str,
    count: int,
    temperature: float,
    context: int,
    device: torch.device,
    seed: int = 0,
) -> str:
    """The prompt and its continuation up to the first EOS token. Every rank runs all `count`
    passes."""
    ids = encode(tokenizer, prompt)
    steps = generate(model, [ids], count, context, device, temperature, seed=seed)
    new = [token for (token,) in steps]
    text = itertools.takewhile(lambda token: token not in tokenizer.eos, new)
    return tokenizer.decode([*ids, *text])


def print_stream(
    tokenizer, rows: list[list[int]], steps: Iterable[list[int]], write: Callable[[str], None]
) -> None:
    """Appends each step's tokens to the rows, to each up to its EOS token, and writes the text.

    Writes a single row as it grows, several rows once all have ended. Also writes the text so far
    if `steps` raises, as on Ctrl-C.
    """
    unfinished = set(range(len(rows)))
    written = 0  # characters, of a single row
    try:
        for tokens in itertools.chain([[]], steps):  # first the prompt alone
            for i, token in enumerate(tokens):
                if token in tokenizer.eos:
                    unfinished.discard(i)
                elif i in unfinished:
                    rows[i].append(token)
            if len(rows) == 1:
                # hold back an incomplete UTF-8 character, which decodes as this one
                text = tokenizer.decode(rows[0]).rstrip("\N{REPLACEMENT CHARACTER}")
                write(text[written:])
                written = len(text)
            if not unfinished:
                break
    finally:
        for i, row in enumerate(rows, 1):
            text = tokenizer.decode(row)[written:] + "\n"
            if len(rows) > 1:
                text = f"=== prompt {i} of {len(rows)}\n{text}"
            write(text)


@torch.no_grad()
def log_sample(model: Llama, cfg: config.Config, world: World, dataset: Dataset) -> None:
    """Logs text that the model generates.

    Logs none after few steps, of conversations, or without a tokenizer that can encode the prompt.
    Logs none of a large model, which every token all-gathers: over nodes, 64 tokens of 70B would
    occupy all GPUs for minutes.
    """
    if cfg.train.steps < MIN_SAMPLED_STEPS or cfg.data.has_conversations:
        return
    if parameter_count(model) > MAX_SAMPLED_PARAMETERS:
        log.info(
            "no sample: each of its tokens would all-gather %d parameters", parameter_count(model)
        )
        return
    if not dataset.tokenizer_files:
        log.info("no sample: data.tokenizer names no tokenizer of the token files")
        return
    prompt = "The "
    if "python-stdlib" in (dataset.names or [cfg.data.source]):
        prompt = "def "
    tokenizer = tokenizer_for(prompt, dataset)
    if not all(all_gather_objects(tokenizer is not None)):
        return
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # each length would trigger a recompilation
        text = continue_text(
            model, tokenizer, prompt, 64, 0.8, cfg.train.seq_len, world.device, cfg.run.seed
        )
    reshard(model)
    if world.rank == 0:
        log.info("a sample:\n%s", printable(text))


def tokenizer_for(prompt: str, dataset: Dataset) -> Tokenizer | None:
    """The data's tokenizer; None if it cannot be loaded or encode the prompt."""
    try:
        tokenizer = Tokenizer(dataset.tokenizer_files[0].parent)
        tokenizer.encode([prompt])
    except (ImportError, ConfigError):
        return None
    return tokenizer


# The tool


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m generate", description=__doc__.splitlines()[0])
    # one line, as every error here
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="CKPT_OR_RUN")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="several make a batch"
    )
    prompt.add_argument(
        "--chat", action="store_true", help="a conversation, with the checkpoint's chat template"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=128,
        metavar="N",
        help="at most; an EOS token ends a text (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: greedy (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of the likeliest, of this probability (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: param_dtype; float32 on a CPU"
    )
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
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p {args.top_p}: must be greater than 0, and at most 1")
    return args


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """A checkpoint's tokenizer. In an imported folder several tokens may end a text.

    Raises ConfigError.
    """
    tokenizer = Tokenizer(folder)
    settings = folder / "generation_config.json"
    if settings.is_file():
        tokenizer.eos = [*tokenizer.eos, *eos_tokens(settings)]
    return tokenizer


def eos_tokens(settings: pathlib.Path) -> list[int]:
    """eos_token_id of a generation_config.json: a number, a list of them, or absent. Raises
    ConfigError."""
    try:
        eos = json.loads(settings.read_bytes()).get("eos_token_id")
    except OSError as error:
        raise ConfigError(f"{settings}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{settings}: cannot be read: {error}") from None
    return eos if isinstance(eos, list) else [eos]


def check_vocabulary(rows: list[list[int]], vocab_size: int) -> None:
    """Raises ConfigError if the model has no embedding for an id of a prompt."""
    largest = max(map(max, rows), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"--prompt: has id {largest}, but the model's vocab_size is {vocab_size}: the "
            "tokenizer in its folder is larger than the model"
        )


def load_model(
    folder: pathlib.Path, cfg: config.Config, device: torch.device, dtype: str | None
) -> Llama:
    """A checkpoint's model in `dtype`. By default in param_dtype on a GPU, else in float32.

    Raises ConfigError.
    """
    if cfg.lora:  # the checkpoint stores the adapters alone
        model = load_base(folder, cfg, device)
    else:
        with device:
            model = Llama(cfg.model)
        initialize_buffers(model, cfg.run.seed)
    load.restore(folder, model, None)
    if dtype is None:
        dtype = cfg.parallel.param_dtype if device.type == "cuda" else "float32"
    return model.to(getattr(torch, dtype)).eval()


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


def generate_from_checkpoint(args: argparse.Namespace) -> None:
    """Prints the prompts' texts, or holds a conversation. Raises ConfigError."""
    folder = catalog.find(args.checkpoint)
    cfg = catalog.read_config(folder, args.base)
    context = cfg.train.seq_len
    tokenizer = load_tokenizer(folder)
    prompts = [encode(tokenizer, prompt) for prompt in args.prompt]
    check_vocabulary(prompts, cfg.model.vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, cfg, device, args.dtype)

    def steps(rows: list[list[int]], count: int) -> Iterator[list[int]]:
        return generate(
            model, rows, count, context, device, args.temperature, args.top_p, args.seed
        )

    # for characters that the terminal's encoding lacks
    # pyrefly: ignore[missing-attribute]  # typeshed declares a TextIO, which lacks it
    sys.stdout.reconfigure(errors="backslashreplace")
    if args.chat:
        config.require_extra("chat", "--chat")
        from extras.chat.terminal import converse

        converse(
            folder, tokenizer.eos, context, args.tokens, lambda ids, count: steps([ids], count)
        )
        return
    longest = max(map(len, prompts))
    if longest + args.tokens - 1 > context:  # the last token is printed, not read
        print(
            f"beyond {context} tokens (train.seq_len) the older half of the context is dropped",
            file=sys.stderr,
        )
    print_stream(tokenizer, prompts, steps(prompts, args.tokens), print_text)


def print_text(text: str) -> None:
    print(printable(text), end="", flush=True)


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    # a single process is intended
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        if sys.stdout is None:
            raise OSError("is closed")
        generate_from_checkpoint(args)
    except OSError as error:
        if sys.stdout:  # Python flushes stdout once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            return 0
        print(f"{error.filename or 'stdout'}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
