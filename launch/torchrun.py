"""torchrun without its failure report: the launcher prints the root cause, and no traceback should
bury it. Exits with the code of the rank that it found failed first, the lowest of several.

    python -m launch.torchrun --nproc-per-node=8 --standalone train.py CONFIG

Takes torchrun's arguments.
"""

import gc
import logging
import sys


def main() -> None:
    gc.disable()  # as in train.py
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    from files import die_with_parent
    from parallel.torch_patches import report_wait_for_nodes

    gc.enable()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    report_wait_for_nodes()
    if sys.platform != "linux":  # there the launcher has arranged it
        die_with_parent()
    try:
        run()
    except ChildFailedError as error:
        # negative if a signal ended the rank
        sys.exit(max(1, error.get_first_failure()[1].exitcode))


if __name__ == "__main__":
    main()
