"""Starts tools/follow.py next to the ranks, in its own process."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import config
from config import Config
from run.folder import read_status
from system import print_error, python_command

REPO = pathlib.Path(__file__).parent.parent
# The folder and the previous launch's id leave argv. The run's command line remains.
FOLLOW = "from tools.follow import launched; launched(sys.argv.pop(1), sys.argv.pop(1))"
END_SECONDS = 30.0  # for the last rows and the report, once the ranks have ended


@contextlib.contextmanager
def followed(cfg: Config, words: list[str]) -> Iterator[None]:
    """Follows a run until the block ends: sends rows to a tracker, compares the run with the plan,
    writes the report. words: the run's command line.

    Closing the follower's stdin tells it that no more rows come. It also closes if this process dies.
    """
    if not (REPO / "tools/follow.py").exists():
        if cfg.log.tracker:
            print_error(f"log.tracker: no rows are sent to {cfg.log.tracker}: tools/ is not here")
        yield
        return
    folder = config.run_folder(cfg.run)
    previous = read_status(folder).get("launch") or ""
    # In its own session: Ctrl-C in the terminal stops the ranks, whose last rows it must still send.
    with subprocess.Popen(
        [*python_command(FOLLOW), str(folder), previous, *words],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            yield
        finally:
            assert child.stdin
            child.stdin.close()
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                print_error(f"report and last rows were not done within {END_SECONDS:g} s")
