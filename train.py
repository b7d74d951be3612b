"""Trains a Llama-style model with FSDP2: one run, read from top to bottom. minimal.py is the same
idea in one file.

./run_train.sh configs/tiny.toml --train.steps=50        sets up, prepares the data, starts ranks
torchrun --nproc-per-node 8 train.py configs/llama8b.toml     the ranks alone, on prepared data
python train.py configs/llama8b.toml --dry-run --world-size 8 [--gpu H100] [--json]    the plan only
python train.py configs/tiny.toml --eval-only            evaluates the run's newest checkpoint
"""

from lifecycle.rank import RankProcess

if __name__ == "__main__":
    # signal handlers and arguments first: the imports below take seconds
    process = RankProcess(__doc__)

import math
from typing import Any

import torch
from torch import Tensor

import config
from checkpoint.checkpointer import Checkpointer, State
from checkpoint.compare import data_before
from config import Config
from data.dataset import open_dataset
from data.loader import Batch, Loader
from evaluate import evaluate, evaluate_newest
from generate import log_sample
from lifecycle.run import Run
from metrics import Recorder
from model.build import meta_model
from model.llama import Llama, flops_per_token, parameter_count
from optim import (
    FiniteGuard,
    StepsWithoutTarget,
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from parallel.fsdp import set_communication, unshard_first_units
from parallel.materialize import materialize, open_pretrained
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from parallel.random_numbers import seed_micro_batch, seed_update
from parallel.ranks import on_each_rank, on_rank_zero
from parallel.verify import check_optimizer, refuse_late_state, unit_table, verify_sharding


def train(cfg: Config, world: World, run: Run) -> None:
    """One run. lifecycle/rank.py calls it on every rank, inside of the process group and of `run`,
    which watches the rank and records how the run ends."""
    # Open the data and choose the checkpoint to resume from. Nothing is written before both are
    # validated.
    dataset = open_dataset(cfg)
    checkpointer = Checkpointer(
        cfg, world, dataset.identities, dataset.tokenizer_files, report=run.log_save
    )
    start = checkpointer.start  # the step to resume after, 0 for a new run
    on_each_rank(lambda: dataset.require_same_text(data_before(cfg, start)))
    text_of_rank_zero = on_rank_zero(dataset.fingerprint)  # a node may have a copy of the data
    on_each_rank(lambda: dataset.require_same_text(text_of_rank_zero))
    pretrained = open_pretrained(cfg, start)  # the weights of a Hugging Face folder, or None
    run.attach(checkpointer)

    # 1. Build the plain model on the meta device, so that no rank ever holds the full model.
    model = meta_model(cfg.model, cfg.lora)
    # 2. Parallelize: float8, tensor and context parallelism, activation checkpointing, compilation,
    #    FSDP2.
    parallelize(model, cfg, world)
    # 3. Each rank initializes its own shards, or reads them from the Hugging Face folder.
    device = storage_device(cfg, world)
    materialize(model, cfg.run.seed, device, pretrained.read_into if pretrained else None)
    # 4. Build the optimizer after 2. and 3., which replace every parameter. An optimizer built
    #    earlier would hold the old parameters, which get no gradients: the model would never learn.
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, cfg.parallel.compile)
    # 5. When resuming, load weights and optimizer state, which overwrite those from above. Then
    #    verify everything.
    with run.phase("restore"):
        state = checkpointer.restore(model, optimizer, pretrained.base() if pretrained else None)
    units = verify_sharding(model, cfg.parallel, world)
    check_optimizer(model, optimizer)
    refuse_late_state(optimizer)

    # From here on, things are written.
    run.claim_folder(dataset.tokenizer_files)
    flops = flops_per_token(model, cfg.train.seq_len)
    recorder = Recorder(cfg, world, run.folder, start, flops, run.seconds)
    epochs = dataset.epochs(cfg.train.steps)
    recorder.log_start(parameter_count(model), unit_table(units), epochs, dataset.notes())
    # skips updates whose gradient is not finite; counts steps in which no token has a target
    guard = FiniteGuard(
        optimizer, device, cfg.train.skip_nonfinite, state.skipped_steps, state.skipped_in_a_row
    )
    without_target = StepsWithoutTarget(state.targetless_steps, state.targetless_in_a_row)
    loader = Loader(cfg, dataset, world, start + 1)
    is_due = config.evaluation_is_due(cfg, start) and not run.stop.agreed
    if is_due and not recorder.has_evaluation(start):  # the previous launch was stopped before it
        with run.phase("evaluation"):
            recorder.log_evaluation(start, evaluate(model, cfg, world, dataset, run))

    # until all steps are trained, or all ranks agree to stop
    for step in run.steps(start + 1, cfg.train.steps, loader):
        # explicit prefetch: these all-gathers overlap with loading the batch
        unshard_first_units(model, cfg.parallel)
        with run.phase("data"):
            batch = next(loader)
        sums, scalars = training_step(model, optimizer, guard, batch, step, cfg, world)

        # The host waits for the device only in steps in which a metrics row, an evaluation or a
        # checkpoint is due.
        tokens = state.tokens + (step - start) * config.tokens_per_step(cfg)
        recorder.log_step(step, tokens, batch, sums, scalars)
        without_target.count(step, batch.valid_tokens)  # raises after too many in a row
        # after SIGTERM to any rank all stop after the same step, this one or the next; also waits
        # for text that is still being prepared
        run.agree_to_continue()
        if config.evaluation_is_due(cfg, step) and not run.stop.agreed:
            with run.phase("evaluation"):
                recorder.log_evaluation(step, evaluate(model, cfg, world, dataset, run))
        # every save_every_steps, at the last step, and when stopping
        if checkpointer.is_due(step, run.stop.agreed):
            with run.phase("save"):
                skipped, skipped_in_a_row = guard.counts()
                state_now = State(
                    step=step,
                    tokens=tokens,
                    skipped_steps=skipped,
                    skipped_in_a_row=skipped_in_a_row,
                    targetless_steps=without_target.total,
                    targetless_in_a_row=without_target.in_a_row,
                )
                data = dataset.fingerprint()
                # recorder.sync: metrics are flushed to disk before the checkpoint is published
                checkpointer.save(state_now, model, optimizer, run.stop.agreed, data, recorder.sync)
        # async_save writes in the background: reported once it is done
        checkpointer.finish_pending_save()

    guard.check()  # raises if the last step's gradient was not finite
    loader.close()
    if not run.stop.agreed:
        checkpointer.purge()  # removes what keep_last and keep_every_steps do not keep
        log_sample(model, cfg, world, dataset)
    recorder.close()


