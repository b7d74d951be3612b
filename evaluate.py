"""Validation loss, the same for any number of ranks, in training and for a run's newest checkpoint; a text sample.

    ./run_train.sh configs/tiny.toml --eval-only        prints the evaluation row as JSON; writes nothing
"""

import contextlib
import math

import torch

import config
import metrics
from checkpoint.checkpointer import Checkpointer
from config import ConfigError
from data.dataset import Dataset, open_dataset
from data.loader import validation_batches
from data.show import printable
from files import print_error, print_line
from lifecycle.run import Run, open_pretrained
from model.build import meta_model
from model.llama import Llama, parameter_count
from parallel.fsdp import reshard
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from ranks import all_gather_objects

SAMPLED_PARAMETERS = 20e9  # largest model of which a run logs a sample
SAMPLED_STEPS = 100  # fewest steps of such a run: before, the text is noise


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


@torch.no_grad()
def log_sample(model: Llama, cfg: config.Config, world: World, dataset: Dataset) -> None:
    """Logs text that the model generates. Logs none after few steps, without a tokenizer that can encode the prompt, or
    of a large model, which every token all-gathers: over nodes, 64 tokens of 70B would occupy all GPUs for minutes."""
    if cfg.train.steps < SAMPLED_STEPS or not config.has("generate.py"):
        return
    from generate import continue_text

    if parameter_count(model) > SAMPLED_PARAMETERS:
        metrics.log.info("no sample: each of its tokens would all-gather %d parameters", parameter_count(model))
        return
    prompt = "def " if "python-stdlib" in (dataset.names or [cfg.data.source]) else "The "
    can_encode = False
    with contextlib.suppress(ImportError, ConfigError, IndexError):  # IndexError: the data has no tokenizer
        from data.tokenizer import Tokenizer

        tokenizer = Tokenizer(dataset.tokenizer_files[0].parent)
        can_encode = len(tokenizer.encode([prompt])) == 1
    if not all(all_gather_objects(can_encode)):
        return
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # each length would trigger a recompilation
        text = continue_text(model, tokenizer, prompt, 64, 0.8, cfg.train.seq_len, world.device, cfg.run.seed)
    reshard(model)
    if world.rank == 0:
        metrics.log.info("a sample:\n%s", printable(text))
