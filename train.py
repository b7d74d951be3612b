"""Trains a Llama-style model with FSDP2: one run, read from top to bottom.

    ./run_train.sh configs/tiny.toml --train.steps=50        sets up, prepares the data, starts the processes
    torchrun --nproc-per-node 8 train.py configs/llama8b.toml     the processes alone, on prepared data
    python train.py configs/llama8b.toml --dry-run --world-size 8 [--gpu-memory-gib 80] [--json]     the plan only
    python train.py configs/tiny.toml --eval-only            evaluates the run's newest checkpoint
"""

import sys

import config

if __name__ == "__main__":
    # Before torch is imported: a wrong configuration fails in milliseconds.
    arguments, configuration = config.from_command_line(sys.argv[1:], __doc__)

import json
import logging
import os
import traceback
from argparse import Namespace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import checkpoint
import lifecycle
import metrics
from config import Config, ConfigError
from data.loader import DIGEST_MODULUS, Batch, Loader, check_enough, heldout_batches
from data.prepare import data_folder
from data.tokens import TokenStream, fingerprint, open_stream, read_manifest, window_count
from metrics import log
from model.generate import continue_text
from model.llama import Llama, describe, flops_per_token, initial_std, parameter_count
from optim import FiniteGuard, build_optimizer, learning_rate, set_learning_rate
from parallel.apply import parallelize
from parallel.fsdp import gather_early, reduce_gradients, reduce_unsharded, reshard
from parallel.materialize import materialize
from parallel.mesh import World, distributed, from_all_ranks, on_rank_zero
from parallel.plan import dry_run
from parallel.rebind import check_optimizer
from parallel.verify import unit_table, verify_sharding


def main(args: Namespace, cfg: Config) -> int:
    try:
        if args.dry_run:
            manifest = read_manifest(data_folder(cfg))
            windows = manifest and window_count(manifest["tokens"]["train"], cfg.train.seq_len)
            return 0 if dry_run(cfg, args, windows) else lifecycle.DOES_NOT_FIT
        with distributed(cfg) as world:
            if args.eval_only:
                evaluate_newest(cfg, world)
            else:
                run(cfg, world, args.launch)
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return lifecycle.INPUT_IS_WRONG


def run(cfg: Config, world: World, launch: str | None) -> None:
    """train() in its folder: locked, with a status that says how it goes and, at the end, how it went."""
    folder, data = config.run_folder(cfg), data_folder(cfg)
    check_enough(open_stream(data, "train", cfg.model.vocab_size), cfg.train)  # before anything is made
    start, lock = on_rank_zero(lambda: enter(cfg, world, folder, launch))
    metrics.start_logging(folder, world.rank)
    try:
        train(cfg, world, folder, start, launch)
    except BaseException as error:
        told = isinstance(error, ConfigError | FloatingPointError | KeyboardInterrupt)  # no fault of the program's
        code = lifecycle.INPUT_IS_WRONG if isinstance(error, ConfigError) else 1
        text = (str(error) or "interrupted") if told else traceback.format_exc()
        lifecycle.report_failure(folder, launch, world.rank, code, text)
        log.error("rank %d: %s", world.rank, text)
        if world.rank == 0:
            lifecycle.write_status(folder, "failed", lifecycle.read_status(folder)["step"], launch, exit_code=code)
        raise SystemExit(code) from None
    if world.rank == 0:
        lifecycle.write_status(folder, "finished", max(start, cfg.train.steps), launch)
        os.close(lock)
    logging.shutdown()


def enter(cfg: Config, world: World, folder: Path, launch: str | None) -> tuple[int, int]:
    """Makes and locks the run's folder; returns the step to go on from, and the lock. Rank 0 only."""
    lifecycle.check_folder(folder)
    start = checkpoint.choose(cfg)
    checkpoint.check_same_data(cfg, start, fingerprint(data_folder(cfg)))
    folder.mkdir(parents=True, exist_ok=True)
    lock = lifecycle.lock(folder)
    checkpoint.set_aside(cfg, start)
    lifecycle.write_status(folder, "running", start, launch)
    (folder / "config.toml").write_text(config.to_toml(cfg))
    (folder / "environment.json").write_text(json.dumps(metrics.environment(world.size, world.device), indent=2))
    return start, lock


