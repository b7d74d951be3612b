"""torchrun without its failure report: the launcher prints the root cause, and no traceback should
bury it. Exits with the code of the rank that it found failed first, the lowest of several.

    python -m launch.torchrun --nproc-per-node=8 --standalone train.py CONFIG

Takes torchrun's arguments.
"""

import gc
import logging
import platform
import sys


def main() -> None:
    gc.disable()  # as in train.py
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    gc.enable()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    report_wait_for_nodes()
    try:
        run()
    except ChildFailedError as error:
        # negative if a signal ended the rank
        sys.exit(max(1, error.get_first_failure()[1].exitcode))


def report_wait_for_nodes() -> None:
    """Has torchrun report, once it waits long, that the torchrun of another node is missing."""
    from torch.distributed.elastic.rendezvous import RendezvousInfo
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from parallel.ranks import printed_if_long

    rendezvous = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(self: DynamicRendezvousHandler) -> RendezvousInfo:
        nodes = self.settings.min_nodes
        text = f"waiting for torchrun on the other nodes: this is {platform.node()}, one of {nodes}"
        with printed_if_long(text):
            return rendezvous(self)

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous


if __name__ == "__main__":
    main()
