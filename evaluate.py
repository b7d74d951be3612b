"""Validation loss, the same for any number of ranks, in training and for a run's newest checkpoint.

    ./run_train.sh configs/tiny.toml --eval-only        prints the evaluation row as JSON; writes nothing
"""

import math

import torch

import config
import metrics
from checkpoint.checkpointer import Checkpointer
from data.dataset import Dataset, open_dataset
from data.loader import validation_batches
from files import print_error, print_line
from lifecycle.run import Run, open_pretrained
from model.build import meta_model
from model.llama import Llama
from parallel.fsdp import reshard
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from ranks import all_gather_objects


def evaluation_is_due(cfg: config.Config, step: int) -> bool:
    return cfg.eval is not None and (step >= cfg.train.steps or config.is_due(step, cfg.eval.every_steps))


@torch.no_grad()
def evaluate(model: Llama, cfg: config.Config, world: World, dataset: Dataset, run: Run) -> dict | None:
    """Mean loss over the validation tokens, and for a mixture also by source: {"loss": ..., "loss_by_source": ...}.
    None if the run was asked to stop meanwhile."""
    streams = dataset.validation
    sums = torch.zeros(len(streams), dtype=torch.float64, device=world.device)
    counts = torch.zeros(len(streams), dtype=torch.int64, device=world.device)
    model.eval()
    phase = "first evaluation batch"  # the first may compile
    for i, tensors in ((i, batch) for i, stream in enumerate(streams)
                       for batch in validation_batches(stream, cfg, world)):
        with run.phase(phase):
            run.stop.start_sync()
            found, valid = model(*(tensor.to(world.device, non_blocking=True) for tensor in tensors))
            sums[i] += found["loss"]
            counts[i] += valid
            run.agree_on_stop()
            if run.stopping:
                break
        phase = "evaluation batch"
    reshard(model)
    model.train()
    if run.stopping:
        return None
    ranks = all_gather_objects((sums.tolist(), counts.tolist()))[:: world.tp]
    sums, counts = ([sum(of_source) for of_source in zip(*of_ranks)] for of_ranks in zip(*ranks))
    # sums and counts, not means of means; a mask may leave no target
    mean = [part / count if count else math.nan for part, count in zip([*sums, sum(sums)], [*counts, sum(counts)])]
    by_source = dict(zip(dataset.names, mean))
    return {"loss": mean[-1], **({"loss_by_source": by_source} if by_source else {})}


def evaluate_newest(cfg: config.Config, world: World, run: Run) -> None:
    """--eval-only: prints the evaluation row of the run's newest good checkpoint."""
    dataset = open_dataset(cfg, train=False)
    checkpointer = Checkpointer(cfg, world, dataset.fingerprint, dataset.tokenizer_files, evaluating=True)
    step = checkpointer.start
    pretrained = open_pretrained(cfg, step or 1)  # of an import, step 0, the checkpoint has all weights, too
    model = meta_model(cfg.model, cfg.lora)
    parallelize(model, cfg, world)
    materialize(model, cfg.run.seed, storage_device(cfg, world), pretrained.read_into if pretrained else None)
    checkpointer.restore(model, None, pretrained.base() if pretrained else None)
    found = evaluate(model, cfg, world, dataset, run)
    assert found is not None  # only a training run stops between batches
    if world.rank == 0:
        for problem in checkpointer.problems:
            print_error(f"corrupt, skipped: {problem}")
        print_line(metrics.as_json({"kind": "eval", "step": step, **found}))


def log_sample(model: Llama, cfg: config.Config, world: World, dataset: Dataset) -> None:
    """Logs text that the model generates, in a copy that can."""
    if config.has("generate.py"):
        import generate

        generate.log_sample(model, cfg, world, dataset)
