"""One rank's process, from its first line to its exit code: signal handlers, arguments, what to
run, how it ended."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import config
from config import ConfigError
from files import die_with_parent
from lifecycle import DOES_NOT_FIT, INPUT_IS_WRONG
from lifecycle.stop import StopRequest


class RankProcess:
    """Made before torch is imported, which takes seconds: an invalid configuration fails within
    milliseconds, and a signal is never missed."""

    def __init__(self, usage: str):
        """Installs the signal handlers and parses the command line; exits with 2 if it is invalid.
        usage: of --help."""
        # garbage collection during imports costs a fifth of their time and frees nothing
        gc.disable()
        self.stop = StopRequest()
        if {"--dry-run", "--eval-only"} & set(sys.argv):
            # nothing to save: Ctrl-C ends the process at once
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        else:
            # From now on SIGTERM, SIGINT and SIGUSR1 set a flag. All ranks agree on it in each step
            # (agree_to_continue()), save and stop; during start-up they stop before step 1.
            self.stop.listen()
        self.args, self.cfg = config.from_command_line(sys.argv[1:], usage)
        if self.args.launch:
            die_with_parent()
            # what follows it are options that the launcher has added: reports show those that a
            # person typed
            del sys.argv[sys.argv.index(f"--launch={self.args.launch}") + 1 :]

    def main(self, train: Callable, evaluate: Callable) -> NoReturn:
        """Runs train(cfg, world, run), or evaluate(cfg, world, run) for --eval-only, or plans;
        exits."""
        gc.freeze()  # objects created by imports stay alive: exclude them from collections
        gc.enable()
        from lifecycle.failure import exit_immediately

        try:
            if not self.args.launch:  # else the launcher did this, once for all ranks
                from data import formats

                self.cfg, _ = formats.complete(self.args, self.cfg)
            if self.args.dry_run:
                from extras.planner.dry_run import dry_run

                code = 0 if dry_run(self.cfg, self.args) else DOES_NOT_FIT
            else:
                code = self.run(evaluate if self.args.eval_only else train)
        except ConfigError as error:
            print(error, file=sys.stderr)
            code = INPUT_IS_WRONG
        except SystemExit as failure:
            # a failed rank does not wait for the others in torch's teardown
            # pyrefly: ignore[bad-argument-type]  # a number, never a text
            exit_immediately(failure.code)
        sys.exit(code)

    def run(self, work: Callable) -> int:
        """Trains or evaluates on all ranks. Returns the exit code. Raises a ConfigError that no
        launcher waits for."""
        from lifecycle.failure import final_exit_code
        from lifecycle.folder import report_failure
        from parallel.ranks import rank_and_size

        # The launcher's id for this launch: with it, failures are reported to the launcher through
        # files of the run's folder, since torchrun turns every exit code into 1. An evaluation does
        # not touch the run's state.
        launch_id = None if self.args.eval_only else self.args.launch
        try:
            code = final_exit_code(self.cfg, launch_id)
            if code:  # torchrun restarts ranks even where that cannot help
                return code
            return self.run_on_all_ranks(work, launch_id)
        except ConfigError as error:
            # Raised before the run exists: this node lacks the device, or its options differ from
            # rank 0's.
            if launch_id is None:
                raise
            rank, _, _ = rank_and_size()
            is_reported = report_failure(
                config.run_folder(self.cfg),
                launch_id,
                rank,
                step=0,
                phase="start",
                progress=0,
                exit_code=INPUT_IS_WRONG,
                text=str(error),
                final=True,
            )
            if not is_reported:
                raise
            return INPUT_IS_WRONG

    def run_on_all_ranks(self, work: Callable, launch_id: str | None) -> int:
        """Trains or evaluates with the process group of all ranks. Returns the exit code."""
        from checkpoint.checkpointer import resolve_param_dtype
        from lifecycle.folder import resume_once
        from lifecycle.process_group import distributed
        from lifecycle.run import Run, holder_of
        from parallel.ranks import on_rank_zero

        cfg = self.cfg
        # Our launcher starts all ranks, or ends them. With another, or by hand, one may be alone.
        may_be_alone = launch_id is None and "RANK" in os.environ
        while_connecting = self.stop.ends_process() if may_be_alone else None
        with distributed(cfg, while_connecting) as world:
            if not self.args.eval_only:
                # An explicit `resume = N` counts once, not again after a restart by torchrun or
                # SLURM. Rank 0 decides for all: each may see a different state of a shared disk.
                holder = holder_of(launch_id)
                cfg = replace(cfg, checkpoint=on_rank_zero(lambda: resume_once(self.cfg, holder)))
            cfg = resolve_param_dtype(cfg, world)
            with Run(cfg, world, launch_id, self.stop) as run:
                work(cfg, world, run)
            run.watch_exit()
        return run.exit_code
