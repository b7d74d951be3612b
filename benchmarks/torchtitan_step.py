"""Times torchtitan's training step on one GPU, as benchmarks.step times ours.

    python -m pip install torchtitan==0.2.2
    ./run_train.sh -m benchmarks.torchtitan_step 1B --micro-batch-size 2 --accumulation 4
    ./run_train.sh -m benchmarks.step configs/llama1b.toml --model.tie_embeddings=false \
        --train.micro_batch_size=2 --train.global_batch_size=8 --steps 10 --warm-up 3

The step is torchtitan's own Trainer.train_step(), on random tokens, with compilation and without
activation checkpointing. Its rows, checkpoints and data loading are left out, as ours are. Weights
and moments are in float32, matrix products in bfloat16.

On one GPU torchtitan trains without FSDP, under autocast. --fsdp shards over the one GPU, as on
every GPU of a larger run.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks import count
from benchmarks.step import spread

SEQ_LEN = 8192
# by torchtitan's names; the hidden sizes that follow are 8,192 and 14,336
SIZES = {
    "1B": {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "8B": {"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "8B-8-layers": {"dim": 4096, "n_layers": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
}


class RandomBatches:
    """The same micro-batch again and again, in torchtitan's form of a data loader."""

    def __init__(self, vocab_size: int, micro_batch_size: int):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (micro_batch_size, SEQ_LEN + 1), generator=generator)
        self.inputs = ids[:, :-1].contiguous().pin_memory()
        self.targets = ids[:, 1:].contiguous().pin_memory()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield {"input": self.inputs}, self.targets

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def make_trainer(size: str, micro_batch_size: int, accumulation: int, fsdp: bool):
    import torchtitan.train
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3

    if fsdp:
        exists = ParallelDims._mesh_exist
        ParallelDims.fsdp_enabled = property(lambda dims: True)
        ParallelDims._mesh_exist = lambda dims, name, degree: (
            name == "fsdp" or exists(dims, name, degree)
        )
    arguments = llama3.TransformerModelArgs(
        n_heads=32, n_kv_heads=8, rope_theta=500000, **SIZES[size]
    )
    llama3.llama3_args[size] = arguments
    batches = RandomBatches(arguments.vocab_size, micro_batch_size)
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **options: batches,
    )
    torchtitan.train.train_spec_module.get_train_spec = lambda name: spec

    job = JobConfig()
    job.model.name = "llama3"
    job.model.flavor = size
    job.training.local_batch_size = micro_batch_size
    job.training.global_batch_size = micro_batch_size * accumulation
    job.training.seq_len = SEQ_LEN
    job.activation_checkpoint.mode = "none"
    job.compile.enable = True
    job.lr_scheduler.warmup_steps = 1
    job.optimizer.lr = 3e-4
    trainer = torchtitan.train.Trainer(job)
    trainer.metrics_processor.should_log = lambda step: False
    return trainer


def measure(trainer, steps: int, warm_up: int) -> dict:
    batches = trainer.batch_generator(trainer.dataloader)
    seconds = []
    for step in range(1, 1 + 1 + warm_up + steps):
        trainer.step = step
        trainer.gc_handler.run(step)
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.train_step(batches)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    timed = spread(seconds[1 + warm_up :])
    tokens = trainer.job_config.training.global_batch_size * SEQ_LEN
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "first_step_seconds": seconds[0],
        **{f"step_seconds_{name}": value for name, value in timed.items()},
        "tokens_per_second_per_device": tokens / timed["median"],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--micro-batch-size", type=count, default=1)
    parser.add_argument("--accumulation", type=count, default=4, help="micro-batches a step")
    parser.add_argument("--fsdp", action="store_true", help="shard over the one GPU")
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--warm-up", type=count, default=3, help="steps after the first")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.torchtitan_step needs a GPU", file=sys.stderr)
        return 2
    try:
        import torchtitan  # noqa: F401
    except ImportError as error:
        print(f"benchmarks.torchtitan_step needs torchtitan ({error})", file=sys.stderr)
        return 2
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="localhost", MASTER_PORT="29501")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as our launcher
    trainer = make_trainer(args.size, args.micro_batch_size, args.accumulation, args.fsdp)
    print(json.dumps(measure(trainer, args.steps, args.warm_up), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
