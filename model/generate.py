"""Sample text from a checkpoint, or from a run's newest one, with the tokenizer that lies beside it.

    python -m model.generate outputs/tiny --prompt "def "
"""

import argparse
import pathlib
import sys
import warnings

import torch
from torch import Tensor, nn

import config
from config import ConfigError


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int, temperature: float, context: int, seed: int = 0) -> Tensor:
    """Continues tokens (B, T) by `count` more each, looking back at `context` of them; greedy at temperature 0.

    Plain: the whole context is computed again for each token. On several ranks all must call it, with equal arguments.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(count):
        logits = model(tokens[:, -context:])[:, -1].float()  # (B, V)
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)  # (B, 1)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)  # (B, 1)
        tokens = torch.cat([tokens, chosen], dim=-1)  # (B, T+1)
    return tokens


def continue_text(model: nn.Module, tokenizer, prompt: str, count: int, temperature: float, context: int,
                  device: torch.device, seed: int = 0) -> str:
    """The prompt and its continuation, up to the end mark where there is one."""
    ids = [*tokenizer.bos, *tokenizer.encode([prompt])[0]]
    if not ids:
        raise ConfigError("--prompt: is empty, and the tokenizer has no begin mark to start from")
    out = generate(model, torch.tensor([ids], device=device), count, temperature, context, seed)[0].tolist()
    ends = [i for i in range(len(ids), len(out)) if out[i] in tokenizer.eos]
    return tokenizer.decode(out[: ends[0] if ends else None])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m model.generate", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="CKPT_OR_RUN")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    # Upwards, as a tool's main may: the model itself knows nothing of checkpoints.
    from checkpoint import places, reading
    from data.tokenizer import Tokenizer
    from model.llama import Llama

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads alone, as meant
    try:
        if args.tokens < 1 or not args.temperature >= 0:
            raise ConfigError("--tokens must be at least 1, --temperature at least 0")
        folder = places.find(args.checkpoint)
        cfg = config.from_dict(places.read_state(folder)["config"], str(folder / places.STATE))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = Llama(cfg.model).to(device)
        reading.restore(folder, model, None)
        print(continue_text(model, Tokenizer(folder), args.prompt, args.tokens, args.temperature,
                            cfg.train.seq_len, device, args.seed))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
