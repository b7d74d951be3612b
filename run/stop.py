"""A stop, from the signal to the exit code.

TERM, INT, HUP and USR1 mean the same to the launcher, to torchrun and to every rank, as does USR2,
which is what srun hands to its tasks:

1. Until the ranks take the run's folder nothing has begun, and a signal ends a process at once: the
   launcher by quit_early(), with 75, the others by default. The launcher finds that no rank has
   taken the folder, and exits with 75.
2. After that the launcher forwards the first signal to its child. torchrun hands it to its ranks,
   and waits for them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
3. In a rank, Agreement.note() keeps the signal's number in `received`. Each step all-reduces it, on
   the host and overlapped with the step: a rank that stopped alone would leave the others hanging.
4. When the all-reduce ends, `stops` is true on all ranks, after the same step. train() saves, and
   Run.steps() ends. Run.end() writes the state "preempted", with the signal's name.
5. The launcher reads the exit code 75 in a rank's last report. In a SLURM job, USR1 requeues it.

A second Ctrl-C to the launcher kills all processes at once.
"""

from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """All ranks agree in each step whether to stop after it. One all-reduce on the host, which never
    waits for the device."""

    def __init__(self) -> None:
        self.received = 0  # the signal that this rank knows of, by its number
        self.signal = 0  # the signal that all stop by, as of the last finish()
        self.flag = torch.zeros(1)  # what is being all-reduced
        self.work: Any = None  # its all-reduce

    @property
    def stops(self) -> bool:
        """Whether all ranks stop after this step."""
        return self.signal > 0

    def note(self, number: int, frame: Any) -> None:
        """The signal handler of a rank."""
        self.received = self.received or number

    def begin(self) -> None:
        """Starts the all-reduce."""
        self.flag = torch.tensor([self.received])
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> None:
        """Waits for the all-reduce. A signal after its begin() counts at the next."""
        self.work.wait()
        self.signal = max(self.signal, int(self.flag))
