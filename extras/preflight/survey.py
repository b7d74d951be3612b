"""All checks of the machine, in one process, before data and ranks. Together they take less than a
second, but for a name server that does not answer."""

import config
from config import ConfigError
from extras.preflight import disks, libraries, limits, network
from run.command import Ranks
from system.processes import print_error

# each (cfg, ranks) -> Iterator[Finding]
CHECKS = (
    limits.open_files,
    limits.locked_memory,
    limits.shared_memory,
    libraries.replaced_libraries,
    libraries.parts_of_cudnn,
    disks.kernel_cache,
    network.first_node,
)
# an evaluation has neither gradients nor optimizer state, writes nothing, and reads text that is
# prepared
OF_TRAINING = (
    limits.host_memory,
    disks.folders,
    disks.checkpoints,
)


def survey(cfg: config.Config, ranks: Ranks, evaluates: bool = False) -> None:
    """Prints warnings. Raises one ConfigError with every problem that would end the run. evaluates:
    it only evaluates a checkpoint."""
    problems = []
    for check in CHECKS if evaluates else CHECKS + OF_TRAINING:
        for finding in check(cfg, ranks):
            if finding.is_error:
                problems.append(finding.text)
            else:
                print_error(f"warning: {finding.text}")
    if problems:
        raise ConfigError(*problems)
