"""Times torchtitan's training step on one GPU, as benchmarks.step times ours.

    python -m pip install torchtitan==0.2.2
    ./run_train.sh -m benchmarks.torchtitan_step 1B --micro-batch-size 2 --accumulation 4

torchtitan's own Trainer.train_step() on random tokens, compiled, without activation checkpointing,
with float32 weights and moments. On one GPU torchtitan trains without FSDP, under autocast. --fsdp
shards over the one GPU, as on every GPU of a larger run.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from benchmarks.step import spread, timed
from tools.planner.arguments import positive_integer

SEQ_LEN = 8192
# by torchtitan's names; the hidden sizes that follow are 8,192 and 14,336
SIZES = {
    "1B": {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "8B-8-layers": {"dim": 4096, "n_layers": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
}


class RandomBatches(SimpleNamespace):
    """The same micro-batch again and again, in torchtitan's form of a data loader."""

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
        ParallelDims._mesh_exist = lambda dims, name, n: name == "fsdp" or exists(dims, name, n)
    heads = {"n_heads": 32, "n_kv_heads": 8, "rope_theta": 500000}
    arguments = llama3.TransformerModelArgs(**heads, **SIZES[size])
    llama3.llama3_args[size] = arguments
    chance = torch.Generator().manual_seed(0)
    shape = (micro_batch_size, SEQ_LEN + 1)
    ids = torch.randint(arguments.vocab_size, shape, generator=chance)
    inputs, targets = (part.contiguous().pin_memory() for part in (ids[:, :-1], ids[:, 1:]))
    batches = RandomBatches(inputs=inputs, targets=targets)
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


def measure(trainer, steps: int) -> dict:
    batches = trainer.batch_generator(trainer.dataloader)

    def train(number: int, unused: None) -> None:
        trainer.step = number
        trainer.gc_handler.run(number)
        trainer.train_step(batches)

    seconds, _ = timed(train, [None] * (4 + steps), torch.device("cuda"))  # 4 warm up
    timing = spread(seconds[4:])
    tokens = trainer.job_config.training.global_batch_size * SEQ_LEN
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "first_step_seconds": seconds[0],
        "step_seconds": timing,
        "tokens_per_second_per_device": tokens / timing["median"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--micro-batch-size", type=positive_integer, default=1)
    parser.add_argument("--accumulation", type=positive_integer, default=4, help="micro-batches")
    parser.add_argument("--fsdp", action="store_true", help="shard over the one GPU")
    parser.add_argument("--steps", type=positive_integer, default=10)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.torchtitan_step needs a GPU", file=sys.stderr)
        return 2
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="localhost", MASTER_PORT="29501")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as our launcher
    trainer = make_trainer(args.size, args.micro_batch_size, args.accumulation, args.fsdp)
    print(json.dumps(measure(trainer, args.steps), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
