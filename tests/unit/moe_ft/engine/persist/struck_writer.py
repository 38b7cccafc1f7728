"""A program: commits regions, writes checkpoints and keeps a lock while system calls fail.

Prints a line for each rule: what came of it. See test_struck_writer.py.
"""

import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.manifests import checkpoints
from moe_ft.engine.persist.requests import PersistRequest
from moe_ft.engine.persist.soundness import Listings, check_checkpoint, check_data
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import decode, encode
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest
from tests.failing_calls import Rule, set_failing
from tests.unit.moe_ft.engine.persist.writer_office import confirm

_ERRORS = (errno.EFAULT, errno.ENOSPC, errno.EDQUOT, errno.EIO)
_PARTS = (1000, 4096, 5000)
_FAILING = ("write", "fsync", "close", "open", "rename", "mkdir", "unlink")
_REPEATED = ("write", "read", "fsync", "open")  # by Python, after a signal
_STALE = ("open", "read", "stat", "list", "rename")

Line = dict[str, Any]


class Writer:
    """Writes one region again and again, as the state of later and later iterations."""

    def __init__(self, data: Path, root: Path) -> None:
        self._data = data
        self._place = str(root)
        self._storage = Storage(self._place)
        self._index = decode(data.with_suffix(".json").read_bytes(), Index, str(data))
        self._file = data.with_name("struck.json")
        self._storage.make_root()
        lock = StorageLock(self._storage)
        assert lock.take("job", None)
        self._worker = PersistWorker(data.parent, self._storage, keep=1, lock=lock)
        self._iteration = self._index.iteration
        for _ in range(2):
            self.write()

    def write(self) -> None:
        """Write the next checkpoint, as the writer process does."""
        self._iteration += 1
        (record,) = self._index.records
        records = (msgspec.structs.replace(record, iteration=self._iteration),)
        index = msgspec.structs.replace(self._index, iteration=self._iteration, records=records)
        self._file.write_bytes(encode(index))
        request = PersistRequest(
            rank=0,
            iteration=self._iteration,
            index=str(self._file),
            data=str(self._data),
            rotating=(),
            previous="",
            tag=file_tag(index.identity),
            writes_manifest=True,
            deadline_s=60.0,
        )
        self._worker.persist(request)
        confirm(self._worker, rank_path(self._iteration, 0, request.tag, "json"))

    def strike(self, **rule: Any) -> Line:
        """Write a checkpoint while calls fail, and another one if that failed; return what is there."""
        set_failing(Rule(place=self._place, **rule))
        failure: Exception | None = None
        try:
            self.write()
        except Exception as error:
            failure = error
        num_calls = set_failing(None)
        struck, found = self._iteration, self._whole_iterations()
        if failure is not None:
            self.write()
            assert self._whole_iterations()[0] == self._iteration, (
                "one failure costs one checkpoint"
            )
        return {
            "num_calls": num_calls,
            "failure": "" if failure is None else f"{type(failure).__name__}: {failure}",
            "is_os_error": isinstance(failure, OSError),
            "is_there": struck in found,
            "num_others": len({*found} - {struck}),
        }

    def _whole_iterations(self) -> list[int]:
        """Return the checkpoints that a reader takes for whole, after comparing all bytes of theirs."""
        found = []
        for iteration, path, manifest in checkpoints(self._storage):
            if not path:
                continue
            assert isinstance(manifest, Manifest), manifest
            check_checkpoint(self._storage, manifest, Listings(self._storage))
            (file,) = manifest.files
            check_data(self._storage, self._storage.index(file.index), file.data, with_older=True)
            content = self._data.read_bytes()[: file.num_bytes]
            assert self._storage.read(file.data, 0, file.num_bytes) == content
            found.append(iteration)
        return found


