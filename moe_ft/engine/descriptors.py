"""Number of files and sockets that a rank may open: checked at the start, raised where that is allowed."""

import os
import resource

from moe_ft.errors import ConfigError
from moe_ft.planning.levels import most_connections
from moe_ft.processes import raise_descriptors

# Connections of peers and of strangers, mapped files of regions, pools and replicas, pipes.
_NUM_OWN = 128
_NUM_SPARE = 512  # for what the job opens later: communicators, data sets, checkpoints
_OPEN_FILES = "/proc/self/fd"


def allow_descriptors(world_size: int, stage_size: int) -> None:
    """Raise the soft limit of this process to what its rank needs; call before groups are made.

    Ranks agree in groups of few, those of the job and those of the stage, and a group of gloo connects every
    rank to every other one; what Megatron has opened before counts as well. Raises ConfigError if the hard
    limit is lower.
    """
    num_open = len(os.listdir(_OPEN_FILES))
    num_others = most_connections(world_size) + most_connections(stage_size)
    needed = num_open + num_others + _NUM_OWN
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"the limit of open files (ulimit -Hn) is {hard}, and a rank of this job needs {needed}: "
            f"{num_open} are open, and sockets follow to {num_others} other ranks, and {_NUM_OWN} others. "
            f"Raise it where the job is started: ulimit -n {needed}, which may need LimitNOFILE= of systemd, "
            f"/etc/security/limits.conf or docker run --ulimit nofile={needed}."
        )
    raise_descriptors(needed + _NUM_SPARE)
