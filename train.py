"""Trains a Llama-style model with FSDP2: one run, read from top to bottom.

    ./run_train.sh configs/tiny.toml --train.steps=50        sets up, prepares the data, starts the processes
    torchrun --nproc-per-node 8 train.py configs/llama8b.toml     the processes alone, on prepared data
    python train.py configs/llama8b.toml --dry-run --world-size 8 [--gpu H100] [--json]     the plan only
    python train.py configs/tiny.toml --eval-only            evaluates the run's newest checkpoint
"""

import gc
import signal
import sys

from lifecycle.signals import StopRequest, die_with_parent

if __name__ == "__main__":
    gc.disable()  # while importing: imports leave no garbage, and looking for it takes a fifth of their time
    stop_request = StopRequest()
    if {"--dry-run", "--eval-only"} & set(sys.argv):  # they have nothing to save
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        stop_request.listen()  # before the slow imports

import config

if __name__ == "__main__":
    # Before torch is imported: a wrong configuration fails in milliseconds.
    arguments, configuration = config.from_command_line(sys.argv[1:], __doc__)
    if arguments.launch:
        die_with_parent()

import math
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from checkpoint.checkpointer import Checkpointer, State
from config import Config, ConfigError
from data.dataset import open_dataset, samples_per_epoch
from data.loader import Batch, Loader
from evaluate import evaluate, evaluate_newest, evaluation_is_due, log_sample
from lifecycle import DOES_NOT_FIT, INPUT_IS_WRONG
from lifecycle.folder import going_on, report_failure
from lifecycle.run import Run, failed_for_good, leave
from metrics import Recorder
from model.hf_weights import weights_to_read
from model.llama import Llama, flops_per_token, meta_model, parameter_count
from optim import FiniteGuard, build_optimizer, clip_gradients, learning_rate, set_learning_rate
from parallel.context import own_places
from parallel.float8 import update_scales
from parallel.fsdp import set_gradient_sync, unshard_first_units
from parallel.materialize import materialize
from parallel.mesh import World, distributed, on_rank_zero, rank_and_size, spans_machines, storage_device
from parallel.parallelize import parallelize
from parallel.plan import dry_run
from parallel.rebind import check_optimizer
from parallel.verify import unit_table, verify_sharding


def train(cfg: Config, world: World, run: Run) -> None:
    torch.manual_seed(cfg.run.seed)
    if cfg.run.deterministic:
        torch.use_deterministic_algorithms(True)  # not to be called for nothing: it loads the compiler

    # What is trained on, and which checkpoint to resume from. Nothing is written before both are validated.
    dataset = open_dataset(cfg)
    checkpointer = Checkpointer(cfg, world, dataset.fingerprint, dataset.tokenizer_files)
    start, cfg = checkpointer.start, checkpointer.cfg  # where param_dtype = "auto" is decided
    pretrained = on_rank_zero(lambda: weights_to_read(cfg, start))
    run.attach(checkpointer)

    # 1. What is computed: a plain model on the meta device, so that no rank ever holds the whole of it.
    model = meta_model(cfg.model, cfg.lora)
    # 2. How it is parallelized: activation checkpointing, compilation, FSDP2.
    parallelize(model, cfg, world)
    # 3. Each rank fills its own shards: with initial values, or with its part of a Hugging Face folder.
    device = storage_device(cfg, world)
    materialize(model, cfg.run.seed, device, pretrained and pretrained.read_into)
    # 4. After sharding, which replaces every parameter. An optimizer made before would hold the old ones, which get no
    #    gradients: the model would never learn.
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, cfg.parallel.compile)
    # 5. Resuming, the checkpoint overwrites weights and optimizer state. What went wrong until here shows now.
    with run.phase("restore"):
        state = checkpointer.restore(model, optimizer, pretrained)
    unit_rows = verify_sharding(model, cfg.parallel, world)
    check_optimizer(model, optimizer)
    run.begin(dataset.tokenizer_files)

    guard = FiniteGuard(optimizer, device, cfg.train.skip_nonfinite, state.skipped_steps, state.skipped_in_a_row)
    recorder = Recorder(cfg, world, run.folder, start, flops_per_token(model, cfg.train.seq_len))
    recorder.log_start(parameter_count(model), unit_table(unit_rows), [*spans_machines(world), *dataset.notes])
    checkpointer.on_publish(recorder.sync)  # metrics are flushed to disk before a checkpoint is published
    loader = Loader(cfg, dataset.train, dataset.weights, world.dp_rank, world.dp_size, start + 1,
                    pin=world.device.type == "cuda", places=own_places(world, cfg.train.seq_len))
    if start and evaluation_is_due(cfg, start) and not recorder.has_evaluation(start):
        with recorder.timed("paused"):  # the previous launch was stopped before this evaluation
            recorder.log_evaluation(start, evaluate(model, cfg, world, dataset, run))

    for step in run.steps(start + 1, cfg.train.steps):  # to the last one, or until all ranks agree to stop
        unshard_first_units(model, cfg.parallel)  # explicit prefetch: these all-gathers overlap with loading the batch
        with run.phase("data"), recorder.timed("data"):
            batch = next(loader)
        sums, scalars = training_step(model, optimizer, guard, batch, step, cfg, world)
        stopping = run.stopping()

        # Due in some steps only: a row of metrics, an evaluation, a checkpoint. Only those wait for the device.
        tokens = state.tokens + (step - start) * config.tokens_per_step(cfg)
        recorder.log_step(step, tokens, batch, sums, scalars)
        if evaluation_is_due(cfg, step) and not stopping:
            guard.check()  # waits for the device, so that queued training does not count as time for the evaluation
            with recorder.timed("paused"):
                recorder.log_evaluation(step, evaluate(model, cfg, world, dataset, run))
            stopping = run.stopping()
        if checkpointer.is_due(step, stopping):
            guard.check()
            with run.phase("save"), recorder.timed("paused"):
                checkpointer.save(State(step, tokens, **guard.counts()), model, optimizer, stopping)
        checkpointer.log_last_save()

    guard.check()
    loader.close()
    if not run.stopping():
        checkpointer.purge()
        log_sample(model, cfg, world, dataset)
    recorder.close()