def train(cfg: Config, world: World, folder: Path, start: int, launch: str | None) -> None:
    first = world.rank == 0
    torch.manual_seed(cfg.run.seed)
    torch.use_deterministic_algorithms(cfg.run.deterministic)

    # The data, before the minutes that a large model takes: what is wrong with it is said at once.
    data = data_folder(cfg)
    stream = open_stream(data, "train", cfg.model.vocab_size)
    heldout = open_stream(data, "heldout", cfg.model.vocab_size) if cfg.eval else None
    tokenizer_files = sorted(data.glob("tokenizer.*"))

    # The model, spread over the ranks; then where to go on: a checkpoint, else the fresh weights.
    model = build(cfg, world)
    # After sharding, so that it holds the shards. Made before, it would keep the full weights alive and update those,
    # and the model would never learn.
    optimizer = build_optimizer(model, cfg.optim)
    guard = FiniteGuard(optimizer, storage_device(cfg, world), cfg.train.skip_nonfinite)
    if start:
        checkpoint.restore(checkpoint.path_of(cfg, start), model, optimizer)
    unit_map = verify_sharding(model, cfg.parallel, world)
    check_optimizer(model, optimizer)

    recorder = metrics.Recorder(folder, cfg.log, start) if first else None
    if first:
        announce(cfg, world, model, folder, start)
        log.info(unit_table(unit_map))
        for path in tokenizer_files:
            (folder / path.name).write_bytes(path.read_bytes())
    loader = Loader(stream, cfg.train, cfg.run.seed, world.rank, world.size, start + 1, world.device.type == "cuda")
    profiler, timer = metrics.Profiler(cfg.profile, folder, world.rank), metrics.Timer()

    for step in range(start + 1, cfg.train.steps + 1):
        profiler.before_step(step)
        last, lr = step == cfg.train.steps, learning_rate(cfg.optim, config.schedule_steps(cfg), step)
        set_learning_rate(optimizer, lr)

        gather_early(model, cfg.parallel)  # the first weights travel while the host fetches the batch
        with timer.on("data"):
            batch = next(loader)

        loss_sum = torch.zeros((), device=world.device)
        for i, (inputs, targets) in enumerate(batch.micro_batches, 1):
            reduce_gradients(model, cfg.parallel, world, last_micro_batch=i == len(batch.micro_batches))
            inputs, targets = (t.to(world.device, non_blocking=True) for t in (inputs, targets))
            part, _ = model(inputs, targets)
            # FSDP2 averages gradients over the ranks. Times their number it is their sum, and over the step's valid
            # tokens the mean over tokens, however they are split over ranks and micro-batches.
            (part * (world.size / batch.tokens)).backward()
            loss_sum += part.detach()

        reduce_unsharded(model)
        grad_norm = clip(model, cfg.train.max_grad_norm)
        guard.before_update(step, grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        timer.steps += 1
        profiler.after_step(step)

        # The rest is for some steps only: a row, evaluation, a checkpoint. Here the host waits for the device.
        if step == 1 or last or step % cfg.log.every_steps == 0:
            row = summarize(cfg, world, model, step, loss_sum, grad_norm, lr, batch, timer)
            if first:
                recorder.write(row)
                log.info(metrics.console_line(row, cfg.train.steps))
            timer.restart()
        evaluate_now = cfg.eval and (last or is_due(step, cfg.eval.every_steps))
        save_now = cfg.checkpoint and (last or is_due(step, cfg.checkpoint.save_every_steps))
        if evaluate_now or save_now:
            guard.check()  # this waits for the training that is queued, so that its time is not counted as ours here
        with timer.on("excluded"):
            if evaluate_now:
                tell_evaluation(step, evaluate(model, cfg, world, heldout), recorder)
            if save_now:
                if first:
                    recorder.sync()  # the rows up to a checkpoint are on disk before it is
                state = {"step": step, "config": config.to_dict(cfg), "data": fingerprint(data), "ranks": world.size,
                         "torch": torch.__version__, "skipped_steps": guard.skipped}
                saved = checkpoint.save(cfg, step, model, optimizer, state, tokenizer_files)
                if first:
                    lifecycle.write_status(folder, "running", step, launch)
                    log.info("saved %s", saved)
    guard.check()
    loader.close()

    if start >= cfg.train.steps and cfg.checkpoint:  # what an earlier launch left undone after its last step
        if cfg.eval and not on_rank_zero(lambda: ("eval", start) in recorder.seen):
            tell_evaluation(start, evaluate(model, cfg, world, heldout), recorder)
        on_rank_zero(lambda: checkpoint.purge(cfg))
    show_sample(model, cfg, world, tokenizer_files)
    if first:
        recorder.close()


def build(cfg: Config, world: World) -> Llama:
    model = describe(cfg.model)
    parallelize(model, cfg, world)
    materialize(model, lambda name: initial_std(cfg.model, name), cfg.run.seed, world, storage_device(cfg, world))
    return model


def storage_device(cfg: Config, world: World) -> torch.device:
    """Where parameters, gradients and optimizer state stay between steps."""
    return torch.device("cpu") if cfg.parallel.cpu_offload else world.device


def clip(model: Llama, max_norm: float | str) -> torch.Tensor:
    """Scales the gradients so that their norm over all ranks is at most max_norm; returns it from before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    norm = torch.nn.utils.get_total_norm(sharded).full_tensor()
    if whole := [g for g in gradients if not isinstance(g, DTensor)]:
        norm = torch.hypot(norm, torch.nn.utils.get_total_norm(whole))
    if max_norm != "off":
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        for part in filter(None, (sharded, whole)):
            torch._foreach_mul_(part, scale)
    return norm


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def summarize(cfg: Config, world: World, model: Llama, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor,
              lr: float, batch: Batch, timer: metrics.Timer) -> dict:
    """The training row of a step, from every rank's part of it."""
    ours = {"loss_sum": loss_sum.item(), "digest": batch.digest}  # waits for the device: only now is the step over
    figures = {**timer.means(), "peak_memory_gib": metrics.peak_memory_gib(world.device)}
    ranks = from_all_ranks({**ours, **figures})
    slowest = {name: max(rank[name] for rank in ranks) for name in figures}
    tokens, peak = config.tokens_per_step(cfg), metrics.peak_flops(world.device)
    rate = tokens / world.size / slowest["step_seconds"]
    return {
        "kind": "train",
        "step": step,
        "loss": sum(rank["loss_sum"] for rank in ranks) / batch.tokens,
        "grad_norm": grad_norm.item(),
        "lr": lr,
        "tokens": step * tokens,
        "tokens_per_second_per_device": rate,
        "mfu": rate * flops_per_token(model, cfg.train.seq_len) / peak if peak else None,
        **figures,
        **({"slowest_rank": slowest} if world.size > 1 else {}),
        "batch_digest": sum(rank["digest"] for rank in ranks) % DIGEST_MODULUS,
    }


@torch.no_grad()
def evaluate(model: Llama, cfg: Config, world: World, heldout: TokenStream) -> float:
    """Mean loss over held-out tokens; the same for any number of ranks."""
    total, count = torch.zeros((), device=world.device), torch.zeros((), dtype=torch.int64, device=world.device)
    batches = cfg.eval.batches if cfg.eval else None
    for inputs, targets in heldout_batches(heldout, cfg.train, batches, world.rank, world.size):
        part, valid = model(inputs.to(world.device), targets.to(world.device))
        total += part
        count += valid
    reshard(model)
    ranks = from_all_ranks({"sum": total.item(), "count": count.item()})
    return sum(rank["sum"] for rank in ranks) / sum(rank["count"] for rank in ranks)


def tell_evaluation(step: int, loss: float, recorder: metrics.Recorder | None) -> None:
    if recorder:
        recorder.write({"kind": "eval", "step": step, "loss": loss})
        log.info("step %d  held-out loss %.4f", step, loss)


def evaluate_newest(cfg: Config, world: World) -> None:
    """--eval-only: prints the evaluation row of the run's newest checkpoint; writes nothing."""
    step = on_rank_zero(lambda: checkpoint.choose_for_evaluation(cfg))
    heldout = open_stream(data_folder(cfg), "heldout", cfg.model.vocab_size)
    model = build(cfg, world)
    checkpoint.restore(checkpoint.path_of(cfg, step), model, None)
    loss = evaluate(model, cfg, world, heldout)
    if world.rank == 0:
        print(json.dumps({"kind": "eval", "step": step, "loss": loss}))


def announce(cfg: Config, world: World, model: Llama, folder: Path, start: int) -> None:
    p, t, accumulation = cfg.parallel, cfg.train, config.accumulation_steps(cfg, world.size)
    log.info(f"{folder}: {parameter_count(model):,} parameters on {world.size} x {world.device.type} "
             f"({world.size // world.shards} replicas x {world.shards} shards), {p.param_dtype}, recompute "
             f"{p.recompute}, prefetch {p.prefetch_forward} forward, {p.prefetch_backward} backward (0: implicit)"
             f"{', compiled' * p.compile}{', offloaded to the host' * p.cpu_offload}"
             f"{', reduced once a step' * (not p.sync_every_micro_batch)}")
    log.info(f"{config.tokens_per_step(cfg):,} tokens per step = {accumulation} micro-batches x {world.size} ranks x "
             f"{t.micro_batch_size} sequences of {t.seq_len}; "
             + (f"going on after step {start}" if start else "from fresh weights"))


@torch.no_grad()
def show_sample(model: Llama, cfg: Config, world: World, tokenizer_files: list[Path]) -> None:
    """Prints what the model writes, so that a person sees what it has learnt. Silent without sentencepiece."""
    try:
        from data.tokenizer import Tokenizer

        tokenizer = Tokenizer(tokenizer_files[0]) if tokenizer_files else None
    except ImportError:
        tokenizer = None
    if not all(rank["ready"] for rank in from_all_ranks({"ready": tokenizer is not None})):
        return
    prompt = "def " if cfg.data.source == "python-stdlib" else "The "
    with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
        text = continue_text(model, tokenizer, prompt, 64, 0.8, cfg.train.seq_len, world.device, cfg.run.seed)
    reshard(model)
    if world.rank == 0:
        log.info("a sample:\n%s", text)


if __name__ == "__main__":
    sys.exit(main(arguments, configuration))
