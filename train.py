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

import contextlib
import json
import logging
import traceback
from argparse import Namespace
from pathlib import Path

import torch

import checkpoint
import lifecycle
from config import Config, ConfigError
from data.loader import DIGEST_MODULUS, Loader, heldout_batches
from data.prepare import data_folder, identity
from data.tokens import open_stream, read_manifest, window_count
from metrics import Profiler, Recorder, Timer, console_line, environment, log, peak_flops, peak_memory_gib, start_logging
from model.generate import continue_text
from model.llama import Llama, flops_per_token, initial_std, parameter_count
from optim import FiniteGuard, build_optimizer, learning_rate, set_learning_rate
from parallel.apply import parallelize
from parallel.fsdp import gather_early, reduce_gradients, reshard
from parallel.materialize import materialize
from parallel.mesh import World, distributed, from_all_ranks, on_rank_zero
from parallel.plan import dry_run


def main(args: Namespace, cfg: Config) -> int:
    try:
        if args.dry_run:
            manifest = read_manifest(data_folder(cfg))
            windows = manifest and window_count(manifest["tokens"]["train"], cfg.train.seq_len)
            return 0 if dry_run(cfg, args, windows) else 3
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
    """Sets a run's folder up around train(), and leaves its status and its first cause of failure behind."""
    folder, first = config.run_folder(cfg), world.rank == 0
    with contextlib.ExitStack() as held:
        def enter() -> int:
            lifecycle.check_folder(folder)
            start = checkpoint.choose(cfg)
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lifecycle.locked(folder))
            if cfg.checkpoint:
                checkpoint.set_aside(cfg, start)
            lifecycle.write_status(folder, "running", start, launch)
            (folder / "config.toml").write_text(config.to_toml(cfg))
            (folder / "environment.json").write_text(json.dumps(environment(world.size, world.device), indent=2))
            return start

        start = on_rank_zero(enter)
        start_logging(folder, world.rank)
        try:
            train(cfg, world, folder, start, launch)
        except BaseException as error:
            where = f"rank {world.rank}: "
            if isinstance(error, ConfigError):
                log.error("%s%s", where, error)
            else:
                log.error("%s%s", where, traceback.format_exc())
            if first:
                code = lifecycle.INPUT_IS_WRONG if isinstance(error, ConfigError) else 1
                step = lifecycle.read_status(folder).get("step", start)
                lifecycle.write_status(folder, "failed", step, launch, exit_code=code)
            raise
        if first:
            lifecycle.write_status(folder, "finished", max(start, cfg.train.steps), launch)
        logging.shutdown()


