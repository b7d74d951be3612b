"""Trains a Llama-style model with FSDP2: one run, read from top to bottom.

    ./run_train.sh configs/tiny.toml --train.steps=50        sets up, prepares the data, starts the processes
    torchrun --nproc-per-node 8 train.py configs/llama8b.toml     the processes alone, on prepared data
    python train.py configs/llama8b.toml --dry-run --world-size 8 [--gpu-memory-gib 80] [--json]     the plan only
    python train.py configs/tiny.toml --eval-only            evaluates the run's newest checkpoint
"""

import sys

from lifecycle.signals import StopRequest, Watchdog, die_with_parent

if __name__ == "__main__":
    stop_request = StopRequest()
    if not {"--dry-run", "--eval-only"} & set(sys.argv):  # those have nothing to save
        stop_request.listen()  # first of all: no signal should find the process deaf

import config

if __name__ == "__main__":
    # Before torch is imported: a wrong configuration fails in milliseconds.
    arguments, configuration = config.from_command_line(sys.argv[1:], __doc__)
    if arguments.launch:
        die_with_parent()

import contextlib
import gc
import json
import logging
import math
import os
import signal
import traceback
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import metrics
from checkpoint import catalog
from checkpoint.load import restore
from checkpoint.save import SaveFailed, Saver
from config import Config, ConfigError
from data.dataset import data_folders, is_prepared, kept_tokenizer, open_data, source_names, weights
from data.loader import DIGEST_MODULUS, Batch, Loader, heldout_batches, make_order
from data.show import printable
from data.tokens import TokenStream, fingerprint, read_manifest
from lifecycle import DOES_NOT_FIT, INPUT_IS_WRONG, STOPPED
from lifecycle import folder as run_files
from metrics import log
from model.generate import continue_text
from model.hf_weights import Weights, has_another_tokenizer, open_weights
from model.llama import Llama, flops_per_token, meta_model, parameter_count
from optim import FiniteGuard, build_optimizer, clip_gradients, learning_rate, set_learning_rate
from parallel.fsdp import reshard, set_gradient_sync, unshard_first_units
from parallel.materialize import materialize, materialize_from
from parallel.mesh import World, all_gather_objects, distributed, on_rank_zero
from parallel.parallelize import parallelize
from parallel.plan import dry_run, out_of_memory
from parallel.rebind import check_optimizer
from parallel.verify import unit_table, verify_sharding

COLLECT_EVERY_STEPS = 100  # Python's garbage; left to itself, each rank would stop for it at another moment


def main(args: Namespace, cfg: Config, stop: StopRequest) -> int:
    try:
        if args.dry_run:
            epoch = None
            if is_prepared(cfg):
                epoch = make_order(cfg, open_data(cfg, "train"), weights(cfg)).longest_epoch()
            return 0 if dry_run(cfg, args, epoch) else DOES_NOT_FIT
        for failure in run_files.failures(config.run_folder(cfg), args.launch) if args.launch else ():
            if failure["final"]:  # torchrun has started this launch again, and would once more
                return failure["exit_code"]
        with distributed(cfg) as world:
            if args.eval_only:
                evaluate_newest(cfg, world)
            elif run(cfg, world, args.launch, stop) == STOPPED and not args.launch and world.size == 1:
                return STOPPED  # a launcher takes it from the status, and torchrun would call it a failure
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return INPUT_IS_WRONG


