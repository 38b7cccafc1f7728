"""Ports for servers that a test starts, which nobody else gets before."""

import random
import socket
from collections import deque

_PORTS = (10_000, 32_768)  # the system hands out the ports above these
_MOST_KEPT = 64

_kept: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a port of this machine that nobody listens on, and no other test gets.

    It stays bound here, without listening, until some more have been given out. So neither another process
    that asks for a free one nor an outgoing connection gets it, connections to it are refused, and a server
    that reuses addresses, as those of torch and SLURM do, can listen on it.
    """
    while True:
        reserved, port = socket.socket(), random.randrange(*_PORTS)
        try:
            reserved.bind(("127.0.0.1", port))
        except OSError:
            reserved.close()
            continue
        # Not before: two tests could bind one port, as long as neither listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _kept.append(reserved)
        if len(_kept) > _MOST_KEPT:
            _kept.popleft().close()
        return port
