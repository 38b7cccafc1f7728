"""Speed of writing to an object store and reading back, by the ways there are.

    python -m benchmarks.object_store [--mib N] [--repetitions N] [--rate N] [--latency N] [--quick]
        [--output FILE.md]

A rank's file goes to a bucket and is read back, as the writer process does it. Servers are on the same cores:
moto, whose processor is the limit, and a small one that gives each connection so many MB/s and takes so many
ms for each request, as stores far away do. Ways take turns, each time in a process of its own:

product       `Storage.write` and `Storage.read_each`
one request   s3fs as fsspec drives it: a file whose parts go up one after the other, ranges read in turn
s3fs          parts and ranges of s3fs, eight at a time, by its own coroutines

CPU seconds are those of the client, for writing and reading one GB; memory is what its process has more of at
the most, without mapped files.
"""

import asyncio
import mmap
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from uuid import uuid4

import fsspec
from aiohttp import web

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from moe_ft.files.storage import Storage
from tests.object_store import ENVIRONMENT, ObjectStore

_PART_BYTES, _NUM_AT_A_TIME = 8 << 20, 8
_UNIT_BYTES = 11_505_664  # of an expert
_SLICE_BYTES = 256 << 10
_LOOK_S = 0.002
_HEADERS = ("server", "way", "write, MB/s", "read back, MB/s", "CPU s/GB", "memory, MiB")
_CONTEXT = multiprocessing.get_context("spawn")

Way = tuple[Callable[[str, memoryview], None], Callable[[str, int], int]]


