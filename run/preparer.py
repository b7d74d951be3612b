"""The process that prepares text for a run: tools/prepare/, started by the launcher.

It goes on while the ranks train, which only read its record. If it is killed, or a disk or the
network fails, it is started again. If the text is wrong, the launcher stops the run.
"""

import contextlib
import errno
import subprocess
import time

import config
from config import ConfigError
from data.folder import is_complete, read_manifest, source_folders
from system.processes import INPUT_IS_WRONG, print_error, python_command

FIRST_PAUSE = 1.0  # seconds between two starts; doubles each time
LONGEST_PAUSE = 60.0
POLL_SECONDS = 0.05
ENDING_SECONDS = 60.0
MAIN = "from config import run_tool; from tools.prepare.prepare import main; run_tool(main)"


class Preparer:
    """The process. It ends with this one, even by kill -9, and the next resumes from its record."""

    def __init__(self, ranks: int):
        """ranks: that train on this machine."""
        self.ranks = ranks
        self.command: list[str] = []
        self.configuration = ""  # as TOML, for its stdin: a file that is edited changes nothing
        self.child: subprocess.Popen | None = None
        self.pause = FIRST_PAUSE
        self.next_start = 0.0  # the earliest time of the next start, by time.monotonic()
        self.exit_code: int | None = 0  # of the process; None while it runs

    def begin(self, cfg: config.Config) -> None:
        """Starts the process if the folders are not complete. Waits until all is prepared; of text
        that grows, until its folders have begun, and the ranks wait for the rest. Raises ConfigError
        and OSError."""
        grows = trains_meanwhile(cfg.data)
        folders = [folder for folder, _ in source_folders(cfg.data, cfg.model.vocab_size)]
        if all(is_complete(folder) for folder in folders):
            return
        ranks = self.ranks if grows else 0
        self.command = [*python_command(MAIN), "/dev/stdin", f"--beside={ranks}"]
        self.configuration = config.to_toml(cfg)
        self._start()
        while not all(is_complete(folder) or (grows and read_manifest(folder)) for folder in folders):
            if self.has_failed():
                raise ConfigError("the text cannot be prepared: see above")
            if self.exit_code and self.pause >= LONGEST_PAUSE:  # the sixth time
                raise OSError(errno.EIO, "fails again and again, see above", "preparing the text")
            time.sleep(POLL_SECONDS)
        if self.child and not grows:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(ENDING_SECONDS)  # killed now, it would leave its pool's semaphores

    def has_failed(self) -> bool:
        """Whether the text is wrong. Starts the process again if it ended otherwise."""
        if self.child is None:
            return False
        self.exit_code = self.child.poll()
        if self.exit_code in (None, 0):
            return False
        if self.exit_code == INPUT_IS_WRONG:
            return True
        if time.monotonic() > self.next_start:
            print_error(
                f"the process that prepares text ended with {self.exit_code}; starting another"
            )
            self._start()
        return False

    def _start(self) -> None:
        # in a session of its own: Ctrl-C in the terminal reaches only the launcher
        self.child = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, start_new_session=True, text=True
        )
        assert self.child.stdin  # a pipe
        with contextlib.suppress(BrokenPipeError):  # it has been killed
            self.child.stdin.write(self.configuration)
            self.child.stdin.close()
        self.exit_code = None
        self.next_start = time.monotonic() + self.pause
        self.pause = min(LONGEST_PAUSE, 2 * self.pause)

    def close(self) -> None:
        if self.child:
            self.child.kill()  # also if it is suspended
            self.child.wait()


def trains_meanwhile(data: config.Data) -> bool:
    """Whether ranks train on text while the rest is prepared."""
    return data.order == "growing" and not data.has_conversations
