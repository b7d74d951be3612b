"""Starts what follows a run, next to its ranks: tools/follow.py, in a process of its own."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import config
from config import Config
from run.folder import read_status
from system import print_error, python_command

REPO = pathlib.Path(__file__).parent.parent
# the folder and the launch before leave argv: what is left is the command line of the run
FOLLOW = "from tools.follow import launched; launched(sys.argv.pop(1), sys.argv.pop(1))"
END_SECONDS = 30.0  # for the last rows and the report, once the ranks have ended


@contextlib.contextmanager
def followed(cfg: Config, words: list[str]) -> Iterator[None]:
    """Follows a run from here to the end of the block: rows to a tracker, the comparison with the
    plan, the report. words: the command line of the run.

    The end of this process, too, closes the follower's stdin, which says that no row follows.
    """
    if not (REPO / "tools/follow.py").exists():
        if cfg.log.tracker:
            print_error(f"log.tracker: no rows are sent to {cfg.log.tracker}: tools/ is not here")
        yield
        return
    folder = config.run_folder(cfg.run)
    before = read_status(folder).get("launch") or ""
    # in its own session: Ctrl-C in the terminal is for the ranks, whose last rows it sends
    with subprocess.Popen(
        [*python_command(FOLLOW), str(folder), before, *words],
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