class _Distant:
    """A server that gives each connection so many bytes a second, after so many seconds for each request.

    It knows what the ways ask for, and keeps objects in memory: its own processor time is small.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._objects: dict[str, bytes] = {}
        self._parts: dict[str, dict[int, bytes]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of S3."""
        await asyncio.sleep(self._latency_s)
        query, upload = request.query, request.query.get("uploadId", "")
        if request.method == "POST" and "uploads" in query:
            self._parts[name := uuid4().hex] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        if request.method == "POST" and upload:
            await request.read()
            parts = self._parts.pop(upload)
            self._objects[request.path] = b"".join(parts[each] for each in sorted(parts))
            return _xml("CompleteMultipartUploadResult", '<ETag>"c"</ETag>')
        if request.method == "PUT":
            content = await self._receive(request)
            if upload:
                self._parts[upload][int(query["partNumber"])] = content
            else:
                self._objects[request.path] = content
            return web.Response(headers={"ETag": '"p"'})
        if request.path in self._objects and request.method in ("GET", "HEAD"):
            return await self._send(request, memoryview(self._objects[request.path]))
        return web.Response(status=404)

    async def _pass(self, begin_s: float, num_bytes: int) -> None:
        ahead_s = num_bytes / self._bytes_per_s - (time.monotonic() - begin_s)
        if ahead_s > _LOOK_S:
            await asyncio.sleep(ahead_s)

    async def _receive(self, request: web.Request) -> bytes:
        content, begin_s = bytearray(), time.monotonic()
        async for piece in request.content.iter_chunked(_SLICE_BYTES):
            content += piece
            await self._pass(begin_s, len(content))
        return bytes(content)

    async def _send(self, request: web.Request, content: memoryview) -> web.StreamResponse:
        headers = {"ETag": '"p"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
        part, status = content, 200
        if span := request.http_range if "Range" in request.headers else None:
            part, status = content[span], 206
            end = (span.start or 0) + len(part) - 1
            headers["Content-Range"] = f"bytes {span.start or 0}-{end}/{len(content)}"
        headers["Content-Length"] = str(len(part))
        answer, begin_s = web.StreamResponse(status=status, headers=headers), time.monotonic()
        await answer.prepare(request)
        for start in range(0, len(part) if request.method == "GET" else 0, _SLICE_BYTES):
            await answer.write(bytes(part[start : start + _SLICE_BYTES]))
            await self._pass(begin_s, start + _SLICE_BYTES)
        return answer


def _xml(name: str, content: str) -> web.Response:
    text = f'<?xml version="1.0"?><{name}>{content}</{name}>'
    return web.Response(text=text, content_type="application/xml")


def _serve(bytes_per_s: float, latency_s: float, pipe: Pipe) -> None:
    if not bytes_per_s:
        store = ObjectStore()
        pipe.send((store.endpoint, store.bucket()))
        pipe.recv()
        return
    app = web.Application(client_max_size=1 << 40)
    app.router.add_route("*", "/{path:.*}", _Distant(bytes_per_s, latency_s).answer)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((f"http://127.0.0.1:{listener.getsockname()[1]}", "s3://bucket"))
        threading.Thread(target=lambda: (pipe.recv(), os._exit(0)), daemon=True).start()
        web.run_app(app, sock=listener, print=None, access_log=None)


@cache
def _opened(bucket: str) -> Storage:
    return Storage(bucket).open()


def _write_by_product(url: str, content: memoryview) -> None:
    bucket, _, name = url.rpartition("/")
    _opened(bucket).write(f"{name}/file", [content], len(content))


def _read_by_product(url: str, num_bytes: int) -> int:
    bucket, _, name = url.rpartition("/")
    starts = range(0, num_bytes, _PART_BYTES)
    spans = ((f"{name}/file", start, min(_PART_BYTES, num_bytes - start)) for start in starts)
    return sum(map(len, _opened(bucket).read_each(spans)))


def _write_in_turn(url: str, content: memoryview) -> None:
    with fsspec.filesystem("s3").open(f"{url}/file", "wb") as file:
        for start in range(0, len(content), 2 * _PART_BYTES):
            file.write(content[start : start + 2 * _PART_BYTES])


def _read_in_turn(url: str, num_bytes: int) -> int:
    system, starts = fsspec.filesystem("s3"), range(0, num_bytes, _UNIT_BYTES)
    ends = (min(start + _UNIT_BYTES, num_bytes) for start in starts)
    spans = zip(starts, ends, strict=True)
    return sum(len(system.cat_file(f"{url}/file", start=a, end=b)) for a, b in spans)


def _write_by_s3fs(url: str, content: memoryview) -> None:
    system = fsspec.filesystem("s3")
    bucket, key, _ = system.split_path(f"{url}/file")
    place, starts = {"Bucket": bucket, "Key": key}, iter(range(0, len(content), _PART_BYTES))
    tags: dict[int, str] = {}

    async def send(upload: str) -> None:
        for start in starts:
            number, body = start // _PART_BYTES + 1, bytes(content[start : start + _PART_BYTES])
            part = {"PartNumber": number, "UploadId": upload, "Body": body}
            tags[number] = (await system._call_s3("upload_part", **place, **part))["ETag"]

    async def write() -> None:
        begun = await system._call_s3("create_multipart_upload", **place)
        await asyncio.gather(*(send(begun["UploadId"]) for _ in range(_NUM_AT_A_TIME)))
        parts = [{"PartNumber": each, "ETag": tags[each]} for each in sorted(tags)]
        end = {"UploadId": begun["UploadId"], "MultipartUpload": {"Parts": parts}}
        await system._call_s3("complete_multipart_upload", **place, **end)

    fsspec.asyn.sync(system.loop, write)


def _read_by_s3fs(url: str, num_bytes: int) -> int:
    system, starts, found = fsspec.filesystem("s3"), [*range(0, num_bytes, _PART_BYTES)], 0
    while starts:
        now, starts = starts[:_NUM_AT_A_TIME], starts[_NUM_AT_A_TIME:]
        ends = [min(start + _PART_BYTES, num_bytes) for start in now]
        found += sum(map(len, system.cat_ranges([f"{url}/file"] * len(now), now, ends)))
    return found


_WAYS: dict[str, Way] = {
    "product": (_write_by_product, _read_by_product),
    "one request": (_write_in_turn, _read_in_turn),
    "s3fs": (_write_by_s3fs, _read_by_s3fs),
}


def _own_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError


@contextmanager
def _watched(found: list[float]) -> Iterator[None]:
    """Append how much memory this process has more of at the most."""
    before, is_over = _own_mib(), threading.Event()

    def look() -> None:
        most = before
        while not is_over.wait(_LOOK_S):
            most = max(most, _own_mib())
        found.append(most - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _measure(way: str, path: str, url: str, environment: dict[str, str], pipe: Pipe) -> None:
    """Send the bytes per second of writing and reading, CPU seconds for a GB, and MiB."""
    os.environ |= environment
    write, read = _WAYS[way]
    with Path(path).open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    write(f"{url}-before", content[: 1 << 20])  # imports, connects
    times, memory = [time.perf_counter()], list[float]()
    cpu_s = time.process_time()
    with _watched(memory):
        write(url, content)
        times.append(time.perf_counter())
        assert read(url, len(content)) == len(content)
        times.append(time.perf_counter())
    rates = [len(content) / (end - begin) for begin, end in zip(times, times[1:], strict=False)]
    pipe.send((*rates, (time.process_time() - cpu_s) / len(content) * 1e9, *memory))


def _run(way: str, path: str, store: tuple[str, str]) -> tuple[float, ...]:
    endpoint, bucket = store
    own, theirs = _CONTEXT.Pipe()
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
    args = (way, path, f"{bucket}/{uuid4().hex}", environment, theirs)
    process = _CONTEXT.Process(target=_measure, args=args)
    process.start()
    theirs.close()
    found: tuple[float, ...] = own.recv()
    process.join()
    return found


def main() -> None:
    """Measure and print the table."""
    options = read_options(
        mib=(96, 16),
        repetitions=(5, 1),
        rate=(60.0, 60.0, "MB/s of a connection"),
        latency=(20.0, 20.0, "ms of a request"),
    )
    limits = {
        "moto": (0.0, 0.0),
        f"{options.rate:g} MB/s a connection, {options.latency:g} ms a request": (
            options.rate * 1e6,
            options.latency / 1e3,
        ),
    }
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {
        key: [] for key in product(limits, _WAYS)
    }
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        for _ in range(options.mib):
            file.write(os.urandom(1 << 20))
        file.flush()
        for server, each in limits.items():
            own, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(*each, theirs), daemon=True)
            process.start()
            store = own.recv()
            for _, way in product(range(options.repetitions), _WAYS):
                found[server, way].append(_run(way, file.name, store))
            own.send(None)
            process.join()
    rows = [
        (
            *key,
            *(spread([each[at] / 1e6 for each in results], ".0f") for at in (0, 1)),
            f"{median(each[2] for each in results):.1f}",
            f"{median(each[3] for each in results):.0f}",
        )
        for key, results in found.items()
    ]
    about = conditions(
        f"{options.mib} MiB, median (range) of {options.repetitions}; obstore and s3fs of constraints.txt."
    )
    show([about, markdown_table(rows, _HEADERS)], options.output)


if __name__ == "__main__":
    main()
