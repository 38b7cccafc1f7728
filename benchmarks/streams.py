"""Speed of one body between two processes, over one connection and over several.

    python -m benchmarks.streams [--megabytes N] [--repetitions N] [--limit N] [--quick] [--output FILE.md]

A file in memory is read from a peer as a recovery reads it, with 1 to 8 streams in turns. On the loopback
cores are the limit. A second table stands for a network that gives each TCP connection less than the link
has: there the reader takes at most so many MB a second from each connection. The third one compares one
stream with a plain pair of sockets, into new memory as a recovery takes it and into memory that was used
before, and with half of a unit in pieces of 512 KiB, verified, as a rank of another layout reads it. Seconds
are those of processors, which say more than GB/s where other programs run.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from mmap import ACCESS_READ, mmap
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from typing import override

import numpy as np
from msgspec import structs

from benchmarks.conditions import versions
from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.scale import identity_of, index_of
from moe_ft.engine.links.messages import GetParts
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.links.tcp import TCP, Tcp, TcpConnection
from moe_ft.engine.links.transport import Deadline, Transport
from moe_ft.files.private_files import make_private
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.entries import UnitEntry

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


class _Limited(Tcp):
    """TCP whose connections are limited."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    @override
    def connect(self, address: tuple[str, int], deadline: Deadline) -> TcpConnection:
        connection = _LimitedConnection(super().connect(address, deadline)._socket)
        connection.bytes_per_s = self._bytes_per_s
        return connection


def _serve(folder: str, num_bytes: int, pipe: Pipe) -> None:
    node_dir = Path(folder) / "node"
    make_private(node_dir)
    content = bytes(num_bytes)
    unit = UnitEntry(0, num_bytes, 100, "full", checksum(content), ())
    index = structs.replace(
        index_of(0, identity_of(1)), file=_NAME, file_bytes=num_bytes, units={_NAME: unit}
    )
    for name, written in ((_NAME, content), (_INDEX, encode(index))):
        (node_dir / name).write_bytes(written)
        (node_dir / name).chmod(0o600)
    server = PeerServer(node_dir, _HOST)
    server.start()
    server.admit(_TOKEN)
    with socket.create_server((_HOST, 0)) as plain:
        pipe.send((server.address, plain.getsockname(), unit.checksum))
        while way := pipe.recv():
            _send_plainly(plain, way, node_dir / _NAME, num_bytes)


def _send_plainly(listener: socket.socket, way: str, path: Path, num_bytes: int) -> None:
    connection = listener.accept()[0]
    with connection, path.open("rb") as file:
        if way == "sendfile":
            connection.sendfile(file)
            return
        with mmap(file.fileno(), 0, access=ACCESS_READ) as mapping, memoryview(mapping) as content:
            for start in range(0, num_bytes, _CHUNK_BYTES):
                connection.sendall(content[start : start + _CHUNK_BYTES])


def measure(
    address: tuple[str, int], num_bytes: int, repetitions: int, transport: Transport
) -> dict[int, list[float]]:
    """Return bytes per second by number of streams."""
    rates: dict[int, list[float]] = {number: [] for number in _NUMBERS}
    for _ in range(repetitions):
        for number, found in rates.items():
            with closing(PeerConnection(address, _TOKEN, number, transport)) as connection:
                connection.get(_NAME, 0, 1)  # connects
                begin_s = time.perf_counter()
                assert len(connection.get(_NAME)) == num_bytes
                found.append(num_bytes / (time.perf_counter() - begin_s))
    return rates


def _receive_plainly(address: tuple[str, int], target: memoryview | None, num_bytes: int) -> None:
    with socket.create_connection(address) as connection:
        rest = memoryview(np.empty(num_bytes, np.uint8)) if target is None else target
        while rest:
            rest = rest[connection.recv_into(rest, min(len(rest), _CHUNK_BYTES)) :]


def _cpu_s(process: int | str) -> float:
    """Return the seconds that a process has run."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(
    found: tuple[tuple[str, int], tuple[str, int], str],
    num_bytes: int,
    repetitions: int,
    pid: int,
    pipe: Pipe,
) -> str:
    """Return a table of one stream beside plain sockets."""
    address, plain, digest = found
    ranges = tuple((start, start + _PART_BYTES) for start in range(0, num_bytes, 2 * _PART_BYTES))
    request = GetParts(_INDEX, _NAME, -1, digest, ranges)
    used = memoryview(np.ones(num_bytes, np.uint8))
    rows: dict[str, list[tuple[float, float, float]]] = {}

    def take(what: str, act: Callable[[], object], taken_bytes: int = num_bytes) -> None:
        before = time.perf_counter(), _cpu_s("self"), _cpu_s(pid)
        act()
        after = time.perf_counter(), _cpu_s("self"), _cpu_s(pid)
        seconds = [end - start for start, end in zip(before, after, strict=True)]
        billions = taken_bytes / 1e9
        rows.setdefault(what, []).append(
            (billions / seconds[0], seconds[1] / billions, seconds[2] / billions)
        )

    with closing(PeerConnection(address, _TOKEN)) as connection:
        connection.get_parts(structs.replace(request, ranges=((0, 1),)), num_bytes)  # verifies
        for _ in range(repetitions):
            take("one stream", partial(connection.get, _NAME))
            take(
                "one stream, parts",
                partial(connection.get_parts, request, num_bytes),
                len(ranges) * _PART_BYTES,
            )
            for way in ("send", "sendfile"):
                for target in (None, used):
                    pipe.send(way)
                    memory = "new memory" if target is None else "used memory"
                    act = partial(_receive_plainly, plain, target, num_bytes)
                    take(f"plain {way}, {memory}", act)
    return markdown_table(
        [
            (what, spread([each[0] for each in taken]))
            + tuple(f"{median(each[number] for each in taken):.2f}" for number in (1, 2))
            for what, taken in rows.items()
        ],
        ("one connection", "GB/s", "reader, CPU s/GB", "sender, CPU s/GB"),
    )


def _table(rates: dict[int, list[float]]) -> str:
    first = median(rates[1])
    rows = [
        (number, spread([each / 1e9 for each in found]), f"{median(found) / first:.2f}")
        for number, found in rates.items()
    ]
    return markdown_table(rows, ("streams", "GB/s", "next to one stream"))


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--limit", type=float, default=100.0, metavar="N")
    options = parse_options(parser, megabytes=32, repetitions=1)
    num_bytes = options.megabytes << 20
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server = context.Process(target=_serve, args=(folder, num_bytes, theirs), daemon=True)
        server.start()
        found = own.recv()
        loopback = measure(found[0], num_bytes, options.repetitions, TCP)
        limited = measure(found[0], num_bytes, options.repetitions, _Limited(options.limit * 1e6))
        assert server.pid is not None
        beside = compare(found, num_bytes, options.repetitions, server.pid, own)
        own.send(None)
        server.join()
    about = f"{multiprocessing.cpu_count()} cores; {options.megabytes} MiB, median (range) of "
    show(
        [
            f"{about}{options.repetitions}. {versions()}.",
            "Loopback",
            _table(loopback),
            f"Each connection limited to {options.limit:g} MB/s",
            _table(limited),
            "Beside plain sockets",
            beside,
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
