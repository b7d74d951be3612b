"""How fast a process reads its batches, how soon it can begin, how much memory that takes; how fast text is prepared.

    python -m benchmarks.data --tokens 10_000_000_000 --seq-len 8192 --seconds 10 --prepare-mb 100

The corpus is a sparse file of zeros: its pages are made when they are read, as a warm page cache would have them. The
loader's thread is the one core that counts; batches are taken as fast as they come. Then how fast text is prepared.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

from benchmarks import count
from schema import positive


def preparation(megabytes: int, repeat: int) -> None:
    """Preparing the standard library's text, repeated, against sentencepiece alone in one thread on the same text."""
    import config
    from data.identity import open_source
    from data.prepare import prepare
    from data.tokenizer import Tokenizer, train_tokenizer

    cores, ratios, rates = len(os.sched_getaffinity(0)), [], []
    texts, left = [], megabytes * 1e6
    for text in open_source(config.Data()):
        if (left := left - len(text)) < 0 and texts:
            break
        texts.append(text)
    size = sum(map(len, texts))
    raw = {
        "model": {
            "dim": 64,
            "n_layers": 1,
            "n_heads": 1,
            "n_kv_heads": 1,
            "ffn_dim": 64,
            "vocab_size": 8192,
        },
        "train": {"steps": 1},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 8192))
        with (folder / "text.jsonl").open("w") as file:
            for turn in range(max(1, round(megabytes * 1e6 / size))):
                file.writelines(json.dumps({"text": f"{turn}\n{text}"}) + "\n" for text in texts)
        tokenizer = Tokenizer(folder / "tokenizer.model")
        for turn in range(repeat):
            began = time.perf_counter()
            for text in texts:
                tokenizer.encode([text])
            alone = size / (time.perf_counter() - began)
            data = {
                "source": str(folder / "text.jsonl"),
                "path": str(folder / f"out{turn}"),
                "tokenizer": str(folder / "tokenizer.model"),
            }
            began = time.perf_counter()
            prepare(config.from_dict({**raw, "data": data}, "benchmark"))
            rates.append(
                size * max(1, round(megabytes * 1e6 / size)) / (time.perf_counter() - began)
            )
            ratios.append(rates[-1] / (cores * alone))
    print(
        f"preparation of {megabytes} MB: {statistics.median(rates) / 1e6:.1f} MB/s on {cores} cores, start, sync and "
        f"hashes included; {statistics.median(ratios):.0%} of cores x sentencepiece alone ({min(ratios):.0%} to "
        f"{max(ratios):.0%})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=count, default=10_000_000_000)
    parser.add_argument("--seq-len", type=count, default=8192)
    parser.add_argument("--seconds", type=positive, default=10.0)
    parser.add_argument("--repeat", type=count, default=3)
    parser.add_argument("--prepare-mb", type=count, default=100, help="text to prepare")
    args = parser.parse_args()

    import torch

    import config
    from data.dataset import Dataset
    from data.loader import Loader
    from data.order import make_order
    from data.tokens import open_stream

    torch.set_num_threads(1)
    model = {
        "dim": 64,
        "n_layers": 1,
        "n_heads": 1,
        "n_kv_heads": 1,
        "ffn_dim": 64,
        "vocab_size": 32000,
    }
    train = {"steps": 1, "seq_len": args.seq_len, "global_batch_size": 64, "micro_batch_size": 1}
    starts, rates = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with (folder / "train.bin").open("wb") as file:
            file.truncate(2 * args.tokens)
        manifest = {
            "sha256": {},
            "identity": {},
            "vocab_size": 1,
            "tokens": {"train": args.tokens},
            "dtype": "uint16",
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        world = SimpleNamespace(dp_rank=0, dp_size=8, cp=1, device=torch.device("cpu"))
        for seed in range(args.repeat):
            began = time.perf_counter()
            cfg = config.from_dict(
                {"model": model, "train": train, "run": {"seed": seed}}, "benchmark"
            )
            streams = [open_stream(folder, "train", 32000)]
            dataset = Dataset(cfg, make_order(cfg, streams), [*streams])
            loader = Loader(cfg, dataset, world, 1)
            next(loader)  # rank 0 of 8: eight samples a step
            starts.append(time.perf_counter() - began)
            began, tokens, cpu = time.perf_counter(), 0, time.process_time()
            while time.perf_counter() - began < args.seconds:
                tokens += sum(inputs.numel() for inputs, _ in next(loader).micro_batches)
            rates.append(tokens / (time.process_time() - cpu))
            loader.close()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    print(
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, {args.tokens:,} tokens, sequences of "
        f"{args.seq_len}"
    )
    print(
        f"first batch after {statistics.median(starts):.3f} s ({min(starts):.3f} to {max(starts):.3f})"
    )
    print(
        f"{statistics.median(rates) / 1e6:.1f} million tokens per second of one core ({min(rates) / 1e6:.1f} to "
        f"{max(rates) / 1e6:.1f})"
    )
    print(f"peak resident memory grew by {grown:.0f} MiB")
    preparation(args.prepare_mb, args.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
