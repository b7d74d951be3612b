"""The launcher: checks what one process can check, prepares the data, runs the ranks, and turns
their outcome into an exit code.

    python -m launch.launch CONFIG [--section.key=value ...]      run_train.sh execs this

Exit codes: 0 finished, 2 invalid input, 75 stopped after saving, any other a failure. torchrun exits
with 1 whatever its ranks exit with, so the code comes from their error files (run/watchdog.py). In a
SLURM job this process is the batch script. run/__init__.py says how a run stops.
"""

import os
import signal
from typing import Any

from system import FINISHED, INPUT_IS_WRONG, SIGNALS, STOPPED, listen


def quit_early(number: int, frame: Any) -> None:
    """The signal handler until the ranks start: nothing has begun."""
    os.write(2, b"stopped before the run began\n")
    os._exit(STOPPED)


if __name__ == "__main__":
    listen(quit_early)  # before the slow imports; run_train.sh blocks the signals until now

import contextlib
import functools
import importlib.util
import pathlib
import shutil
import subprocess
import uuid

import config
from checkpoint import compare
from config import Config, ConfigError, together
from data.folder import is_prepared
from launch.follower import followed
from launch.ranks import Ranks, requeue
from run.begin import ATTEMPT, CONFIG, resume_newest
from run.folder import ENDING_SECONDS, RunLock, lock, read_status
from run.watchdog import EXITED, PHASES_BEFORE_RUN, RankOutcome, read_rank_outcomes
from system import die_with_parent, print_error, print_line, python_command, visible_gpus

PREFLIGHT = "from tools.preflight import main"
PREPARE = "from tools.prepare.prepare import before_training as main"


def launch(argv: list[str]) -> int:
    """Launches the run that the command line describes, and returns the exit code. Raises
    ConfigError, for which run_tool() exits with INPUT_IS_WRONG."""
    args = config.parse_arguments(argv)
    ranks, cfg = together(Ranks.from_environment, lambda: config.load(args.config, args.overrides))
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and not args.eval_only:
        cfg = resume_newest(cfg)
    supervisor = Supervisor(cfg, ranks, argv)
    start = check(cfg, ranks, args.eval_only)
    if has_tools() and call_tool(PREFLIGHT, cfg, *(["--eval-only"] if args.eval_only else [])):
        return INPUT_IS_WRONG
    if args.eval_only:
        return supervisor.evaluate()
    folder = config.run_folder(cfg.run)
    if start >= cfg.train.steps and read_status(folder).get("state") == "finished":
        print_line(f"{folder}: finished; train.steps = {cfg.train.steps} asks for no more")
        return FINISHED
    check_folder(folder)
    prepare(cfg, ranks.job, argv)
    with followed(cfg, argv):
        code = supervisor.train()
        if code == STOPPED and ranks.job and supervisor.end:
            requeue(ranks.job, supervisor.end)
    return code


def check(cfg: Config, ranks: Ranks, evaluates: bool = False) -> int:
    """Checks what one process can check before the ranks start. Writes nothing. Returns the step to
    resume after. Raises one ConfigError with all problems."""
    (_, start, _), *_ = together(
        lambda: compare.starting_point(cfg, evaluates),
        lambda: config.mesh_shape(cfg, ranks.total),
        lambda: ranks.command(""),  # raises if srun is missing
        lambda: check_machine(cfg.run, ranks),
    )
    return start


def prepare(cfg: Config, job: str, words: list[str]) -> None:
    """Prepares the data, or checks that prepared data is up to date, in another process. Raises
    ConfigError if that fails. In a SLURM job it also raises if there is text to prepare: the GPUs
    would idle meanwhile. job: the job's id. words: the command line."""
    is_ready = is_prepared(cfg.data, cfg.model.vocab_size)
    if not has_tools():
        if is_ready:
            return
        raise ConfigError(
            "its data is not prepared, and this copy of the repository has no tools/prepare; name "
            "a prepared folder: data.path"
        )
    if job and not is_ready:
        command = config.command("-m", "prepare", *words)
        raise ConfigError(
            f"its data is not prepared, and none is inside a job: {command} prepares it, on the "
            "login node or as a job of its own (an array of N tasks does it on N machines)"
        )
    if call_tool(PREPARE, cfg):
        raise ConfigError("the text is not prepared, see above")