def training_step(model: Llama, optimizer: torch.optim.Optimizer, guard: FiniteGuard, batch: Batch, step: int,
                  cfg: Config, world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One update. Returns what a row of metrics reports by name: sums over this rank's tokens, as the loss, and scalars
    that are the same on all ranks. They stay on the device: nothing here waits for it."""
    lr = learning_rate(cfg.optim, config.schedule_steps(cfg), step)
    set_learning_rate(optimizer, lr)
    sums: dict[str, Tensor] = {}
    for i, micro_batch in enumerate(batch.micro_batches, 1):
        set_gradient_sync(model, cfg.parallel, world, last_micro_batch=i == len(batch.micro_batches))
        tensors = (tensor.to(world.device, non_blocking=True) for tensor in micro_batch)
        found, _ = model(*tensors)  # sums over this micro-batch's tokens
        # FSDP2 averages gradients over ranks. Multiplying by their number makes that the sum; dividing by the step's
        # valid tokens, of all ranks and micro-batches, makes it the mean over tokens, however they are split.
        scale = world.fsdp_size / max(1, batch.valid_tokens)
        # A loss that is not finite may have finite gradients: as NaN they tell all ranks, through their norm.
        (found["loss"] * torch.where(found["loss"].isfinite(), scale, math.nan)).backward()
        for name, value in found.items():
            sums[name] = sums.get(name, 0) + value.detach()
    grad_norm = clip_gradients(model, optimizer, cfg.train.max_grad_norm)
    if guard.may_update(step, grad_norm):
        optimizer.step()
        update_scales(model)  # of weights that are all-gathered in 8 bits
    optimizer.zero_grad()
    return sums, {"grad_norm": grad_norm, "lr": lr}


def main(args: Namespace, cfg: Config, stop: StopRequest) -> int:
    launch = None if args.eval_only else args.launch  # an evaluation leaves the run as it is
    try:
        if args.dry_run:
            return 0 if dry_run(cfg, args, samples_per_epoch(cfg)) else DOES_NOT_FIT
        if code := failed_for_good(cfg, launch):
            return code
        with distributed(cfg) as world, Run(cfg, world, launch, stop) as run:
            cfg = on_rank_zero(lambda: going_on(cfg, launch))
            (evaluate_newest if args.eval_only else train)(cfg, world, run)
        return run.exit_code
    except ConfigError as error:
        # before there is a run: a device that this node lacks, other options than rank 0 has
        if not (launch and report_failure(config.run_folder(cfg), launch, rank_and_size()[0], step=0, phase="start",
                                          progress=0, exit_code=INPUT_IS_WRONG, text=str(error), final=True)):
            print(error, file=sys.stderr)
        return INPUT_IS_WRONG


if __name__ == "__main__":
    gc.freeze()  # what imports have made stays: collections need not look through it
    gc.enable()
    try:
        exit_code = main(arguments, configuration, stop_request)
    except SystemExit as failure:
        leave(failure.code)
    sys.exit(exit_code)
