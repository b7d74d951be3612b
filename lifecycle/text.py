"""How ranks agree on the text that comes next: that each can read it, and that it is the same on
all nodes.

With data.order = "growing", text may not be prepared yet, and each node may prepare a copy of its
own. No rank may begin a step whose batch another cannot read: it would wait inside a collective.
"""

import platform

from config import ConfigError
from data.loader import Loader
from lifecycle.stop import StopRequest
from parallel.ranks import all_gather_objects


class NextText:
    """The text after the current step: the next batch, and before it the validation text if an
    evaluation is due. Its state goes into the all-reduce of the stop flag."""

    def __init__(self, loader: Loader, stop: StopRequest):
        self.loader = loader
        self.stop = stop
        self.step = 0  # the last step that has begun
        # why this rank cannot read on
        self.failure: Exception | None = None

    def begin_step(self, step: int) -> None:
        self.step = step
        self.start_sync()

    def start_sync(self) -> None:
        """Starts the all-reduce of the stop flag, with the state of this rank's text."""
        is_ready = False
        try:
            is_ready = self.loader.is_ready(self.step)
        except Exception as error:  # all ranks raise it together, after a save
            self.failure = error
        has_failed = self.failure is not None
        is_waiting = not is_ready and not has_failed
        text_hash = self.loader.text_hash(self.step) if is_ready else 0
        self.stop.start_sync(is_waiting, has_failed, text_hash)

    def finish_sync(self) -> None:
        """Waits for the all-reduce, if one is under way. Collective."""
        self.stop.finish_sync()
        if self.stop.text_differs:
            self.failure = self._difference()
            self.stop.text_failed = True

    def raise_failure(self) -> None:
        """If some rank cannot read its text, raises why, on all ranks. Collective."""
        if not self.stop.text_failed:
            return
        failures = [failure for failure in all_gather_objects(self.failure) if failure]
        for failure in failures:
            if isinstance(failure, ConfigError):
                raise failure
        raise failures[0]

    def description(self) -> str:
        """What the next step waits for, for a log."""
        return self.loader.waits_for(self.step + 1)

    def _difference(self) -> ConfigError:
        """Which nodes have prepared other text than the first one. Collective."""
        growing = self.loader.dataset.growing
        assert growing
        hosts = all_gather_objects(platform.node())
        segments_of_ranks = all_gather_objects(growing.segments(self.step + 1))
        problems = []
        for host, segments in zip(hosts, segments_of_ranks):
            for stream, ours, theirs in zip(growing.sources, segments_of_ranks[0], segments):
                for number, (our_hash, their_hash) in enumerate(zip(ours, theirs)):
                    if our_hash != their_hash:
                        problems.append(
                            f"{host} has other text in segment {number} of {stream.folder} than "
                            "rank 0's node: the sources on their disks differ"
                        )
                        break
        if not problems:
            return ConfigError("the nodes have prepared other validation text than rank 0's")
        return ConfigError(*dict.fromkeys(problems))
