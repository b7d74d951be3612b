"""What preparing text costs one process, for data.order = "growing", by the kind of file: reading alone, and all of it.

    python -m benchmarks.preparing FILE.txt --tokenizer=tokenizer.model        real text, 30 MB or more

Megabytes of text per second of CPU time, so that other processes do not count. `datasets` reads the same file, for
comparison.

    python -m benchmarks.preparing FILE.txt --tokenizer=tokenizer.json --gigatoken     the package, against `tokenizers`

In one thread each: how many documents get other ids, and the speed.
"""

import argparse
import gzip
import json
import os
import pathlib
import tempfile
import time
from typing import Any

import config
from benchmarks import count
from data import growing
from data.encode import encode
from data.pieces import Pieces, read_plan
from data.prepare import prepare


def cpu_seconds(work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def beside_gigatoken(tokenizer: str, documents: list[str], size: float) -> None:
    import gigatoken
    import tokenizers

    theirs, ours = gigatoken.Tokenizer(tokenizer), tokenizers.Tokenizer.from_file(tokenizer)
    batches = [documents[i : i + 256] for i in range(0, len(documents), 256)]
    found: list[Any] = [[], []]
    for ids, name, encode_batch in (
        (found[0], "gigatoken", theirs.encode_batch),
        (
            found[1],
            "tokenizers",
            lambda texts: [
                encoding.ids for encoding in ours.encode_batch(texts, add_special_tokens=False)
            ],
        ),
    ):
        seconds = cpu_seconds(lambda ids=ids, call=encode_batch: ids.extend(map(call, batches)))
        print(f"{name}: {size / seconds:.2f} MB/s of CPU time")
    other = sum(
        a != b
        for a_batch, b_batch in zip(*found)
        for a, b in zip(a_batch.to_list(), b_batch, strict=True)
    )
    print(f"{other} of {len(documents)} documents have other ids")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=count, default=30)
    parser.add_argument("--gigatoken", action="store_true")
    given = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with given.text.open(errors="ignore") as file:
        text = file.read(given.megabytes * 1_000_000)
    documents = [
        text[i : i + 2500] for i in range(0, len(text), 2500)
    ]  # characters, about as in C4
    size = sum(len(document.encode()) for document in documents) / 1e6
    if given.gigatoken:
        beside_gigatoken(given.tokenizer, documents, size)
        return
    import datasets
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        lines = "".join(json.dumps({"text": document}) + "\n" for document in documents).encode()
        (folder / "a.jsonl").write_bytes(lines)
        (folder / "a.json.gz").write_bytes(gzip.compress(lines, 6))
        (folder / "a.jsonl.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
        pyarrow.parquet.write_table(
            pyarrow.table({"text": documents}), folder / "a.parquet", row_group_size=1000
        )
        (folder / "tokenizer.model").write_bytes(pathlib.Path(given.tokenizer).read_bytes())
        encode(folder, "i", documents[:1])
        bare = cpu_seconds(
            lambda: [
                encode(folder, "i", documents[i : i + 256]) for i in range(0, len(documents), 256)
            ]
        )
        print(f"{size:.1f} MB of text. The encoder alone: {size / bare:.2f} MB/s of CPU time")
        for kind in ("jsonl", "json.gz", "jsonl.zst", "parquet"):
            d = config.Data(
                source=str(folder / f"a.{kind}"),
                tokenizer=str(folder / "tokenizer.model"),
                path=str(folder / f"prepared-{kind}"),
                order="growing",
            )
            sizes = {key: 16 for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")}
            cfg = config.from_dict(
                {
                    "model": {
                        **sizes,
                        "n_layers": 1,
                        "n_heads": 1,
                        "n_kv_heads": 1,
                        "vocab_size": 1 << 18,
                    },
                    "train": {"steps": 1},
                    "data": {
                        key: getattr(d, key) for key in ("source", "tokenizer", "path", "order")
                    },
                },
                "preparing.toml",
            )
            prepare(cfg)
            plan = read_plan(pathlib.Path(str(cfg.data.path)))
            read = cpu_seconds(lambda d=d: [None for _ in Pieces(d)])
            pieces = cpu_seconds(
                lambda d=d, plan=plan: [
                    None for part in plan["parts"] for _ in Pieces(d, plan, part)
                ]
            )
            worker = cpu_seconds(
                lambda d=d, plan=plan: [
                    growing.write_part(pathlib.Path(str(d.path)), d, number)
                    for number in range(len(plan["parts"]))
                ]
            )
            loader = {"parquet": "parquet"}.get(kind, "json")
            if kind == "jsonl.zst":  # needs another package there
                theirs = float("nan")
            else:
                theirs = cpu_seconds(
                    lambda d=d, loader=loader: [
                        row["text"]
                        for row in datasets.load_dataset(
                            loader, data_files=d.source, split="train", streaming=True
                        )
                    ]
                )
            print(
                f"{kind:10} read {size / read:6.1f} MB/s, in {len(plan['parts'])} parts {size / pieces:6.1f}, by "
                f"`datasets` {size / theirs:6.1f}; a worker, all it does: {size / worker:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
