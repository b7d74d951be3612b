"""From the command to the exit code: what starts the ranks, and what runs inside them around train().

launch.py    the launcher: checks, starts the ranks, turns their outcome into an exit code
command.py   how many ranks, the command that starts them, their environment, SLURM
agent.py     torchrun, without its reports
rank.py      a rank's process: device, process group, exit code
run.py       one run inside its ranks: phases, steps, how it ends
stop.py      a stop: how a signal to any process stops all ranks after the same step
watchdog.py  a failure: what ends a rank that hangs, and how the launcher finds the root cause
folder.py    the run's folder: its lock and its small files

Here stands what launcher and ranks share.
"""

import signal
from collections.abc import Callable

# exit codes
FINISHED = 0
INPUT_IS_WRONG = 2
DOES_NOT_FIT = 3
STOPPED = 75  # EX_TEMPFAIL: start again to resume

# that ask to stop
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def listen(handler: Callable) -> None:
    """Installs the handler of all signals that ask to stop, and unblocks them."""
    for number in SIGNALS:
        # under nohup it is ignored, and stays so
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
