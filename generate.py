"""Sample text from a checkpoint, or from a run's newest one, with the tokenizer in its folder.

    python -m generate outputs/tiny --prompt "def "
    python -m generate outputs/tiny --prompt "def " --prompt "class " --top-p 0.9 --tokens 64
    python -m generate outputs/tiny-chat --chat        a conversation in the terminal

A single prompt's text is streamed. Several prompts form one batch and are printed at the end, one after the other.

Shapes: B batch, T tokens, S cached positions (columns), K key/value heads, E head dimension, V vocabulary.
"""

import argparse
import contextlib
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
from config import ConfigError, run_tool
from data.dataset import Dataset
from files import printable
from metrics import log
from model.llama import Llama, parameter_count
from parallel.fsdp import reshard
from parallel.mesh import World
from parallel.ranks import all_gather_objects

SAMPLED_PARAMETERS = 20e9  # largest model of which a run logs a sample
SAMPLED_STEPS = 100  # fewest steps of such a run: before, the text is noise


class KVCache:
    """As model/attention.py's; (B, K, S, E), allocated at the first pass in its dtype."""

    def __init__(self, columns: int):
        self.columns, self.filled = columns, 0
        self.keys = self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.filled:
            shape = (*k.shape[:2], self.columns, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        begin, self.filled = self.filled, self.filled + k.shape[2]
        self.keys[:, :, begin : self.filled] = k
        self.values[:, :, begin : self.filled] = v
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]


class Cache:
    """As model/attention.py's. No gradients.

    The first pass (prefill) takes `lengths` tokens per row, padded at the end, where causal attention ignores padding.
    Each later pass adds one token per row as one more column. A mask hides the padding, and positions continue from
    each row's own length. So a row's result does not depend on the other rows.
    """

    def __init__(self, lengths: list[int], columns: int, n_layers: int, device: torch.device):
        """columns: the maximum number of tokens per row, including padding."""
        self.lengths = torch.tensor(lengths, device=device)[:, None]  # (B, 1), prompt lengths
        self.filled, self.first = 0, max(lengths)  # first: columns of the first pass
        self.blocks = [KVCache(columns) for _ in range(n_layers)]

    def advance(self, new: int) -> tuple[Tensor | None, Tensor, Tensor]:
        begin, self.filled = self.filled, self.filled + new
        column = torch.arange(self.filled, device=self.lengths.device)
        if begin == 0:
            return None, column.expand(len(self.lengths), -1), self.lengths - 1
        seen = (column < self.lengths) | (column >= self.first)  # (B, S)
        return (
            seen[:, None, None],
            self.lengths + begin - self.first,
            torch.zeros_like(self.lengths),
        )


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
    """Yields the next token of every row, `count` times; the caller may stop early, for example at EOS tokens.

    Prompts must not be empty, and may differ in length. A row's tokens do not depend on the other rows: row i draws
    from its own generator, seeded by (seed, i). A row that outgrows `context` tokens restarts at position 0 with its
    newest half, and one pass refills the cache of all rows. Every pass all-gathers the parameters, so all ranks must
    pass equal arguments and consume equally many tokens.
    """
    # rows: the tokens that the model attends to
    rows, cache = ([list(prompt) for prompt in prompts], None)
    generators = [random.Random(f"{seed} {i}") for i in range(len(rows))]
    for done in range(count):
        for row in rows:
            if len(row) > context:
                del row[: len(row) - (context + 1) // 2]
                cache = None
        if cache is None:
            lengths = [len(row) for row in rows]
            longest = max(lengths)
            cache = Cache(lengths, min(context, longest + count - done), len(model.blocks), device)
            new = [row + [0] * (longest - len(row)) for row in rows]
        else:
            new = [row[-1:] for row in rows]
        logits = model(torch.tensor(new, device=device), cache=cache)[:, -1]  # (B, V)
        chosen = choose(
            logits, temperature, top_p, [generator.random() for generator in generators]
        )
        for row, token in zip(rows, chosen):
            row.append(token)
        yield chosen


def choose(logits: Tensor, temperature: float, top_p: float, draws: list[float]) -> list[int]:
    """One token for each row of logits (B, V): greedy at temperature 0, else nucleus (top-p) sampling by the row's draw
    from [0, 1) (https://arxiv.org/abs/1904.09751).

    Samples on the host in float64: deterministic and equal on every device. Raises ConfigError for non-finite logits.
    """
    if not logits.amax(-1).isfinite().all():
        raise ConfigError("the model's output is not finite: its weights are corrupt")
    if temperature == 0:
        return logits.argmax(-1).tolist()
    logits = logits.cpu().double()
    logits = (
        logits - logits.amax(-1, keepdim=True)
    ) / temperature  # at most 0: no temperature makes it +inf
    probability, token = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)  # (B, V)
    total = probability.cumsum(-1)  # (B, V), of a token and all likelier ones
    last = (total < top_p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)  # (B, 1)
    drawn = torch.tensor(draws, dtype=torch.float64)[:, None] * total.gather(-1, last)  # (B, 1)
    return token.gather(-1, torch.searchsorted(total, drawn))[:, 0].tolist()


