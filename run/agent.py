"""torchrun without its reports: the launcher prints the root cause, and nothing should bury it.

Takes torchrun's arguments (command.py). On a signal torchrun hands it to its ranks and waits for
them.
"""

import gc
import logging
import os
import pathlib
import platform
import signal
import sys


def main() -> None:
    gc.disable()  # it takes a fifth of the imports' time, and frees nothing
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torchrun has handlers; no traceback
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

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


def report_wait_for_nodes() -> None:
    """Has torchrun report that it waits for the torchrun of other nodes.

    In all versions it waits without a word, for up to ten minutes.
    Test: parallel/test_torch_patches.py, test_torchrun_reports_that_it_waits_for_other_nodes.
    """
    from torch.distributed.elastic.rendezvous import RendezvousInfo
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from parallel.ranks import printed_if_long

    next_rendezvous = DynamicRendezvousHandler.next_rendezvous

    def reported(self: DynamicRendezvousHandler) -> RendezvousInfo:
        nodes = self.settings.min_nodes
        text = f"waiting for torchrun on the other nodes: this is {platform.node()}, one of {nodes}"
        with printed_if_long(text):
            return next_rendezvous(self)

    DynamicRendezvousHandler.next_rendezvous = reported