def has_tools() -> bool:
    return importlib.util.find_spec("tools") is not None


def call_tool(imports: str, cfg: Config, *words: str) -> int:
    """Runs a tool's main() in another process, and returns its exit code. The tool reads the
    configuration from stdin: the file may be edited meanwhile, and a pipe can be read only once."""
    # A signal ends this process at once (quit_early), and the tool with it.
    child = subprocess.Popen(
        [*python_command(f"import config; {imports}; config.run_tool(main)"), "/dev/stdin", *words],
        stdin=subprocess.PIPE,
        text=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    child.communicate(config.to_toml(cfg))
    return child.returncode


def check_machine(run: config.Run, ranks: Ranks) -> None:
    """Raises ConfigError if this machine has too few GPUs."""
    if run.device == "cuda" and visible_gpus() < ranks.local:
        raise ConfigError(
            f'[run] device = "cuda": torch can use {visible_gpus()} GPUs here, for {ranks.local} '
            "processes; NPROC sets their number, --run.device=cpu trains without GPUs"
        )


def check_folder(folder: pathlib.Path) -> None:
    """Raises ConfigError if the run's folder cannot be created or written to, or if another run uses
    it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise ConfigError(f"[run] output_dir: {existing} must be a folder that can be written to")
    if (folder / ".lock").exists():
        lock(folder, seconds=3).release()  # a killed launcher's ranks may take a moment to end


class Supervisor:
    """Starts the ranks, and restarts them after a failure that may be temporary. Each start is an
    attempt."""

    def __init__(self, cfg: Config, ranks: Ranks, words: list[str]):
        """words: the command line."""
        self.cfg = cfg
        self.ranks = ranks
        self.words = words
        self.run_folder = config.run_folder(cfg.run)
        self.environment = ranks.environment(self.run_folder, config.longest_timeout(cfg.run))
        self.signal = 0  # the first signal that asked to stop
        # The current attempt:
        self.child: Any = None  # a subprocess.Popen
        self.id = ""
        self.folder = pathlib.Path()  # holds its configuration and the ranks' error files
        self.is_retryable = True  # a restart may help
        self.end: RankOutcome | None = None  # of a rank that exited without an error

    def train(self) -> int:
        """Runs attempts until one succeeds or none is left. Returns the last one's exit code."""
        code = STOPPED
        for _ in range(self.ranks.restarts + 1):
            if self.signal:
                break
            try:
                code = self.conclude(self.start_ranks())
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self.run_folder.rmdir()  # fails unless empty: only this launch created it
            if code in (FINISHED, INPUT_IS_WRONG, STOPPED) or not self.is_retryable:
                break
            self.cfg = resume_newest(self.cfg)
        return code

    def start_ranks(self) -> int:
        """Runs the ranks once. They read the configuration from the attempt's folder, so that edits
        to the user's file change nothing. Returns their exit code."""
        self.id = uuid.uuid4().hex
        self.folder = self.run_folder / f".attempt-{self.id}"
        self.folder.mkdir(parents=True)
        (self.folder / CONFIG).write_text(config.to_toml(self.cfg))
        return self.run({ATTEMPT: str(self.folder.absolute())})

    def evaluate(self) -> int:
        """Runs ranks that write nothing: without an attempt's folder they read the configuration
        themselves. Returns their exit code."""
        returned = self.run({})
        return 128 + self.signal if self.signal and not returned else returned

    def run(self, variables: dict[str, str]) -> int:
        """Runs the ranks until they exit. Returns their exit code."""
        # In its own session: Ctrl-C in the terminal reaches only this process.
        self.child = subprocess.Popen(
            [*self.ranks.command(self.id), *self.words],
            env=self.environment | variables,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        listen(self.forward)
        if self.signal:  # received between two attempts
            self._send(self.signal)
        returned = self.child.wait()
        return 128 - returned if returned < 0 else returned

    def forward(self, number: int, frame: Any) -> None:
        """The signal handler once the ranks have started. It forwards the first signal to them. A
        Ctrl-C after that kills them."""
        if self.signal and number == signal.SIGINT:
            self.child.kill()  # torchrun's ranks die with it
        elif not self.signal:
            self.signal = number
            print_error(
                f"{signal.Signals(number).name}: stopping after this step; Ctrl-C quits at once"
            )
            self._send(number)

    def _send(self, number: int) -> None:
        # srun kills its tasks on TERM and HUP, and does not forward INT.
        by_srun = self.ranks.nodes > 1 and number != signal.SIGUSR1
        self.child.send_signal(signal.SIGUSR2 if by_srun else number)

    def conclude(self, returned: int) -> int:
        """Returns the attempt's exit code. After a failure it writes the status, which the ranks may
        have been unable to do, and prints the root cause. returned: run()'s result."""
        ranks = read_rank_outcomes(self.folder)
        has_begun = any(rank.phase not in PHASES_BEFORE_RUN for rank in ranks)
        failed = [rank for rank in ranks if rank.text]
        self.end = next((rank for rank in ranks if rank.phase == EXITED), None)
        # torchrun returns 0 if a signal reached it alone.
        ended_by_signal = returned == 0 or returned - 128 in SIGNALS
        was_asked = self.signal or (ended_by_signal and not failed)
        if self.end:
            code = self.end.exit_code
        elif was_asked and not has_begun:
            print_error("stopped before the run began")
            code = STOPPED
        else:
            code = failed[0].exit_code if failed else max(1, returned)
            self.is_retryable = all(rank.retryable for rank in failed)
        if code in (FINISHED, STOPPED):
            return code
        if has_begun or code != INPUT_IS_WRONG:
            self._mark_failed(code)
        self._print_root_cause(ranks, code)
        return code

    def _mark_failed(self, code: int) -> None:
        run_lock = RunLock(self.run_folder, self.id)
        with contextlib.suppress(ConfigError, OSError):  # another run holds the lock; a broken disk
            run_lock.acquire(ENDING_SECONDS)
            step = read_status(self.run_folder).get("step", 0)
            run_lock.write_status("failed", step, exit_code=code)
            run_lock.release()

    def _print_root_cause(self, ranks: list[RankOutcome], code: int) -> None:
        """Prints why the ranks failed, the root cause last."""
        failed = [rank for rank in ranks if rank.text]
        if not failed:
            was_killed = code == 128 + signal.SIGKILL and not self.signal
            hint = "is the host out of memory?" if was_killed else "see above"
            print_error(f"the ranks ended with exit code {code}: {hint}")
            return
        first = failed[0]
        lines = [f"failed first on {first.place}:\n{first.text}"]
        if (self.run_folder / "logs").exists():  # a run has begun here
            lines.insert(0, f"the log of every rank is in {self.run_folder}/logs")
        silent = [rank.place for rank in ranks if not rank.text]
        if silent:
            line = f"no error from {'; '.join(silent[:8])}: killed, stopped, or unable to answer"
            # A rank that exceeds a timeout was waiting for the silent ones, so they come last.
            lines.insert(len(lines) if first.is_timeout else -1, line)
        for rank in failed[1:]:
            if rank.progress == first.progress and rank.is_timeout:
                lines.append(f"as far as that: rank {rank.rank}, {rank.innermost_frame}")
        print_error("\n".join(lines))


if __name__ == "__main__":
    config.run_tool(launch)
