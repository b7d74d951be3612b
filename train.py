"""Trains a Llama-style model with FSDP2: one run, read from top to bottom. minimal.py is the same
idea in one file.

./run_train.sh configs/tiny.toml --train.steps=50        sets up, prepares the data, starts ranks
torchrun --nproc-per-node 8 train.py configs/llama8b.toml     the ranks alone, on prepared data
python train.py configs/tiny.toml --eval-only            evaluates the newest good checkpoint
"""

from run.begin import begin_rank

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    arguments, configuration = begin_rank(__doc__)

import math
from typing import Any

import torch
from torch import Tensor

import config
from checkpoint.checkpointer import Checkpointer
from config import Config
from data.dataset import open_dataset
from data.loader import Batch, Loader
from evaluate import Evaluation, evaluate_newest
from metrics import Recorder
from model.build import meta_model
from model.llama import Llama
from optim import UpdateGuard, build_optimizer, clip_gradients, learning_rate, set_learning_rate
from parallel.fsdp import set_communication, unshard_first_units
from parallel.materialize import materialize, open_pretrained
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from parallel.random_numbers import seed_micro_batch, seed_update
from parallel.verify import check_replicas, unit_table, verify
from run import rank
from run.run import Run


def train(cfg: Config, world: World, run: Run) -> None:
    """One run, on every rank, once the process group exists."""
    # Open the data and choose the checkpoint. Nothing is written before both are validated.
    dataset = open_dataset(cfg)
    checkpointer = Checkpointer(cfg, world, dataset, report=run.log_save)
    start = checkpointer.start  # the step to resume after, 0 for a new run
    pretrained = open_pretrained(cfg, start)  # the weights of a Hugging Face folder, or None

    # 1. Build the plain model on the meta device, so that no rank ever holds the full model.
    model = meta_model(cfg.model, cfg.lora)
    # 2. Parallelize: float8, tensor and context parallelism, activation checkpointing, compilation,
    #    FSDP2.
    parallelize(model, cfg, world)
    # 3. Each rank initializes its own shards, or reads them from the Hugging Face folder.
    device = storage_device(cfg.parallel, world)
    materialize(model, cfg.run.seed, device, pretrained.read_into if pretrained else None)
    # 4. Build the optimizer after 2. and 3., which replace every parameter. An optimizer built
    #    earlier would hold the old parameters, which get no gradients: the model would never learn.
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, cfg.parallel.compile)
    # 5. When resuming, load the checkpoint's weights and optimizer state. Then verify the model.
    with run.phase("restore"):
        progress = checkpointer.restore(model, optimizer, pretrained.base() if pretrained else None)
    units = verify(model, optimizer, cfg.parallel, world)

    warnings = run.begin(checkpointer)  # locks the run's folder; from here on, files are written
    recorder = Recorder(cfg, world, run.folder, progress, dataset, run.seconds)
    recorder.log_start(model, unit_table(units), warnings)
    guard = UpdateGuard(optimizer, device, cfg.train.skip_nonfinite, progress)
    loader = Loader(dataset, cfg.train, world, start, progress.samples)
    evaluation = Evaluation(cfg, model, world, dataset, run)
    # The previous launch may have been stopped after this step's save, before its evaluation.
    evaluation.run_if_due(start, recorder)

    # Until all steps are trained, or all ranks agree to stop.
    for step in run.steps(start + 1, cfg.train.steps):
        # Explicit prefetch: these all-gathers overlap with loading the batch.
        unshard_first_units(model, cfg.parallel)
        with run.phase("data"):
            batch = next(loader)
        # One all-reduce on the host sums the targets, and tells all ranks whether a signal asks to
        # stop after this step (run/__init__.py: how a run stops).
        batch.valid_tokens = run.agree(batch.valid_tokens)
        sums, scalars = training_step(model, optimizer, guard, batch, step, cfg, world)

        # The host waits for the device only if a metrics row, an evaluation or a checkpoint is due.
        progress.count_step(step, cfg.train, batch.valid_tokens, batch.by_source)
        recorder.log_step(progress, batch, sums, scalars, run.stops)
        evaluation.run_if_due(step, recorder)
        # A save is due every save_every_steps, at the last step, and when stopping.
        if checkpointer.is_due(step, run.stops):
            with run.phase("save"):
                guard.check()  # raises if too many gradients in a row were not finite
                check_replicas(model)  # raises if they differ
                # recorder.sync puts the rows on disk before the checkpoint is published.
                checkpointer.save(progress, model, optimizer, run.stops, recorder.sync)

    guard.check()
    loader.close()
    if not run.stops:
        # The save of a stop does not purge, and this launch may have had no step left to train.
        checkpointer.purge()
    recorder.close()


def training_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    guard: UpdateGuard,
    batch: Batch,
    step: int,
    cfg: Config,
    world: World,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One optimizer step. Returns the values of a metrics row by name: sums over this rank's tokens,
    such as the loss, and scalars that are equal on all ranks. Tensors stay on the device: with a
    fused optimizer the host does not wait for this step."""
    lr = learning_rate(cfg.optim, config.schedule_steps(cfg), step)
    set_learning_rate(optimizer, lr)
    # FSDP2 averages gradients over ranks. Multiplying by the number of ranks gives the sum;
    # dividing by the step's valid tokens, over all ranks and micro-batches, gives the mean over
    # tokens.
    scale = world.fsdp_size / max(1, batch.valid_tokens)
    sums: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(batch.micro_batches, 1):
        is_last = number == len(batch.micro_batches)
        set_communication(model, cfg.parallel, world, last_micro_batch=is_last)
        seed_micro_batch(cfg.run.seed, step, number, world)
        tensors = (tensor.to(world.device, non_blocking=True) for tensor in micro_batch)
        # (tokens, targets, positions, documents) -> sums over the tokens
        losses, _ = model(*tensors)
        # A non-finite loss can have finite gradients. Scaling by NaN makes them, and so the global
        # norm, NaN: every rank skips the step.
        scale_or_nan = torch.where(losses["loss"].isfinite(), scale, math.nan)
        (losses["loss"] * scale_or_nan).backward()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0) + value.detach()
    # Random numbers from here on are equal on all ranks, so that replicas stay equal.
    seed_update(cfg.run.seed, step, world)
    # Returns the norm before clipping. It takes the optimizer because a fused one multiplies by the
    # clipping factor in its update, which saves a pass over the gradients.
    grad_norm = clip_gradients(model, optimizer, cfg.train.max_grad_norm)
    # Without a target in the global batch, all ranks leave weights and optimizer state as they are:
    # the gradients are zero, but weight decay and momentum would still change the weights.
    # UpdateGuard: a fused optimizer skips a non-finite update itself, so that the host need not wait.
    if batch.valid_tokens and guard.may_update(step, grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return sums, {"grad_norm": grad_norm, "lr": lr}


if __name__ == "__main__":
    # pyrefly: ignore[unbound-name]  # bound above, under the same condition
    rank.main(arguments, configuration, train, evaluate_newest)