def _each_call(strike: Callable[..., Line], call: str, *errors: int) -> Iterator[tuple[Rule, Line]]:
    """Yield what comes of it when each of the calls of a name fails, by one error after the other."""
    strike(call=call)  # clears away what failures before have left
    for at in range(1, strike(call=call)["num_calls"] + 1):
        error = errors[at % len(errors)]
        yield Rule(place="", call=call, error=error, at=at), strike(call=call, error=error, at=at)


def _parts(writer: Writer) -> Iterator[tuple[Rule, Line]]:
    for call in ("write", "read"):
        for most in _PARTS:
            rule = Rule(place="", call=call, most=most, every=1)
            yield rule, writer.strike(call=call, most=most, every=1)
    yield from _each_call(writer.strike, "write", *_ERRORS)


def _errors(writer: Writer) -> Iterator[tuple[Rule, Line]]:
    for call in _FAILING:
        yield from _each_call(writer.strike, call, *_ERRORS)
    for call in _REPEATED:
        rule = Rule(place="", call=call, error=errno.EINTR, every=2)
        yield rule, writer.strike(call=call, error=errno.EINTR, every=2)
    for call in _STALE:
        yield from _each_call(writer.strike, call, errno.ESTALE)


def _locks(root: Path) -> Iterator[tuple[Rule, Line]]:
    """Yield what comes of a lock that is taken, renewed, looked at and given up while files are stale."""
    storage = Storage(str(root))

    def strike(**rule: Any) -> Line:
        lock = StorageLock(storage)
        set_failing(Rule(place=str(root), **rule))
        try:
            assert lock.take("job", None)
            lock.renew()
            lock.check()
            assert not lock._file.remove(b"of another job")
            lock.check()
            lock.release()
            failure = ""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        num_calls = set_failing(None)
        is_there = StorageLock(storage).look() is not None
        return {"num_calls": num_calls, "failure": failure, "is_there": is_there}

    storage.make_root()
    for call in (*_STALE, "link"):
        yield from _each_call(strike, call, errno.ESTALE)


def _regions(data: Path, root: Path) -> Iterator[tuple[Rule, Line]]:
    """Yield what comes of a region that is made and committed in memory; it is made again after a failure."""
    content, index = data.read_bytes(), data.with_suffix(".json").read_bytes()
    directory = root / data.parent.name

    def commit() -> None:
        region = Region(directory, 0, len(content))
        try:
            region.open()
            region.begin(content[:8])
            region.mapping[:] = content
            region.commit(index, 1)
        finally:
            region.close()

    def strike(**rule: Any) -> Line:
        set_failing(Rule(place=str(root), **rule))
        failure: Exception | None = None
        try:
            commit()
        except Exception as error:
            failure = error
        num_calls = set_failing(None)
        is_there = (directory / "region_0.json").exists()
        if not is_there:
            assert isinstance(failure, OSError), failure
            commit()
        assert (directory / "region_0.json").read_bytes() == index
        assert (directory / "region_0.safetensors").read_bytes() == content
        shutil.rmtree(directory)
        return {"num_calls": num_calls, "failure": repr(failure), "is_there": is_there}

    for call in ("fallocate", *_FAILING):
        yield from _each_call(strike, call, *_ERRORS)
    for call in ("fallocate", "write", "open"):
        yield from _each_call(strike, call, errno.EINTR)
    for most in _PARTS:
        yield (
            Rule(place="", call="write", most=most, every=1),
            strike(call="write", most=most, every=1),
        )


def main(large: Path, disk: Path, small: Path, memory: Path) -> None:
    """Print what comes of all rules.

    Args:
        large, small: regions.
        disk, memory: folders for checkpoints.
    """
    tables = {
        "parts": _parts(Writer(large, disk)),
        "errors": _errors(Writer(small, memory)),
        "locks": _locks(memory.with_name("locks")),
        "regions": _regions(small, memory.with_name("regions")),
    }
    for table, found in tables.items():
        for rule, line in found:
            print(json.dumps({"table": table, **msgspec.to_builtins(rule), **line}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
