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
    gc.disable()  # garbage collection during imports costs a fifth of their time and frees nothing
    stop_request = StopRequest()
    if {"--dry-run", "--eval-only"} & set(sys.argv):  # nothing to save: Ctrl-C ends the process at once
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        # Before the slow imports: from now on SIGTERM, SIGINT and SIGUSR1 set a flag. All ranks agree on it between two
        # steps (run.stopping()), save and stop; during start-up they stop before step 1.
        stop_request.listen()

import config

if __name__ == "__main__":
    # Parse before importing torch: an invalid configuration fails within milliseconds.
    arguments, configuration = config.from_command_line(sys.argv[1:], __doc__)
    if arguments.launch:
        die_with_parent()

import math
from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpoint.checkpointer import Checkpointer, State
from config import Config, ConfigError
from data.dataset import open_dataset, samples_per_epoch
from data.loader import Batch, Loader
from evaluate import evaluate, evaluate_newest, evaluation_is_due, log_sample
from lifecycle import DOES_NOT_FIT, INPUT_IS_WRONG
from lifecycle.folder import report_failure, resume_once
from lifecycle.process_group import distributed
from lifecycle.run import Run, exit_immediately, final_exit_code, open_pretrained
from metrics import Recorder
from model.build import meta_model
from model.llama import Llama, flops_per_token, parameter_count
from optim import FiniteGuard, build_optimizer, clip_gradients, learning_rate, set_learning_rate
from parallel.float8 import update_scales
from parallel.fsdp import set_gradient_sync, unshard_first_units
from parallel.materialize import materialize
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from parallel.tensor import tp_warnings
from parallel.verify import check_optimizer, unit_table, verify_sharding
from planner.dry_run import dry_run
from ranks import on_rank_zero, rank_and_size


def train(cfg: Config, world: World, run: Run) -> None:
    torch.manual_seed(cfg.run.seed)
    if cfg.run.deterministic:
        torch.use_deterministic_algorithms(True)  # called only on request: it imports the compiler
        # else each all-gather's buffer would first be filled with NaN, to show reads of what nothing wrote
        torch.utils.deterministic.fill_uninitialized_memory = False

    # Open the data and choose the checkpoint to resume from. Nothing is written before both are validated.
    dataset = open_dataset(cfg)
    checkpointer = Checkpointer(cfg, world, dataset.fingerprint, dataset.tokenizer_files)
    # start: the step to resume after, 0 for a new run. A checkpoint also decides what param_dtype = "auto" means.
    start, cfg = checkpointer.start, checkpointer.cfg
    pretrained = open_pretrained(cfg, start)  # reads tensors of a Hugging Face folder; None: there is none to read
    run.attach(checkpointer)

    # 1. Build the plain model on the meta device, so that no rank ever holds the full model.
    model = meta_model(cfg.model, cfg.lora)
    # 2. Parallelize: float8, tensor and context parallelism, activation checkpointing, compilation, FSDP2.
    parallelize(model, cfg, world)
    # 3. Each rank initializes its own shards, or reads them from a Hugging Face folder.
    device = storage_device(cfg, world)
    materialize(model, cfg.run.seed, device, pretrained and pretrained.read_into)
    # 4. Build the optimizer after sharding, which replaces every parameter. An optimizer built earlier would hold the
    #    old parameters, which get no gradients: the model would never learn.
    optimizer = build_optimizer(model, cfg.optim, cfg.run.seed, cfg.parallel.compile)
    # 5. When resuming, load weights and optimizer state, which overwrite those from above. Then verify everything.
    with run.phase("restore"):
        state = checkpointer.restore(model, optimizer, pretrained and pretrained.base())
    unit_rows = verify_sharding(model, cfg.parallel, world)
    check_optimizer(model, optimizer)
    run.begin(dataset.tokenizer_files)

    guard = FiniteGuard(optimizer, device, cfg.train.skip_nonfinite, state.skipped_steps, state.skipped_in_a_row)
    recorder = Recorder(cfg, world, run.folder, start, flops_per_token(model, cfg.train.seq_len))
    recorder.log_start(parameter_count(model), unit_table(unit_rows), [*tp_warnings(world), *dataset.notes])
    checkpointer.before_publishing = recorder.sync  # metrics are flushed to disk before a checkpoint is published
    loader = Loader(cfg, dataset, world, start + 1)
    if start and evaluation_is_due(cfg, start) and not recorder.has_evaluation(start):
        with recorder.timed("paused"):  # the previous launch was stopped before this evaluation
            recorder.log_evaluation(start, evaluate(model, cfg, world, dataset, run))

    for step in run.steps(start + 1, cfg.train.steps):  # to the last step, or until all ranks agree to stop
        unshard_first_units(model, cfg.parallel)  # explicit prefetch: these all-gathers overlap with loading the batch
        with run.phase("data"), recorder.timed("data"):
            batch = next(loader)
        sums, scalars = training_step(model, optimizer, guard, batch, step, cfg, world)
        stopping = run.stopping()

        # The host waits for the device only in steps in which a metrics row, an evaluation or a checkpoint is due.
        tokens = state.tokens + (step - start) * config.tokens_per_step(cfg)
        recorder.log_step(step, tokens, batch, sums, scalars)
        if evaluation_is_due(cfg, step) and not stopping:
            guard.check()  # waits for the device: queued training must not count as time for the evaluation
            with recorder.timed("paused"):
                recorder.log_evaluation(step, evaluate(model, cfg, world, dataset, run))
            stopping = run.stopping()
        if checkpointer.is_due(step, stopping):  # every save_every_steps, at the last step, and when stopping
            guard.check()
            with run.phase("save"), recorder.timed("paused"):
                checkpointer.save(State(step, tokens, guard.skipped, guard.in_a_row), model, optimizer, stopping)
        checkpointer.log_last_save()  # async_save writes in the background: reported once it is done

    guard.check()
    loader.close()
    if not run.stopping():
        checkpointer.purge()  # removes what keep_last and keep_every_steps do not keep
        log_sample(model, cfg, world, dataset)
    recorder.close()


