"""The job's store where repairs are possible: in a process of its own, so that it outlives every rank.

The zygote of the node of rank 0 forks it. It listens where rank 0 would listen otherwise. What ranks say to
each other there about repairs is rounds.py.
"""

import signal
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

CONNECT_S = 60.0


def is_shared(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher keeps the store itself."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def serve(environment: Mapping[str, str]) -> NoReturn:
    """Keep the store until this process is killed."""
    _store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
    )
    while True:
        signal.pause()


def connect(environment: Mapping[str, str]) -> Any:
    """Return a connection of its own to the store of this start.

    Raises:
        RuntimeError: if nobody listens within a minute.
    """
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=CONNECT_S),
    )
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"moe_ft/start_{start}", store)