def run(cfg: Config, world: World, launch: str | None, stop: StopRequest) -> int:
    """train() in its folder: locked, watched, with a status that says how it goes and, at the end, how it went.
    Returns 0 or STOPPED; raises SystemExit after a failure."""
    folder = config.run_folder(cfg)

    def fail(code: int, text: str, final: bool) -> None:
        run_files.report_failure(folder, launch, world.rank, watch.step, watch.name, watch.progress, code, text, final)
        if log.handlers or world.rank == 0:  # before there is a log per rank, once is enough
            log.error("rank %d, step %d, phase %s: %s", world.rank, watch.step, watch.name, text)
        if world.rank == 0 and lock is not None:
            with contextlib.suppress(OSError):
                step = run_files.read_status(folder).get("step", 0)
                run_files.write_status(folder, "failed", step, launch, exit_code=code)

    def give_up(text: str) -> None:
        fail(1, text, final=False)
        if saver:
            saver.wait(cfg.run.save_timeout_seconds)
        leave(1)

    lock, saver, watch = None, None, Watchdog(give_up)
    watch.phase("start", cfg.run.start_timeout_seconds)
    try:
        # before a folder is made
        make_order(cfg, open_data(cfg, "train"), weights(cfg))
        start, passed_over, lock = enter(cfg, world, folder, launch)
        metrics.start_logging(folder, world.rank)
        for problem in (problem for problems in passed_over.values() for problem in problems):
            log.warning("damaged, set aside: %s", problem)
        stop.alone = launch is None and world.size == 1
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.longest_timeout(cfg)))
        stop.connect(gloo, run_files.stop_file(folder, launch) if launch and world.rank == 0 else None)
        saver = Saver(cfg, {start}, kept_tokenizer(cfg)) if cfg.checkpoint else None
        last = train(cfg, world, folder, start, launch, saver, stop, watch)
    except BaseException as error:
        # Those that are no fault of the program's are told without a traceback; starting again would not help them.
        told, code, text = True, 1, str(error)
        if isinstance(error, ConfigError):
            code = INPUT_IS_WRONG
        elif isinstance(error, KeyboardInterrupt):
            code = 128 + (stop.decided or signal.SIGINT)
        elif isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
            with contextlib.suppress(Exception):  # so little memory may be left
                text = out_of_memory(cfg, world.size, text)
        elif not isinstance(error, FloatingPointError | SaveFailed):
            told, text = False, traceback.format_exc().rstrip()
        fail(code, text, final=told and not isinstance(error, SaveFailed))
        if saver:  # what is being written behind the training is good, whatever happened here
            watch.phase("save", cfg.run.save_timeout_seconds)
            saver.wait()
        raise SystemExit(code) from None
    finally:
        watch.stop()
    if world.rank == 0:
        try:
            run_files.write_status(folder, "preempted" if stop.decided else "finished", last, launch)
        except OSError as error:  # without it nobody would know: no success
            log.error("%s/status.json cannot be written: %s", folder, error)
            raise SystemExit(1) from None
        os.close(lock)
    logging.shutdown()
    return STOPPED if stop.decided else 0


def enter(cfg: Config, world: World, folder: Path, launch: str | None) -> tuple[int, dict[int, list[str]], int | None]:
    """Makes and locks the run's folder. Returns the step to go on from, what is wrong with newer checkpoints, and on
    rank 0 the lock."""
    found = on_rank_zero(lambda: (run_files.check_folder(folder), catalog.steps(cfg))[1])
    start, bad = catalog.choose(cfg, found, lambda path: problems_on_all_ranks(path, world))
    on_rank_zero(lambda: (catalog.check_same_run(cfg, start),
                          catalog.check_same_data(cfg, start, fingerprint(data_folders(cfg))),
                          start or open_weights(cfg.model)))
    held = None

    def take() -> None:
        nonlocal held
        folder.mkdir(parents=True, exist_ok=True)
        # under torchrun's restarts the life before may take a moment to die, on another node perhaps
        again = launch and run_files.read_status(folder).get("launch") == launch
        held = run_files.lock(folder, wait_seconds=30 if again else 0)
        if catalog.steps(cfg) != found:
            raise ConfigError(f"{catalog.root(cfg)}: another run has worked here meanwhile; start again")
        run_files.sweep(folder, launch)
        catalog.set_aside(cfg, start, bad)
        catalog.remove_unfinished(cfg)
        run_files.write_status(folder, "running", start, launch)
        (folder / "config.toml").write_text(config.to_toml(cfg))
        (folder / "environment.json").write_text(json.dumps(metrics.environment(world.size, world.device), indent=2))

    on_rank_zero(take)
    return start, bad, held


