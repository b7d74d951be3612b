"""Memory and time of importing and exporting Hugging Face weights: peak resident memory over what it was before.

    python benchmarks/hf.py [--mib 2100] [--folder F] [--ranks 1,2,4]

Makes a folder of random float32 weights of about that size, reads it into the shards of each number of ranks (gloo, on
this machine), once more as the base of adapters in 4 bits, imports it into a checkpoint, and exports that. Each in
processes of its own; of several ranks the worst figure counts. Prints a JSON object a line.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

import config  # noqa: E402
from benchmarks import count  # noqa: E402
from extras.huggingface import config as hf_config  # noqa: E402
from extras.huggingface import convert as hf  # noqa: E402
from extras.huggingface import weights as hf_weights  # noqa: E402
from model.build import meta_model  # noqa: E402

MIB = 2**20


def resident_mib(field: str) -> float:
    """VmRSS: now; VmHWM: the most since it was last reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


@contextlib.contextmanager
def measured(found: dict) -> Iterator[None]:
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, began = resident_mib("VmRSS"), time.perf_counter()
    yield
    found |= {
        "before_mib": before,
        "peak_over_it_mib": resident_mib("VmHWM") - before,
        "seconds": time.perf_counter() - began,
    }


def configuration(mib: int) -> config.Config:
    dim = 64 * max(1, round(32 * (mib / 2100) ** 0.5))
    model = {
        "dim": dim,
        "n_layers": 8,
        "n_heads": dim // 64,
        "n_kv_heads": dim // 64,
        "ffn_dim": 64 * (11 * dim // 256),
        "vocab_size": 16 * dim,
    }
    return config.from_dict(
        {
            "run": {"name": "r", "device": "cpu"},
            "model": model,
            "train": {"steps": 1},
            "parallel": {"param_dtype": "float32"},
        },
        "benchmark",
    )


def make_folder(folder: pathlib.Path, cfg: config.Config) -> None:
    generator, shapes = torch.Generator().manual_seed(0), hf_weights.shapes(cfg.model)
    folder.mkdir()
    hf.write_weights(
        folder,
        cfg.model,
        lambda name: torch.randn(shapes[name], generator=generator),
        torch.float32,
        512 * MIB,
    )
    hf.write_json(
        folder / "config.json", hf_config.render(cfg.model, cfg.train.seq_len, "float32", {})
    )


def read(folder: str, base_dtype: str | None = None) -> dict:
    """One rank's part of reading into shards."""
    import torch.distributed as dist

    from lifecycle.process_group import distributed
    from parallel.materialize import local_tensors, materialize
    from parallel.parallelize import parallelize
    from parallel.ranks import all_gather_objects

    cfg = config.from_dict(
        {
            "run": {"name": "r", "device": "cpu"},
            "model": {"init_from": folder},
            "train": {"steps": 1},
            "parallel": {"param_dtype": "float32"},
            **({"lora": {"base_dtype": base_dtype}} if base_dtype else {}),
        },
        "benchmark",
    )
    found: dict = {}
    with distributed(cfg) as world:
        weights, model = hf_weights.weights_to_read(cfg, 0), meta_model(cfg.model, cfg.lora)
        parallelize(model, cfg, world)
        dist.barrier()
        with measured(found):
            materialize(model, 0, world.device, weights.read_into)
        found["shard_mib"] = sum(t.nbytes for _, t in local_tensors(model)) / MIB
        ranks = all_gather_objects(found)
        del model
    return {name: max(rank[name] for rank in ranks) for name in found} if world.rank == 0 else {}


def tool(*arguments: str) -> dict:
    from checkpoint import catalog, load, manifest, save  # noqa: F401  not part of what is measured

    found: dict = {}
    with measured(found), contextlib.redirect_stdout(sys.stderr):
        assert hf.main([*arguments]) == 0
    return found


def alone(*arguments: str, ranks: int = 1) -> dict:
    """What this file prints, called with these arguments on some ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--standalone",
    ]
    done = subprocess.run(
        [*(command if ranks > 1 else [sys.executable]), __file__, "--only", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: pathlib.Path, mib: int, ranks: list[int]) -> Iterator[dict]:
    cfg = configuration(mib)
    source, checkpoint = folder / "hf", folder / "checkpoint"
    make_folder(source, cfg)
    sizes = [torch.Size(shape).numel() * 4 / MIB for shape in hf_weights.shapes(cfg.model).values()]
    yield {
        "what": "model",
        "mib": sum(sizes),
        "largest_tensor_mib": max(sizes),
        "torch": torch.__version__,
    }
    for number in ranks:
        yield {
            "what": "read into shards",
            "ranks": number,
            **alone("read", str(source), ranks=number),
        }
        yield {
            "what": "read as a base, nf4",
            "ranks": number,
            **alone("read", str(source), "nf4", ranks=number),
        }
    yield {"what": "import", **alone("import", str(source), str(checkpoint))}
    yield {"what": "export", **alone("export", str(checkpoint), str(folder / "float32"))}
    shutil.rmtree(folder / "float32")
    yield {
        "what": "export, bfloat16",
        **alone("export", str(checkpoint), str(folder / "bfloat16"), "--dtype", "bfloat16"),
    }


def main() -> int:
    if sys.argv[1:2] == ["--only"]:
        found = read(*sys.argv[3:]) if sys.argv[2] == "read" else tool(*sys.argv[2:])
        if found:
            print(json.dumps(found))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=count, default=2100)
    parser.add_argument(
        "--folder", help="on the disk to use; absent: the default for temporary files"
    )
    parser.add_argument(
        "--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4]
    )
    args = parser.parse_args()
    if args.folder:
        os.makedirs(args.folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in measure(pathlib.Path(folder), args.mib, args.ranks):
            print(
                json.dumps(
                    {name: round(v, 2) if isinstance(v, float) else v for name, v in row.items()}
                ),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
