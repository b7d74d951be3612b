"""torchrun without its reports, which would bury the root cause that the launcher prints.

ranks.py passes torchrun's arguments. torchrun forwards signals to its ranks and waits for them.
"""

import gc
import logging
import os
import pathlib
import signal
import sys


def main() -> None:
    gc.disable()  # it takes a fifth of the imports' time and frees nothing
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, until torchrun installs handlers
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    from run.begin import ATTEMPT, PARENT
    from run.watchdog import write_killed

    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ[PARENT] = str(os.getpid())
    try:
        run()
    except SignalException:
        # Exit with 0: else srun would kill the other nodes. The error files say how the ranks ended.
        pass
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        for rank, failure in error.failures.items():
            # torchrun itself sends TERM to the other ranks, and KILL 30 seconds later
            is_early = failure.timestamp < first.timestamp + 10
            was_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
            if was_killed and is_early and ATTEMPT in os.environ:
                write_killed(pathlib.Path(os.environ[ATTEMPT]), rank, -failure.exitcode)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)
