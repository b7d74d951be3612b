"""A stop, from the signal to the exit code.

TERM, INT, HUP and USR1 mean the same to the launcher, to torchrun and to every rank, as does USR2,
which is what srun hands to its tasks:

1. Until the ranks take the run's folder nothing has begun, and a signal ends a process at once: the
   launcher by quit_early(), with 75, the others by default. The launcher finds that no rank has
   taken the folder, and exits with 75.
2. After that the launcher forwards the first signal to its child. torchrun hands it to its ranks,
   and waits for them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
3. In a rank, Agreement.note() keeps the signal's number in `received`. Each step all-reduces it, on
   the host, with the step's count of targets: a rank that stopped alone would leave the others
   hanging.
4. After that `stops` is true on all ranks, in the same step. train() trains it and saves, and
   Run.steps() ends. Run.end() writes the state "preempted", with the signal's name.
5. The launcher reads the exit code 75 in a rank's last report. In a SLURM job, USR1 requeues it.

A second Ctrl-C to the launcher kills all processes at once.
"""

import signal
from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """What all ranks agree on in each step: one all-reduce on the host, which never waits for the
    device."""

    def __init__(self) -> None:
        self.received = 0  # the signal that this rank knows of, by its number
        self.signal = 0  # the signal that all stop by

    @property
    def stops(self) -> bool:
        """Whether all ranks stop after this step."""
        return self.signal > 0

    def note(self, number: int, frame: Any) -> None:
        """The signal handler of a rank."""
        self.received = self.received or number

    def all_reduce(self, count: int = 0) -> int:
        """Returns the sum of all ranks' counts. A signal that a rank receives later counts at the
        next call. Collective."""
        # [0]: the count; [n]: how many ranks received signal n
        sums = torch.zeros(signal.NSIG, dtype=torch.int64)
        sums[0] = count
        if self.received:
            sums[self.received] = 1
        dist.all_reduce(sums)
        received = sums[1:].nonzero()
        if len(received):
            self.signal = int(received[-1]) + 1
        return int(sums[0])
