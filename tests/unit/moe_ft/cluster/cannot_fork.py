"""A module that lets no process be forked while a file `full` exists, as at a limit of processes."""

import errno
import os
from pathlib import Path

_fork = os.fork


def _fork_if_not_full() -> int:
    if (Path(os.environ["FOLDER"]) / "full").exists():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


os.fork = _fork_if_not_full
