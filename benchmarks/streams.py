"""Speed of one body between two processes, over one connection and over several.

    python -m benchmarks.streams [--megabytes N] [--repetitions N] [--limit N] [--quick] [--output FILE.md]

A file in memory is read from a peer as a recovery reads it, with 1 to 8 streams in turns. On the loopback
cores are the limit. A second table stands for a network that gives each TCP connection less than the link
has: there the reader takes at most so many MB a second from each connection.
"""

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from typing import override
from unittest.mock import patch

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from moe_ft.engine.links import peers
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.links.transport import Deadline, TcpConnection
from moe_ft.files.private_files import make_private

_HOST, _TOKEN, _NAME, _INDEX = "127.0.0.1", "token", "body", "index.json"
_NUMBERS = (1, 2, 4, 8)
_STEP_BYTES = 256 << 10
_PART_BYTES = 512 << 10
_CHUNK_BYTES = 8 << 20


class _LimitedConnection(TcpConnection):
    """Receives no more than so many bytes a second."""

    bytes_per_s = 0.0

    @override
    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        for start in range(0, len(target), _STEP_BYTES):
            part = target[start : start + _STEP_BYTES]
            end_s = time.perf_counter() + len(part) / self.bytes_per_s
            super().receive_into(part, deadline)
            time.sleep(max(0.0, end_s - time.perf_counter()))


@contextmanager
def _limited(bytes_per_s: float) -> Iterator[None]:
    """Have peers connect over limited connections."""

    def connect(address: tuple[str, int], deadline: Deadline) -> TcpConnection:
        connection = _LimitedConnection(socket.create_connection(address, deadline.rest_s))
        connection.bytes_per_s = bytes_per_s
        return connection

    with patch.object(peers, "connect", connect):
        yield


def _serve(folder: str, num_bytes: int, pipe: Pipe) -> None:
    node_dir = Path(folder) / "node"
    make_private(node_dir)
    (node_dir / _NAME).write_bytes(bytes(num_bytes))
    (node_dir / _NAME).chmod(0o600)
    server = PeerServer(node_dir, _HOST)
    server.start()
    server.admit(_TOKEN)
    pipe.send(server.address)
    pipe.recv()


def measure(address: tuple[str, int], num_bytes: int, repetitions: int) -> dict[int, list[float]]:
    """Return bytes per second by number of streams."""
    rates: dict[int, list[float]] = {number: [] for number in _NUMBERS}
    for _ in range(repetitions):
        for number, found in rates.items():
            with closing(PeerConnection(address, _TOKEN, number)) as connection:
                connection.get(_NAME, 0, 1)  # connects
                begin_s = time.perf_counter()
                assert len(connection.get(_NAME)) == num_bytes
                found.append(num_bytes / (time.perf_counter() - begin_s))
    return rates


def _table(rates: dict[int, list[float]]) -> str:
    first = median(rates[1])
    rows = [
        (number, spread([each / 1e9 for each in found]), f"{median(found) / first:.2f}")
        for number, found in rates.items()
    ]
    return markdown_table(rows, ("streams", "GB/s", "next to one stream"))


def main() -> None:
    """Measure and print the tables."""
    options = read_options(
        megabytes=(512, 32), repetitions=(5, 1), limit=(100.0, 100.0, "MB/s of a connection")
    )
    num_bytes = options.megabytes << 20
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server = context.Process(target=_serve, args=(folder, num_bytes, theirs), daemon=True)
        server.start()
        address = own.recv()
        loopback = measure(address, num_bytes, options.repetitions)
        with _limited(options.limit * 1e6):
            limited = measure(address, num_bytes, options.repetitions)
        own.send(None)
        server.join()
    show(
        [
            conditions(f"{options.megabytes} MiB, median (range) of {options.repetitions}."),
            "Loopback",
            _table(loopback),
            f"Each connection limited to {options.limit:g} MB/s",
            _table(limited),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