def train(cfg: Config, world: World, folder: Path, start: int, launch: str | None) -> None:
    first = world.rank == 0
    torch.manual_seed(cfg.run.seed)
    torch.use_deterministic_algorithms(cfg.run.deterministic)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU; a CPU does not know it

    # The data, before the minutes that a large model takes: what is wrong with it is said at once.
    data = data_folder(cfg)
    stream = open_stream(data, "train", cfg.model.vocab_size)
    heldout = open_stream(data, "heldout", cfg.model.vocab_size) if cfg.eval else None
    tokenizer_files = sorted(data.glob("tokenizer.*"))

    # The model: described on meta, spread over the ranks, then given storage and weights rank by rank.
    model, optimizer = build(cfg, world)
    guard = FiniteGuard(optimizer, world.device, cfg.train.skip_nonfinite)
    flops, peak = flops_per_token(model, cfg.train.seq_len), peak_flops(world.device)

    # Where to go on: the newest checkpoint, else the fresh weights.
    if start:
        checkpoint.restore(checkpoint.path_of(cfg, start), model, optimizer)
    recorder = Recorder(folder, cfg.log, start) if first else None
    if first:
        for path in tokenizer_files:
            (folder / path.name).write_bytes(path.read_bytes())
        announce(cfg, world, model, folder, start)
    loader = Loader(stream, cfg.train, cfg.run.seed, world.rank, world.size, start + 1, world.device.type == "cuda")
    profiler, timer = Profiler(cfg.profile, folder, world.rank), Timer()

    for step in range(start + 1, cfg.train.steps + 1):
        profiler.before_step(step)
        last, lr = step == cfg.train.steps, learning_rate(cfg.optim, config.schedule_steps(cfg), step)
        set_learning_rate(optimizer, lr)

        gather_early(model, cfg.parallel)  # the first weights travel while the host fetches the batch
        with timer.waiting_for_data():
            batch = next(loader)

        loss_sum = torch.zeros((), device=world.device)
        for i, (inputs, targets) in enumerate(batch.micro_batches, 1):
            reduce_gradients(model, cfg.parallel, last_micro_batch=i == len(batch.micro_batches))
            inputs, targets = (t.to(world.device, non_blocking=True) for t in (inputs, targets))
            part, _ = model(inputs, targets)
            # FSDP2 averages gradients over the ranks. Times their number it is their sum, and over the step's valid
            # tokens the mean over tokens, however they are split over ranks and micro-batches.
            (part * (world.size / batch.tokens)).backward()
            loss_sum += part.detach()

        grad_norm = clip(model, cfg.train.max_grad_norm)
        guard.before_update(step, grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        timer.steps += 1
        profiler.after_step(step)

        # From here on now and then: rows, evaluation, checkpoint. Only here the host waits for the device.
        if step == 1 or step % cfg.log.every_steps == 0 or last:
            row = summarize(cfg, world, step, loss_sum, grad_norm, lr, batch, timer, flops, peak)
            if first:
                recorder.write(row)
                log.info(console_line(row, cfg.train.steps))
            timer.restart()
        with timer.not_counted():
            if cfg.eval and (last or is_due(step, cfg.eval.every_steps)):
                write_evaluation(step, evaluate(model, cfg, world, heldout), recorder)
            if cfg.checkpoint and (last or is_due(step, cfg.checkpoint.save_every_steps)):
                guard.check()
                if first:
                    recorder.sync()  # the rows up to a checkpoint are on disk before it is
                state = {"step": step, "tokens": step * config.tokens_per_step(cfg), "config": config.to_dict(cfg),
                         "data": identity(cfg), "ranks": world.size, "torch": torch.__version__,
                         "skipped_steps": guard.skipped}
                saved = checkpoint.save(cfg, step, model, optimizer, state, tokenizer_files)
                if first:
                    lifecycle.write_status(folder, "running", step, launch)
                    log.info("saved %s", saved)
    guard.check()
    loader.close()

    # What an earlier launch may have left undone after its last step.
    if start >= cfg.train.steps and cfg.checkpoint:
        if cfg.eval and not on_rank_zero(lambda: ("eval", start) in recorder.seen):
            write_evaluation(start, evaluate(model, cfg, world, heldout), recorder)
        on_rank_zero(lambda: checkpoint.purge(cfg))
    show_sample(model, cfg, world, tokenizer_files)
    if first:
        recorder.close()


def build(cfg: Config, world: World) -> tuple[Llama, torch.optim.AdamW]:
    with torch.device("meta"):
        model = Llama(cfg.model)
    parallelize(model, cfg, world)
    device = torch.device("cpu") if cfg.parallel.cpu_offload else world.device
    materialize(model, lambda name: initial_std(cfg.model, name), cfg.run.seed, world, device)
    # After sharding, so that it holds the shards. Made before, it would keep the full weights alive and update those,
    # and the model would never learn.
    return model, build_optimizer(model, cfg.optim)


def clip(model: Llama, max_norm: float | str) -> torch.Tensor:
    """Scales the gradients so that their norm over all ranks is at most max_norm; returns it from before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm == "off" else max_norm)
    return norm.full_tensor()


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def summarize(cfg: Config, world: World, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor, lr: float,
              batch, timer: Timer, flops: int, peak: float | None) -> dict:
    """The training row of a step, from every rank's part of it."""
    ours = {"loss_sum": loss_sum.item(), "digest": batch.digest, "peak_memory_gib": peak_memory_gib(world.device),
            **timer.means()}
    ranks = from_all_ranks(ours)
    slowest = {key: max(rank[key] for rank in ranks) for key in ("step_seconds", "data_seconds", "peak_memory_gib")}
    rate = config.tokens_per_step(cfg) / world.size / slowest["step_seconds"]
    row = {
        "kind": "train",
        "step": step,
        "loss": sum(rank["loss_sum"] for rank in ranks) / batch.tokens,
        "grad_norm": grad_norm.item(),
        "lr": lr,
        "tokens": step * config.tokens_per_step(cfg),
        "tokens_per_second_per_device": rate,
        "mfu": rate * flops / peak if peak else None,
        **{key: ours[key] for key in slowest},
        "batch_digest": sum(rank["digest"] for rank in ranks) % DIGEST_MODULUS,
    }
    return {**row, "slowest_rank": slowest} if world.size > 1 else row


@torch.no_grad()
def evaluate(model: Llama, cfg: Config, world: World, heldout) -> float:
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


def write_evaluation(step: int, loss: float, recorder: Recorder | None) -> None:
    if recorder:
        recorder.write({"kind": "eval", "step": step, "loss": loss})
        log.info("step %d  held-out loss %.4f", step, loss)


def evaluate_newest(cfg: Config, world: World) -> None:
    """--eval-only: prints the evaluation row of the run's newest checkpoint; writes nothing."""
    step = on_rank_zero(lambda: checkpoint.choose_for_evaluation(cfg))
    heldout = open_stream(data_folder(cfg), "heldout", cfg.model.vocab_size)
    model, _ = build(cfg, world)
    checkpoint.restore(checkpoint.path_of(cfg, step), model, None)
    loss = evaluate(model, cfg, world, heldout)
    if world.rank == 0:
        print(json.dumps({"kind": "eval", "step": step, "loss": loss}))


def announce(cfg: Config, world: World, model: Llama, folder: Path, start: int) -> None:
    p = cfg.parallel
    log.info("%s: %s parameters on %d x %s (%d replicas x %d shards), %s, prefetch %s, recompute %s%s",
             folder, f"{parameter_count(model):,}", world.size, world.device.type, world.size // world.shards,
             world.shards, p.param_dtype, f"{p.prefetch_forward} forward / {p.prefetch_backward} backward",
             p.recompute, ", compiled" if p.compile else "")
    log.info("%s tokens per step = %d micro-batches x %d ranks x %d sequences of %d; %s",
             f"{config.tokens_per_step(cfg):,}", config.accumulation_steps(cfg, world.size), world.size,
             cfg.train.micro_batch_size, cfg.train.seq_len,
             f"going on after step {start}" if start else "from fresh weights")


@torch.no_grad()
def show_sample(model: Llama, cfg: Config, world: World, tokenizer_files: list[Path]) -> None:
    """Prints what the model writes, so that a person sees what it has learnt. Needs sentencepiece on every rank."""
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