def training_step(model: Llama, optimizer: torch.optim.Optimizer, guard: FiniteGuard, batch: Batch, step: int,
                  cfg: Config, world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One optimizer step. Returns what a metrics row reports, by name: sums over this rank's tokens, such as the loss,
    and scalars that are equal on all ranks. Tensors stay on the device: the host does not wait for this step."""
    lr = learning_rate(cfg.optim, config.schedule_steps(cfg), step)
    set_learning_rate(optimizer, lr)
    sums: dict[str, Tensor] = {}
    for i, micro_batch in enumerate(batch.micro_batches, 1):
        set_gradient_sync(model, cfg.parallel, world, last_micro_batch=i == len(batch.micro_batches))
        tensors = (tensor.to(world.device, non_blocking=True) for tensor in micro_batch)
        losses, _ = model(*tensors)  # of tokens, targets, positions, documents; summed over the tokens
        # FSDP2 averages gradients over ranks. Multiplying by the number of ranks gives the sum; dividing by the step's
        # valid tokens, which the loader counts over all ranks and micro-batches, gives the mean over tokens.
        scale = world.fsdp_size / max(1, batch.valid_tokens)
        # A non-finite loss can have finite gradients. A NaN scale makes them, and so the global norm, NaN: every rank
        # skips the step.
        (losses["loss"] * torch.where(losses["loss"].isfinite(), scale, math.nan)).backward()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0) + value.detach()
    grad_norm = clip_gradients(model, optimizer, cfg.train.max_grad_norm)
    # Always true for a fused optimizer, which skips a non-finite step by itself; for others this waits for the norm.
    if guard.may_update(step, grad_norm):
        optimizer.step()
        update_scales(model)  # for weights that are all-gathered in float8
    optimizer.zero_grad()
    return sums, {"grad_norm": grad_norm, "lr": lr}


def main(args: Namespace, cfg: Config, stop: StopRequest) -> int:
    launch = None if args.eval_only else args.launch  # an evaluation does not touch the run's state
    try:
        if args.dry_run:
            return 0 if dry_run(cfg, args, samples_per_epoch(cfg)) else DOES_NOT_FIT
        if code := final_exit_code(cfg, launch):
            return code
        with distributed(cfg, trains=not args.eval_only) as world, Run(cfg, world, launch, stop) as run:
            if not args.eval_only:  # rank 0 decides for all: each may see a different state of a shared disk
                cfg = replace(cfg, checkpoint=on_rank_zero(lambda: resume_once(cfg, run.holder)))
            (evaluate_newest if args.eval_only else train)(cfg, world, run)
        return run.exit_code
    except ConfigError as error:
        # Raised before the run exists: this node lacks the device, or its options differ from rank 0's.
        if not (launch and report_failure(config.run_folder(cfg), launch, rank_and_size()[0], step=0, phase="start",
                                          progress=0, exit_code=INPUT_IS_WRONG, text=str(error), final=True)):
            print(error, file=sys.stderr)
        return INPUT_IS_WRONG


if __name__ == "__main__":
    gc.freeze()  # objects created by imports stay alive: exclude them from collections
    gc.enable()
    try:
        exit_code = main(arguments, configuration, stop_request)
    except SystemExit as failure:
        exit_immediately(failure.code)
    sys.exit(exit_code)