def encode(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, after BOS if the tokenizer has one. Raises ConfigError if there are none."""
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


def eos_tokens(settings: pathlib.Path) -> list[int]:
    """eos_token_id of a generation_config.json: a number, a list of them, or absent. Raises ConfigError."""
    try:
        found = json.loads(settings.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(
            f"{settings}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    return found if isinstance(found, list) else [found]


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
    """The prompt and its continuation up to the first EOS token. Every rank runs all `count` passes."""
    ids = encode(tokenizer, prompt)
    new = [
        tokens[0]
        for tokens in generate(model, [ids], count, context, device, temperature, seed=seed)
    ]
    end = next((i for i, token in enumerate(new) if token in tokenizer.eos), None)
    return tokenizer.decode(ids + new[:end])


def print_stream(
    tokenizer, rows: list[list[int]], steps: Iterable[list[int]], write: Callable[[str], None]
) -> None:
    """Appends each step's tokens to the rows, to each up to its EOS token, and writes the text: a single row as it
    grows, several rows once all have ended. Also writes the text so far if `steps` raises, as on Ctrl-C."""
    unfinished, written = set(range(len(rows))), 0
    try:
        for tokens in itertools.chain([[]], steps):  # first the prompt alone
            for i, token in enumerate(tokens):
                if token in tokenizer.eos:
                    unfinished.discard(i)
                elif i in unfinished:
                    rows[i].append(token)
            if len(rows) == 1:  # hold back an incomplete UTF-8 character, which decodes as this one
                text = tokenizer.decode(rows[0]).rstrip("\N{REPLACEMENT CHARACTER}")
                write(text[written:])
                written = len(text)
            if not unfinished:
                break
    finally:
        for i, row in enumerate(rows, 1):
            heading = f"=== prompt {i} of {len(rows)}\n" if len(rows) > 1 else ""
            write(f"{heading}{tokenizer.decode(row)[written:]}\n")


@torch.no_grad()
def log_sample(model: Llama, cfg: config.Config, world: World, dataset: Dataset) -> None:
    """Logs text that the model generates. Logs none after few steps, of conversations, without a tokenizer that can
    encode the prompt, or of a large model, which every token all-gathers: over nodes, 64 tokens of 70B would occupy all
    GPUs for minutes."""
    if cfg.train.steps < SAMPLED_STEPS or cfg.data.messages_field:
        return
    if parameter_count(model) > SAMPLED_PARAMETERS:
        log.info(
            "no sample: each of its tokens would all-gather %d parameters", parameter_count(model)
        )
        return
    prompt = "def " if "python-stdlib" in (dataset.names or [cfg.data.source]) else "The "
    can_encode = False
    with contextlib.suppress(ImportError, ConfigError, IndexError):
        # IndexError: the data has no tokenizer
        from data.tokenizer import Tokenizer

        tokenizer = Tokenizer(dataset.tokenizer_files[0].parent)
        can_encode = len(tokenizer.encode([prompt])) == 1
    if not all(all_gather_objects(can_encode)):
        return
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # each length would trigger a recompilation
        text = continue_text(
            model, tokenizer, prompt, 64, 0.8, cfg.train.seq_len, world.device, cfg.run.seed
        )
    reshard(model)
    if world.rank == 0:
        log.info("a sample:\n%s", printable(text))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m generate", description=__doc__.splitlines()[0])
    # one line, as every error here
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="CKPT_OR_RUN")
    said = parser.add_mutually_exclusive_group(required=True)
    said.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="several make a batch"
    )
    said.add_argument(
        "--chat", action="store_true", help="a conversation, with the checkpoint's chat template"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="at most; an EOS token ends a text"
    )
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: greedy")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="of the likeliest, of this probability",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: param_dtype; float32 on a CPU"
    )
    parser.add_argument(
        "--base",
        metavar="HF_DIR",
        help="of adapters: where their base lies now; default: as trained",
    )
    args = parser.parse_args(argv)
    for flag, value, holds, rule in (
        ("--tokens", args.tokens, args.tokens >= 1, "at least 1"),
        (
            "--temperature",
            args.temperature,
            0 <= args.temperature < math.inf,
            "at least 0, and finite",
        ),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "greater than 0, and at most 1"),
    ):
        if not holds:
            parser.error(f"{flag} {value}: must be {rule}")

    from checkpoint import catalog, compare, load
    from data.tokenizer import Tokenizer
    from model.build import meta_model
    from parallel.materialize import materialize

    # a single process is intended
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        if sys.stdout is None:
            raise OSError("is closed")
        folder = catalog.find(args.checkpoint)
        cfg = catalog.read_config(folder, args.base)
        tokenizer, context = Tokenizer(folder), cfg.train.seq_len
        if (settings := folder / "generation_config.json").is_file():
            # of an import: several tokens may end a text
            tokenizer.eos = [*tokenizer.eos, *eos_tokens(settings)]
        rows = [encode(tokenizer, prompt) for prompt in args.prompt]
        if (largest := max(map(max, rows), default=0)) >= cfg.model.vocab_size:
            raise ConfigError(
                f"--prompt: has id {largest}, but the model's vocab_size is {cfg.model.vocab_size}: the "
                "tokenizer in its folder is larger than the model"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if cfg.lora:  # the checkpoint holds the adapters alone
            from extras.huggingface.weights import fingerprint, weights_to_read

            base = weights_to_read(cfg, step=1)
            assert base and base.sums is not None  # as adapters have a base
            model = meta_model(cfg.model, cfg.lora)
            materialize(model, 0, device, base.read_into)
            compare.check_base(folder, cfg.model.init_from, fingerprint([base.sums]))
        else:
            with device:
                model = Llama(cfg.model)
        load.restore(folder, model, None)
        dtype = args.dtype or (cfg.parallel.param_dtype if device.type == "cuda" else "float32")
        model.to(getattr(torch, dtype)).eval()
        # pyrefly: ignore[missing-attribute]  # typeshed declares a TextIO, which lacks it
        # for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
        if args.chat:
            config.require_extra("chat", "--chat")
            from extras.chat.terminal import converse

            converse(
                folder,
                tokenizer.eos,
                context,
                args.tokens,
                lambda ids, count: generate(
                    model, [ids], count, context, device, args.temperature, args.top_p, args.seed
                ),
            )
            return 0
        if max(map(len, rows)) + args.tokens - 1 > context:
            print(
                f"beyond {context} tokens (train.seq_len) the older half of the context is dropped",
                file=sys.stderr,
            )
        steps = generate(
            model, rows, args.tokens, context, device, args.temperature, args.top_p, args.seed
        )
        print_stream(
            tokenizer, rows, steps, lambda text: print(printable(text), end="", flush=True)
        )
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