def training_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    guard: FiniteGuard,
    batch: Batch,
    step: int,
    cfg: Config,
    world: World,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One optimizer step. Returns what a metrics row reports, by name: sums over this rank's
    tokens, such as the loss, and scalars that are equal on all ranks. Tensors stay on the device:
    the host does not wait for this step."""
    lr = learning_rate(cfg.optim, config.schedule_steps(cfg), step)
    set_learning_rate(optimizer, lr)
    # FSDP2 averages gradients over ranks. Multiplying by the number of ranks gives the sum;
    # dividing by the step's valid tokens, over all ranks and micro-batches, gives the mean over
    # tokens. Each rank's loader counts them without a collective: the order of the data is a
    # function of the step.
    scale = world.fsdp_size / max(1, batch.valid_tokens)
    sums: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(batch.micro_batches, 1):
        is_last = number == len(batch.micro_batches)
        set_communication(model, cfg.parallel, world, last_micro_batch=is_last)
        seed_micro_batch(cfg.run.seed, step, number, world)
        tensors = (tensor.to(world.device, non_blocking=True) for tensor in micro_batch)
        # (tokens, targets, positions, documents) -> sums over the tokens
        losses, _ = model(*tensors)
        # A non-finite loss can have finite gradients. A factor of NaN makes them, and so the global
        # norm, NaN: every rank skips the step.
        scale_or_nan = torch.where(losses["loss"].isfinite(), scale, math.nan)
        (losses["loss"] * scale_or_nan).backward()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0) + value.detach()
    # Returns the norm before clipping. A fused optimizer multiplies by the clipping factor in its
    # update, which saves a pass over the gradients: hence the argument.
    grad_norm = clip_gradients(model, optimizer, cfg.train.max_grad_norm)
    seed_update(cfg.run.seed, step, world)
    # Without a target in the global batch, all ranks leave weights and optimizer state as they are:
    # the gradients are zero, but weight decay and momentum would still change the weights.
    # A fused optimizer is always called: the device leaves weights and state alone if the norm is
    # not finite. For any other, the host waits for the norm, and skips the step.
    if batch.valid_tokens and guard.may_update(step, grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return sums, {"grad_norm": grad_norm, "lr": lr}


if __name__ == "__main__":
    # pyrefly: ignore[unbound-name]  # bound above, under the same condition
    process.main(train, evaluate_newest)
