"""The process that prepares text, started by the launcher: it goes on beside the run.

It is `python -m data.prepare CONFIG --beside=RANKS`, and prints to the launcher's stderr what it
does and what is wrong. The ranks only read the record. If it is killed, or the network fails, it is
started again; if the text is wrong, the run is stopped as by a signal: it saves, and ends.
"""

import subprocess
import time

import config
from config import ConfigError
from data.begin import begin_all
from data.folder import is_prepared
from data.row_format import row_format
from files import print_error, python_command

FIRST_PAUSE = 1.0  # seconds between two starts; doubles each time
LONGEST_PAUSE = 60.0
POLL_SECONDS = 0.1
TEXT_IS_WRONG = 2


class Preparer:
    def __init__(self, argv: list[str], ranks: int):
        """argv: the launcher's arguments. ranks: that train on this machine."""
        statement = "from data.prepare import main; sys.exit(main(sys.argv[1:]))"
        self.command = [*python_command(statement), *argv, f"--beside={ranks}"]
        self.child: subprocess.Popen | None = None
        self.pause = FIRST_PAUSE
        self.next_start = 0.0  # the earliest time of the next start, by time.monotonic()
        self.exit_code: int | None = 0  # of the last child; None while it runs

    def begin(self, cfg: config.Config) -> None:
        """Begins or checks the folders, and waits until a run can begin to train. Raises
        ConfigError and OSError."""
        begin_all(cfg)
        whole = row_format(cfg.data).is_whole  # whose windows are planned over all of them
        if is_prepared(cfg):
            return
        self.start()
        while not is_prepared(cfg, whole):
            if self.has_failed():
                raise ConfigError("the text is wrong: see above")
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        # in a session of its own: Ctrl-C in the terminal reaches only the launcher
        self.child = subprocess.Popen(self.command, start_new_session=True)
        self.next_start = time.monotonic() + self.pause
        self.pause = min(LONGEST_PAUSE, 2 * self.pause)

    def has_failed(self) -> bool:
        """Whether the text is wrong. Starts a process again that was killed or failed otherwise."""
        if self.child is None:
            return False
        self.exit_code = self.child.poll()
        if self.exit_code in (None, 0):
            return False
        if self.exit_code == TEXT_IS_WRONG:
            return True
        if time.monotonic() > self.next_start:
            print_error(f"what prepares text ended with {self.exit_code}; starting it again")
            self.start()
        return False

    def close(self) -> None:
        """Ends the process, even if it is stopped: the next resumes from its record."""
        if self.child and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
