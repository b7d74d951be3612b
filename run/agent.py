"""torchrun without its reports: the launcher prints the root cause, and nothing should bury it.

Takes torchrun's arguments (command.py). On a signal torchrun hands it to its ranks and waits for
them.
"""

import gc
import logging
import os
import pathlib
import signal
import sys


def main() -> None:
    gc.disable()  # it takes a fifth of the imports' time, and frees nothing
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torchrun has handlers; no traceback
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    from parallel.torch_patches import report_wait_for_nodes
    from run.begin import LAUNCH, PARENT
    from run.watchdog import report_killed

    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    report_wait_for_nodes()
    os.environ[PARENT] = str(os.getpid())
    try:
        run()
    except SignalException:
        pass  # the ranks have ended; how, stands in their files. srun would kill those of other nodes
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        for rank, failure in error.failures.items():
            # torchrun itself sends TERM to the other ranks, and KILL 30 seconds later
            is_early = failure.timestamp < first.timestamp + 10
            was_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
            if was_killed and is_early and LAUNCH in os.environ:
                report_killed(pathlib.Path(os.environ[LAUNCH]), rank, -failure.exitcode)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)
