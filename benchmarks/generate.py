"""Times generation with the key/value cache against computing the whole text anew for every token, as a bare loop does.

    python -m benchmarks.generate configs/tiny.toml --tokens 240 --rows 1

Fresh weights, greedy, on the GPU where there is one. Both take turns; medians, tokens per second of all rows together.
"""

import argparse
import statistics
import sys
import time

import torch

import config
from benchmarks import count
from config import ConfigError
from generate import generate
from model.llama import Llama
from parallel.materialize import materialize

PROMPT = 8  # tokens


@torch.no_grad()
def bare_loop(
    model: Llama, prompts: list[list[int]], count: int, device: torch.device
) -> list[list[int]]:
    tokens = torch.tensor(prompts, device=device)  # (B, T)
    for _ in range(count):
        # (B, T+1)
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=-1)
    return tokens[:, PROMPT:].tolist()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--tokens", type=count, default=240)
    parser.add_argument("--rows", type=count, default=1)
    parser.add_argument("--repeat", type=count, default=5)
    args = parser.parse_args(argv)
    try:
        cfg = config.load(args.config)
        if PROMPT + args.tokens > cfg.train.seq_len:
            raise ConfigError(
                f"--tokens {args.tokens}: with {PROMPT} of the prompt must fit into train.seq_len = "
                f"{cfg.train.seq_len}; the bare loop has no window"
            )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device, torch.no_grad():
        model = Llama(cfg.model)
        materialize(model, cfg.run.seed, device)
    prompts = torch.randint(cfg.model.vocab_size, (args.rows, PROMPT)).tolist()

    def cached() -> list[list[int]]:
        return [
            list(row)
            for row in zip(*generate(model, prompts, args.tokens, cfg.train.seq_len, device))
        ]

    ways = {"cached": cached, "bare loop": lambda: bare_loop(model, prompts, args.tokens, device)}
    rates = {name: [] for name in ways}
    for round_ in range(1 + args.repeat):
        for name, run in ways.items():
            began = time.perf_counter()
            run()  # ends with the tokens on the host, so that a GPU is done
            if round_:  # the first warms up
                rates[name].append(args.rows * args.tokens / (time.perf_counter() - began))
    for name, found in rates.items():
        print(
            f"{name:<10} {statistics.median(found):10,.0f} tokens/s  ({min(found):,.0f} ... {max(found):,.0f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