def problems_on_all_ranks(path: Path, world: World) -> list[str]:
    """What is wrong with a checkpoint: rank 0 looks at it first, then each rank hashes its share."""
    return on_rank_zero(lambda: catalog.at_first_sight(path)) or [
        problem for rank in all_gather_objects({"found": catalog.verify(path, world.rank, world.size)})
        for problem in rank["found"]]


def train(cfg: Config, world: World, folder: Path, start: int, launch: str | None, saver: Saver | None,
          stop: StopRequest, watch: Watchdog) -> int:
    """Returns the last step that was trained."""
    first = world.rank == 0
    torch.manual_seed(cfg.run.seed)
    torch.use_deterministic_algorithms(cfg.run.deterministic)

    # The data, before the minutes that a large model takes: what is wrong with it is said at once.
    data = data_folders(cfg)
    streams, heldout = open_data(cfg, "train"), open_data(cfg, "heldout") if cfg.eval else []
    tokenizer_files = kept_tokenizer(cfg)

    # The model, spread over the ranks; then where to go on: a checkpoint, else Hugging Face's or fresh weights.
    pretrained = None if start else on_rank_zero(lambda: open_weights(cfg.model))
    model = build(cfg, world, pretrained)
    # After sharding, so that it holds the shards. Made before, it would keep the full weights alive and update those,
    # and the model would never learn.
    optimizer = build_optimizer(model, cfg.optim)
    state = on_rank_zero(lambda: catalog.read_state(catalog.path_of(cfg, start)) if start else {})
    guard = FiniteGuard(optimizer, storage_device(cfg, world), cfg.train.skip_nonfinite, state)
    if start:
        watch.phase("restore", cfg.run.save_timeout_seconds, start)
        restore(catalog.path_of(cfg, start), model, optimizer)
        watch.phase("start", cfg.run.start_timeout_seconds)
    unit_map = verify_sharding(model, cfg.parallel, world)
    check_optimizer(model, optimizer)

    recorder = metrics.Recorder(folder, cfg.log, start) if first else None
    if saver and first:
        saver.before_publishing = recorder.sync  # the rows up to a checkpoint are on disk before it is
    if first:
        announce(cfg, world, model, folder, start)
        if pretrained and has_another_tokenizer(Path(cfg.model.init_from), tokenizer_files):
            log.warning("%s has a tokenizer, but %s was prepared with another: to these weights its tokens mean other "
                        "words; data.tokenizer names one", cfg.model.init_from, data[0])
        if (pieces := read_manifest(data[0])["vocab_size"]) < cfg.model.vocab_size:
            log.info("the tokenizer of %s has %s pieces: of the model's %s rows the rest never has a token", data[0],
                     f"{pieces:,}", f"{cfg.model.vocab_size:,}")
        log.info(unit_table(unit_map))
        for path in tokenizer_files:
            (folder / path.name).write_bytes(path.read_bytes())
    loader = Loader(cfg, streams, weights(cfg), world.dp_rank, world.dp_size, start + 1, world.device.type == "cuda")
    profiler, timer = metrics.Profiler(cfg.profile, folder, world.rank), metrics.Timer()

    stop.begin()
    stop.agreed()
    due = cfg.eval and start and (start >= cfg.train.steps or is_due(start, cfg.eval.every_steps))
    if due and not stop.decided and not on_rank_zero(lambda: ("eval", start) in recorder.seen):
        # a launch that was stopped has left it undone
        tell_evaluation(start, evaluate(model, cfg, world, heldout, stop, watch), recorder)
    gc.collect()
    gc.freeze()
    gc.disable()

    step, patience = start, cfg.run.start_timeout_seconds
    tokens = state.get("tokens", start * config.tokens_per_step(cfg))  # so far; batch and length may have changed since
    while step < cfg.train.steps and not stop.decided:
        step += 1
        tokens += config.tokens_per_step(cfg)
        watch.phase("data", patience, step)
        stop.begin()
        profiler.before_step(step)
        last, lr = step == cfg.train.steps, learning_rate(cfg.optim, config.schedule_steps(cfg), step)
        set_learning_rate(optimizer, lr)

        unshard_first_units(model, cfg.parallel)  # the first weights travel while the host fetches the batch
        with timer.on("data"):
            batch = next(loader)

        watch.phase("forward and backward", patience)
        loss_sum = torch.zeros((), device=world.device)
        for i, tensors in enumerate(batch.micro_batches, 1):
            set_gradient_sync(model, cfg.parallel, world, last_micro_batch=i == len(batch.micro_batches))
            part, _ = model(*(tensor.to(world.device, non_blocking=True) for tensor in tensors))
            # FSDP2 averages gradients over the ranks. Times their number it is their sum, and over the step's valid
            # tokens the mean over tokens, however they are split over ranks and micro-batches. A loss that is not
            # finite makes it NaN, and with it the gradient's norm on all ranks.
            (part * (world.dp_size / max(1, batch.valid_tokens) + 0 * part.detach())).backward()
            loss_sum += part.detach()

        watch.phase("update", patience)
        grad_norm = clip_gradients(model, cfg.train.max_grad_norm)
        guard.before_update(step, grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        timer.steps += 1
        profiler.after_step(step)
        if step % COLLECT_EVERY_STEPS == 0:
            gc.collect()

        watch.phase("agree to go on", patience)
        stop.agreed()
        patience = cfg.run.step_timeout_seconds  # the first step compiles

        # The rest is for some steps only: a row, evaluation, a checkpoint. Here the host waits for the device.
        if step == 1 or last or step % cfg.log.every_steps == 0:
            row = summarize(cfg, world, model, step, tokens, loss_sum, grad_norm, lr, batch, timer)
            if first:
                recorder.write(row)
                log.info(metrics.console_line(row, cfg.train.steps))
            timer.restart()
        evaluate_now = cfg.eval and not stop.decided and (last or is_due(step, cfg.eval.every_steps))
        save_now = saver and (last or stop.decided or is_due(step, cfg.checkpoint.save_every_steps))
        if evaluate_now or save_now:
            guard.check()  # this waits for the training that is queued, so that its time is not counted as ours here
        with timer.on("excluded"):
            if evaluate_now:
                tell_evaluation(step, evaluate(model, cfg, world, heldout, stop, watch), recorder)
                save_now = save_now or (saver and stop.decided)
            if save_now:
                # the one before may be purging still, and verify old checkpoints before it counts them
                saver.hurried = bool(stop.decided)
                watch.phase("save", cfg.run.save_timeout_seconds * (2 + (cfg.checkpoint.keep_last or 0)))
                tell_saved(saver, folder, launch, wait=True)  # of the one before
                state = {"step": step, "tokens": tokens, "config": config.to_dict(cfg), "data": fingerprint(data),
                         "ranks": world.size, "torch": torch.__version__, **guard.counts()}
                # purging may have to read much, and who asked to stop will not wait for it
                saver.save(step, model, optimizer, state, purge=not stop.decided)
            if saver:
                must = last or bool(stop.decided)
                tell_saved(saver, folder, launch, wait=must, must=must)
    gc.enable()
    gc.unfreeze()
    guard.check()
    loader.close()

    if stop.decided:
        if step > start and not saver:
            raise KeyboardInterrupt(f"stopped after step {step} by signal {stop.decided}; without [checkpoint] nothing "
                                    "was saved")
        log.info("stopped after step %d by %s", step, signal.Signals(stop.decided).name)
    else:
        watch.phase("end", cfg.run.start_timeout_seconds)
        if saver:
            saver.purge()
        show_sample(model, cfg, world, tokenizer_files)
    if first:
        recorder.close()
    return step


def tell_saved(saver: Saver, folder: Path, launch: str | None, wait: bool = False, must: bool = False) -> None:
    """Tells how the last save went, if it is over or, with `wait`, when it is. It failed: training goes on, and the
    next checkpoint is another chance; without one (`must`) SaveFailed is raised."""
    problem, step = None, None
    try:
        step = saver.finish() if wait else saver.poll()
    except SaveFailed as error:
        if must:
            raise SaveFailed(f"the last checkpoint was not saved: {error}") from None
        problem = str(error)
    if saver.rank == 0 and saver.thread is None:
        for text in saver.warnings:
            log.warning(text)
        saver.warnings.clear()
        if problem:
            log.error("not saved, training goes on: %s", problem)
        elif step:
            log.info("saved %s", catalog.path_of(saver.cfg, step))
        if problem or step:
            with contextlib.suppress(OSError):
                status = run_files.read_status(folder)
                more = {"not_saved": problem} if problem else {}
                run_files.write_status(folder, "running", step or status.get("step", 0), launch, **more)


def leave(code: int) -> None:
    """Ends a failed process now: tear-down would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(code)


def build(cfg: Config, world: World, pretrained: Weights | None = None) -> Llama:
    model, device = meta_model(cfg.model), storage_device(cfg, world)
    parallelize(model, cfg, world)
    if pretrained:
        materialize_from(model, lambda name, offsets, out: pretrained.read_rows(name, offsets[0], out), device)
    else:
        materialize(model, cfg.run.seed, device)
    return model


def storage_device(cfg: Config, world: World) -> torch.device:
    """Where parameters, gradients and optimizer state stay between steps."""
    return torch.device("cpu") if cfg.parallel.cpu_offload else world.device


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def summarize(cfg: Config, world: World, model: Llama, step: int, tokens: int, loss_sum: torch.Tensor,
              grad_norm: torch.Tensor, lr: float, batch: Batch, timer: metrics.Timer) -> dict:
    """The training row of a step, from every rank's part of it."""
    ours = {"loss_sum": loss_sum.item(), "digest": batch.digest}  # waits for the device: only now is the step over
    figures = {**timer.means(), "peak_memory_gib": metrics.peak_memory_gib(world.device)}
    ranks = all_gather_objects({**ours, **figures})
    slowest = {name: max(rank[name] for rank in ranks) for name in figures}
    rate = config.tokens_per_step(cfg) / world.size / slowest["step_seconds"]
    peak = metrics.peak_flops(world.device)
    return {
        "kind": "train",
        "step": step,
        "loss": sum(rank["loss_sum"] for rank in ranks) / batch.valid_tokens if batch.valid_tokens else math.nan,
        "grad_norm": grad_norm.item(),
        "lr": lr,
        "tokens": tokens,
        "tokens_per_second_per_device": rate,
        "mfu": rate * flops_per_token(model, cfg.train.seq_len) / peak if peak else None,
        **figures,
        **({"slowest_rank": slowest} if world.size > 1 else {}),
        "batch_digest": sum(rank["digest"] for rank in ranks) % DIGEST_MODULUS,
    }


@torch.no_grad()
def evaluate(model: Llama, cfg: Config, world: World, heldout: list[TokenStream], stop: StopRequest | None,
             watch: Watchdog) -> dict | None:
    """Mean loss over held-out tokens, the same for any number of ranks, and of a mixture that of each source. None
    where the run was told to stop."""
    sums = torch.zeros(len(heldout), dtype=torch.float64, device=world.device)
    counts = torch.zeros(len(heldout), dtype=torch.int64, device=world.device)
    patience = cfg.run.start_timeout_seconds  # the first may compile
    for i, tensors in ((i, t) for i, s in enumerate(heldout)
                       for t in heldout_batches(s, cfg, world.dp_rank, world.dp_size)):
        watch.phase("evaluate", patience)
        patience = cfg.run.step_timeout_seconds
        if stop:
            stop.begin()
        part, valid = model(*(tensor.to(world.device) for tensor in tensors))
        sums[i] += part
        counts[i] += valid
        if stop and stop.agreed():
            break
    reshard(model)
    if stop and stop.decided:
        return None
    ranks = all_gather_objects({"sums": sums.tolist(), "counts": counts.tolist()})
    total = [(sum(rank["sums"][i] for rank in ranks), sum(rank["counts"][i] for rank in ranks))
             for i in range(len(heldout))]
    total.append((sum(part for part, _ in total), sum(count for _, count in total)))
    means = [part / count if count else math.nan for part, count in total]  # a mask may leave no target
    each = dict(zip(source_names(cfg), means))
    return {"loss": means[-1], **({"loss_by_source": each} if each else {})}


def tell_evaluation(step: int, found: dict | None, recorder: metrics.Recorder | None) -> None:
    if recorder and found is not None:
        recorder.write({"kind": "eval", "step": step, **found})
        log.info("step %d  held-out loss %.4f", step, found["loss"])


def evaluate_newest(cfg: Config, world: World) -> None:
    """--eval-only: prints the evaluation row of the run's newest good checkpoint; writes nothing."""
    found = on_rank_zero(lambda: catalog.steps(cfg))
    step, bad = catalog.newest_good(cfg, found, lambda path: problems_on_all_ranks(path, world))
    on_rank_zero(lambda: catalog.check_same_run(cfg, step, catalog.SAME_OUTPUTS))
    heldout = open_data(cfg, "heldout")
    model = build(cfg, world)
    restore(catalog.path_of(cfg, step), model, None)
    found = evaluate(model, cfg, world, heldout, None, Watchdog(lambda text: (print(text, file=sys.stderr), leave(1))))
    if world.rank == 0:
        for problem in (problem for problems in bad.values() for problem in problems):
            print(f"damaged, passed over: {problem}", file=sys.stderr)
        print(metrics.as_json({"kind": "eval", "step": step, **found}))


def announce(cfg: Config, world: World, model: Llama, folder: Path, start: int) -> None:
    p, t, accumulation = cfg.parallel, cfg.train, config.accumulation_steps(cfg, world.dp_size)
    log.info(f"{folder}: {parameter_count(model):,} parameters on {world.size} x {world.device.type} "
             f"({world.dp_replicate} replicas x {world.dp_shard} shards), {p.param_dtype}, recompute "
             f"{p.recompute}, prefetch {p.prefetch_forward} forward, {p.prefetch_backward} backward (0: implicit)"
             f"{', compiled' * p.compile}{', offloaded to the host' * p.cpu_offload}"
             f"{', reduced once a step' * (not p.sync_every_micro_batch)}")
    log.info(f"{config.tokens_per_step(cfg):,} tokens per step = {accumulation} micro-batches x {world.dp_size} ranks "
             f"x {t.micro_batch_size} sequences of {t.seq_len}; "
             + (f"going on after step {start}" if start else f"from the weights of {cfg.model.init_from}"
                if cfg.model.init_from else "from fresh weights"))


@torch.no_grad()
def show_sample(model: Llama, cfg: Config, world: World, tokenizer_files: list[Path]) -> None:
    """Prints what the model writes, so that a person sees what it has learnt. Silent without a tokenizer."""
    tokenizer = None
    with contextlib.suppress(ImportError, ConfigError):
        from data.tokenizer import Tokenizer

        tokenizer = Tokenizer(tokenizer_files[0].parent) if tokenizer_files else None
    if not all(rank["ready"] for rank in all_gather_objects({"ready": tokenizer is not None})):
        return
    prompt = "def " if "python-stdlib" in (source_names(cfg) or [cfg.data.source]) else "The "
    with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
        text = continue_text(model, tokenizer, prompt, 64, 0.8, cfg.train.seq_len, world.device, cfg.run.seed)
    reshard(model)
    if world.rank == 0:
        log.info("a sample:\n%s", printable(text))


if __name__ == "__main__":
    try:
        exit_code = main(arguments, configuration, stop_request)
    except SystemExit as failure:
        leave(failure.code)
    sys.exit(exit_code)
