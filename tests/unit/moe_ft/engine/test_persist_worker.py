"""The writer: requests become checkpoints or error results, and it ends with the rank that started it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.manifests import find_manifests, read_manifest, write_manifest
from moe_ft.engine.persist import writer_command
from moe_ft.engine.persist_worker import (
    HEARTBEAT_NAME,
    PersistRequest,
    PersistResult,
    PersistWorker,
    WriterSettings,
    request_path,
    result_path,
)
from moe_ft.engine.pool import Pool
from moe_ft.engine.regions import Region, write_atomically
from moe_ft.engine.storage import Storage, file_tag, rank_path
from moe_ft.engine.storage_lock import StorageLock
from moe_ft.errors import CorruptStateError, LockLostError
from moe_ft.format.encoding import checksum, decode, encode
from moe_ft.format.entries import FileEntry
from moe_ft.format.index import Index
from moe_ft.format.manifest import MANIFEST_NAME, Manifest
from moe_ft.planning.recovery import Version
from moe_ft.recovery.readers import StorageReader, read_unit
from tests.unit.moe_ft.builders import (
    add_units,
    complete_iterations,
    fill_region,
    make_identity,
    put_in_slot,
    rotating_unit,
)
from tests.unit.moe_ft.faulty_storage import Injector, faulty_urls, install
from tests.waiting import wait_for

FAR_S = 60.0
TWO_RANKS = make_identity(world_size=2)


def tag_of(region: Region) -> str:
    """Return the tag of the files of the run that a region belongs to; damaged ones get one too."""
    try:
        index = decode(region.index_path.read_bytes(), Index, str(region.index_path))
    except OSError:
        return file_tag(make_identity())
    return file_tag(index.identity)


def request_for(region: Region) -> PersistRequest:
    """Return the request to write a region of the only rank, at iteration 5."""
    return PersistRequest(
        rank=0,
        iteration=5,
        index=str(region.index_path),
        data=str(region.data_path),
        rotating=(),
        previous="",
        tag=tag_of(region),
        writes_manifest=True,
        deadline_s=FAR_S,
    )


def manifest_of(storage: Storage, iteration: int) -> Manifest:
    """Return the only manifest of an iteration."""
    (path,) = find_manifests(storage, iteration)
    return read_manifest(storage, path)


class Office:
    """A worker in a thread, and what its ranks see of it."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.storage = directory / "persist", Storage(url)
        self.directory.mkdir()
        self._should_end = threading.Event()
        self.worker = PersistWorker(self.directory, self.storage, keep=2)
        self._thread = threading.Thread(
            target=self.worker.run, args=(self._should_end,), daemon=True
        )

    def start(self) -> None:
        """Let the worker serve."""
        self._thread.start()

    def ask(
        self, region: Region, *, rank: int = 0, waits_s: float = FAR_S, iteration: int | None = None
    ) -> None:
        """Ask for a region of a rank to be written."""
        request = PersistRequest(
            rank=rank,
            iteration=region.iteration if iteration is None else iteration or 0,
            index=str(region.index_path),
            data=str(region.data_path),
            rotating=(),
            previous="",
            tag=tag_of(region),
            writes_manifest=rank == 0,
            deadline_s=waits_s,
        )
        write_atomically(request_path(self.directory, rank), msgspec.json.encode(request))

    def result(self, rank: int = 0) -> PersistResult:
        """Wait for a rank's result, and take it."""
        path = result_path(self.directory, rank)
        wait_for(path.exists, f"the result of rank {rank}")
        content = path.read_bytes()
        path.unlink()
        return msgspec.json.decode(content, type=PersistResult)

    def close(self) -> None:
        """End the worker."""
        self._should_end.set()
        if self._thread.is_alive():
            self._thread.join()


@contextmanager
def opened(directory: Path, url: str, *, starts: bool = True) -> Iterator[Office]:
    office = Office(directory, url)
    try:
        if starts:
            office.start()
        yield office
    finally:
        office.close()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with opened(tmp_path, str(tmp_path / "storage")) as office:
        yield office


@pytest.fixture
def injector() -> Iterator[Injector]:
    with install() as injector:
        yield injector


# What a request becomes


def test_request_becomes_a_complete_checkpoint(tmp_path: Path, office: Office) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=5)
    office.ask(region)
    assert office.result().error == ""
    assert complete_iterations(office.storage) == [5]


def test_request_becomes_files_that_hold_the_bytes_of_the_region(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=5)
    office.ask(region)
    office.result()
    file = manifest_of(office.storage, 5).files[0]
    assert office.storage.read(file.data) == bytes(region.mapping)
    assert file.data.endswith(office.storage.index(file.index).file)


def test_result_says_what_was_written_where(tmp_path: Path, office: Office) -> None:
    region, index = fill_region(tmp_path / "rank", iteration=5)
    office.ask(region)
    result = office.result()
    assert (result.rank, result.iteration, result.num_units) == (0, 5, 3)
    assert (result.num_bytes, result.path) == (index.file_bytes, office.storage.url)


def test_request_that_was_served_is_removed(tmp_path: Path, office: Office) -> None:
    region, _ = fill_region(tmp_path / "rank")
    office.ask(region)
    office.result()
    path = request_path(office.directory, 0)
    wait_for(lambda: not path.exists(), "the request to go")


def test_request_from_before_the_worker_started_is_served(tmp_path: Path) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=5)
    with opened(tmp_path, str(tmp_path / "storage"), starts=False) as office:
        office.ask(region)
        office.start()
        assert office.result().error == ""


def test_request_without_the_manifest_writes_only_the_ranks_own_files(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", rank=1, identity=TWO_RANKS)
    office.ask(region, rank=1)
    assert office.result(1).error == ""
    assert office.storage.iterations() == [5]
    assert not find_manifests(office.storage, 5)


def test_manifest_waits_for_ranks_that_write_later(tmp_path: Path, office: Office) -> None:
    first, _ = fill_region(tmp_path / "rank_0", rank=0, identity=TWO_RANKS)
    second, _ = fill_region(tmp_path / "rank_1", rank=1, identity=TWO_RANKS)
    office.ask(first, rank=0)
    own = Path(office.storage.url) / "iter_0000005"
    wait_for(lambda: list(own.glob("rank_00000_*.json")), "the files of rank 0")
    assert not find_manifests(office.storage, 5)
    office.ask(second, rank=1)
    assert (office.result(0).error, office.result(1).error) == ("", "")
    assert complete_iterations(office.storage) == [5]


def test_checkpoints_beyond_those_to_keep_are_removed(tmp_path: Path, office: Office) -> None:
    for iteration in (1, 2, 3):
        region, _ = fill_region(tmp_path / "rank", iteration=iteration)
        office.ask(region)
        assert office.result().error == ""
    assert complete_iterations(office.storage) == [3, 2]


# Units of the pool


class Rotation:
    """A rank with three experts in a pool, and what its persists leave on storage."""

    def __init__(self, tmp_path: Path, keep: int = 2) -> None:
        self.tmp_path, self.storage = tmp_path, Storage(str(tmp_path / "storage"))
        self.worker = PersistWorker(tmp_path, self.storage, keep)
        self.pool = Pool(tmp_path / "rank", 4 * 33, 6)
        self.pool.open()
        self.at: dict[int, int] = {}
        self.previous = ""

    def request(self, iteration: int, experts: Sequence[int]) -> PersistRequest:
        """Save all experts at an iteration, and ask for some of them to be written."""
        region, index = fill_region(self.tmp_path / "rank", iteration % 2, iteration=iteration)
        slots = [3 * (iteration % 2) + expert for expert in range(3)]
        units = dict(
            put_in_slot(self.pool, slot, expert, iteration=iteration)
            for expert, slot in enumerate(slots)
        )
        add_units(region, index, units)
        self.at.update(dict.fromkeys(experts, iteration))
        return PersistRequest(
            rank=0,
            iteration=iteration,
            index=str(region.index_path),
            data=str(region.data_path),
            rotating=tuple(str(rotating_unit(expert)) for expert in experts),
            previous=self.previous,
            tag=tag_of(region),
            writes_manifest=True,
            deadline_s=FAR_S,
        )

    def persist(self, iteration: int, experts: Sequence[int]) -> None:
        """Write a checkpoint, which the next one goes back to."""
        request = self.request(iteration, experts)
        self.worker.persist(request)
        self.previous = rank_path(iteration, 0, request.tag, "json")

    def readable(self, iteration: int) -> dict[int, int]:
        """Return the iteration of each expert that a checkpoint has, after reading all of its units."""
        (file,) = manifest_of(self.storage, iteration).files
        reader = StorageReader(self.storage, version_of(file, iteration))
        for name in reader.index.units:
            read_unit(reader, name)
        units = reader.index.units
        names = {expert: str(rotating_unit(expert)) for expert in range(3)}
        return {number: units[name].iteration for number, name in names.items() if name in units}


def version_of(file: FileEntry, iteration: int) -> Version:
    return Version(
        rank=0,
        iteration=iteration,
        lineage="run-a",
        history=make_identity().history,
        node=None,
        path=file.index,
        file=file,
    )


@pytest.fixture
def rotation(tmp_path: Path) -> Rotation:
    return Rotation(tmp_path)


def test_checkpoint_has_the_chosen_experts_and_those_of_earlier_ones(rotation: Rotation) -> None:
    for iteration, experts in ((1, [0]), (2, [1]), (3, [2]), (4, [0])):
        rotation.persist(iteration, experts)
        assert rotation.readable(iteration) == rotation.at


def test_manifest_says_how_old_each_expert_is_and_where_it_lies(rotation: Rotation) -> None:
    for iteration, experts in ((1, [0]), (2, [1])):
        rotation.persist(iteration, experts)
    manifest = manifest_of(rotation.storage, 2)
    files = [file.data for file in (*manifest.files, *manifest.older)]
    source = manifest.units[str(rotating_unit(0))]
    assert source.iteration == 1
    assert [files[position] for position in source.files] == [manifest.older[0].data]
    assert str(rotating_unit(2)) not in manifest.units


@given(st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=30)
def test_retention_never_deletes_what_a_checkpoint_finds_in_older_files(
    history: list[set[int]], keep: int
) -> None:
    with TemporaryDirectory() as directory:
        rotation = Rotation(Path(directory), keep)
        for iteration, experts in enumerate(history, 1):
            rotation.persist(iteration, sorted(experts))
            complete = [
                i for i in rotation.storage.iterations() if find_manifests(rotation.storage, i)
            ]
            assert len(complete) == min(keep, iteration)
            for each in complete:
                rotation.readable(each)
            assert rotation.readable(iteration) == rotation.at


def test_file_that_no_checkpoint_needs_any_more_is_removed(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path, keep=1)
    for iteration, experts in ((1, [0]), (2, [1]), (3, [0, 1])):
        rotation.persist(iteration, experts)
    assert rotation.storage.iterations() == [3]


def test_expert_with_a_flipped_byte_in_its_slot_is_not_written(rotation: Rotation) -> None:
    request = rotation.request(1, [0])
    rotation.pool.mapping[rotation.pool.offset_of(3)] ^= 0x40
    with pytest.raises(CorruptStateError, match=r"unit layer\.9\.expert\.0 does not match"):
        rotation.worker.persist(request)
    assert complete_iterations(rotation.storage) == []


def test_expert_that_is_not_chosen_may_change_while_others_are_written(rotation: Rotation) -> None:
    request = rotation.request(1, [0])
    rotation.pool.mapping[rotation.pool.offset_of(4)] ^= 0x40
    rotation.worker.persist(request)
    assert rotation.readable(1) == {0: 1}


@pytest.mark.parametrize("keep", [1, 2])
def test_request_with_an_older_checkpoint_may_be_served_again(tmp_path: Path, keep: int) -> None:
    rotation = Rotation(tmp_path, keep)
    rotation.persist(1, [0, 1, 2])
    request = rotation.request(2, [0, 1, 2])
    rotation.worker.persist(request)
    rotation.worker.persist(request)  # the first writer was killed before its answer
    assert rotation.readable(2) == rotation.at


def test_rank_of_which_other_ranks_save_everything_writes_its_record(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    worker = PersistWorker(tmp_path, storage, keep=1)
    other, _ = fill_region(tmp_path / "rank_1", rank=1, identity=TWO_RANKS)
    changes = {"rank": 1, "writes_manifest": False}
    worker.persist(msgspec.structs.replace(request_for(other), **changes))
    region, index = fill_region(tmp_path / "rank", identity=TWO_RANKS)
    region.commit(encode(msgspec.structs.replace(index, units={})), index.iteration)
    worker.persist(request_for(region))
    assert complete_iterations(storage) == [5]


# What goes wrong


def spoil_data(region: Region, position: int) -> None:
    region.mapping[position] ^= 0x10


@pytest.mark.parametrize("at_unit", [0, 1, 2])
def test_region_with_a_flipped_byte_becomes_an_error_and_no_files(
    tmp_path: Path, office: Office, at_unit: int
) -> None:
    region, index = fill_region(tmp_path / "rank")
    unit = list(index.units.values())[at_unit]
    spoil_data(region, unit.offset + unit.num_bytes - 1)
    office.ask(region)
    error = office.result().error
    assert error.startswith("CorruptStateError")
    assert "does not match its checksum" in error
    assert office.storage.iterations() == []


def spoil_header(region: Region) -> None:
    spoil_data(region, 9)


def spoil_index(region: Region) -> None:
    region.index_path.write_bytes(region.index_path.read_bytes()[:-10])


def remove_index(region: Region) -> None:
    region.index_path.unlink()


def truncate_data(region: Region) -> None:
    os.truncate(region.data_path, region.num_bytes // 2)


def empty_data(region: Region) -> None:
    os.truncate(region.data_path, 0)


@pytest.mark.parametrize(
    "spoil", [spoil_header, spoil_index, remove_index, truncate_data, empty_data]
)
def test_region_that_is_damaged_becomes_an_error_and_no_checkpoint(
    tmp_path: Path, office: Office, spoil: Callable[[Region], None]
) -> None:
    region, _ = fill_region(tmp_path / "rank")
    spoil(region)
    office.ask(region)
    assert office.result().error != ""
    assert complete_iterations(office.storage) == []


def test_state_that_is_not_finite_becomes_an_error_and_the_last_finite_ones_stay(
    tmp_path: Path, office: Office
) -> None:
    for iteration in (3, 4):
        office.ask(fill_region(tmp_path / "rank", iteration=iteration)[0])
        assert office.result().error == ""
    region, index = fill_region(tmp_path / "rank", iteration=5)
    unit = index.units["embedding"]
    at = unit.offset + unit.tensors[0].offset
    region.mapping[at : at + 4] = b"\x00\x00\x80\xff"  # minus infinity
    content = region.mapping[unit.offset : unit.offset + unit.num_bytes]
    unit = msgspec.structs.replace(unit, checksum=checksum(bytes(content)))
    units = {**index.units, "embedding": unit}
    region.commit(encode(msgspec.structs.replace(index, units=units)), 5)
    office.ask(region)
    assert office.result().error == (
        "CorruptStateError: iteration 5 is not written to storage: param of embedding.weight in unit "
        "embedding holds NaN or infinity"
    )
    assert complete_iterations(office.storage) == [4, 3]
    assert office.storage.names_in("iter_0000005") == []


def test_region_that_holds_another_iteration_by_now_becomes_an_error(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=6)
    office.ask(region, iteration=5)
    assert "holds iteration 6" in office.result().error
    assert office.storage.iterations() == []


def test_ranks_that_do_not_write_until_the_deadline_are_named(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", identity=make_identity(world_size=3))
    office.ask(region, waits_s=0.0)
    error = office.result().error
    assert "ranks [1, 2] did not write their part of iteration 5 in time" in error
    assert not find_manifests(office.storage, 5)


def test_worker_goes_on_after_an_error(tmp_path: Path, office: Office) -> None:
    bad, index = fill_region(tmp_path / "rank", number=0, iteration=5)
    spoil_data(bad, index.units["embedding"].offset)
    office.ask(bad)
    assert office.result().error != ""
    good, _ = fill_region(tmp_path / "rank", number=1, iteration=6)
    office.ask(good)
    assert office.result().error == ""
    assert complete_iterations(office.storage) == [6]


@pytest.mark.parametrize("back_end", ["local", "objects"])
def test_storage_that_fails_becomes_an_error_and_the_worker_goes_on(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    with opened(tmp_path, faulty_urls(tmp_path)[back_end]) as office:
        injector.broken = (("open", "safetensors"),)
        region, _ = fill_region(tmp_path / "rank", number=0, iteration=5)
        office.ask(region)
        assert "injected failure" in office.result().error
        injector.forget()
        region, _ = fill_region(tmp_path / "rank", number=1, iteration=6)
        office.ask(region)
        assert office.result().error == ""
        assert complete_iterations(office.storage) == [6]


@pytest.mark.parametrize("failing", [("open", MANIFEST_NAME + ".part"), ("replace", ".json.part")])
def test_storage_that_fails_at_the_end_leaves_no_checkpoint(
    tmp_path: Path, injector: Injector, failing: tuple[str, str]
) -> None:
    with opened(tmp_path, faulty_urls(tmp_path)["local"]) as office:
        injector.broken = (failing,)
        region, _ = fill_region(tmp_path / "rank")
        office.ask(region)
        assert "injected failure" in office.result().error
        injector.forget()
        assert complete_iterations(office.storage) == []


@pytest.mark.parametrize("back_end", ["local", "objects"])
def test_request_that_is_served_again_and_fails_does_not_harm_its_checkpoint(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    # The first writer was killed after the manifest and before its answer; the next serves it again.
    storage = Storage(faulty_urls(tmp_path)[back_end])
    worker = PersistWorker(tmp_path, storage, keep=1)
    region, _ = fill_region(tmp_path / "rank")
    request = request_for(region)
    worker.persist(request)
    harmed = []
    for number in range(40):
        injector.forget()
        injector.fails_at = frozenset({number})
        with suppress(OSError):
            worker.persist(request)
        injector.forget()
        try:
            assert complete_iterations(storage) == [5]
        except OSError as error:
            harmed.append(f"operation {number}: {error}")
            worker.persist(request)
    assert harmed == []


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"rank": "x"}'])
def test_request_that_cannot_be_understood_does_not_stop_the_others(
    tmp_path: Path, office: Office, content: bytes
) -> None:
    write_atomically(request_path(office.directory, 7), content)
    region, _ = fill_region(tmp_path / "rank")
    office.ask(region)
    assert office.result().error == ""


def test_request_that_arrives_while_the_last_one_is_removed_is_served(
    tmp_path: Path, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rank reads a result and asks again while the worker is about to remove what it has served.
    first, _ = fill_region(tmp_path / "rank", number=0, iteration=5)
    second, _ = fill_region(tmp_path / "rank", number=1, iteration=6)
    path, remove = request_path(office.directory, 0), Path.unlink
    has_read, has_asked = threading.Event(), threading.Event()

    def remove_late(target: Path, missing_ok: bool = False) -> None:
        if target == path and not has_asked.is_set() and has_read.wait(0.5):
            has_asked.set()
            office.ask(second)
        remove(target, missing_ok)

    monkeypatch.setattr(Path, "unlink", remove_late)
    office.ask(first)
    assert office.result().iteration == 5
    has_read.set()
    wait_for(lambda: has_asked.is_set() or not path.exists(), "the end of the first request")
    if not has_asked.is_set():
        office.ask(second)  # the first was removed before the rank could know of its result
    assert office.result().iteration == 6


# The lock


def locked_worker(tmp_path: Path) -> tuple[Storage, StorageLock, PersistWorker]:
    storage = Storage(str(tmp_path / "storage"))
    storage.make_root()
    lock = StorageLock(storage)
    assert lock.take("job", None)
    return storage, lock, PersistWorker(tmp_path, storage, 1, lock)


def test_request_of_a_start_that_has_lost_the_lock_writes_nothing(tmp_path: Path) -> None:
    storage, lock, worker = locked_worker(tmp_path)
    assert StorageLock(storage).take("other", lock.look())
    region, _ = fill_region(tmp_path / "rank")
    with pytest.raises(LockLostError, match="belongs to job 'other'"):
        worker.persist(request_for(region))
    assert storage.iterations() == []


def test_lock_that_is_lost_while_ranks_write_leaves_no_manifest(tmp_path: Path) -> None:
    storage, lock, worker = locked_worker(tmp_path)
    region, _ = fill_region(tmp_path / "rank")

    def lose() -> bool:
        assert StorageLock(storage).take("other", lock.look())
        return True

    with pytest.raises(LockLostError):
        worker.persist(request_for(region), is_wanted=lose)
    assert complete_iterations(storage) == []


def test_lock_that_is_lost_with_the_manifest_leaves_old_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, lock, worker = locked_worker(tmp_path)
    worker.persist(request_for(fill_region(tmp_path / "rank")[0]))

    def write_and_lose(*arguments: Any) -> Manifest:
        assert StorageLock(storage).take("other", lock.look())
        return write_manifest(*arguments)

    monkeypatch.setattr("moe_ft.engine.persist_worker.write_manifest", write_and_lose)
    region, _ = fill_region(tmp_path / "rank", number=1, iteration=6)
    request = msgspec.structs.replace(request_for(region), iteration=6)
    _, warning = worker.persist(request)
    assert "old checkpoints cannot be removed: LockLostError" in warning
    assert complete_iterations(storage) == [6, 5]


# The process


def settings_of(url: str, parent: int) -> bytes:
    settings = WriterSettings(url=url, keep=2, parent=parent, lock_owner="")
    return msgspec.json.encode(settings)


class Parent:
    """A process that starts a writer as a rank does, and waits."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        directory.mkdir()
        code = (
            "import json, os, subprocess, sys\n"
            "settings = json.loads(sys.argv[1]) | {'parent': os.getpid()}\n"
            "child = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, bufsize=0)\n"
            "child.stdin.write(json.dumps(settings).encode() + b'\\n')\n"
            "print(child.pid, flush=True)\n"
            "child.wait()\n"
        )
        settings = settings_of(url, parent=0).decode()  # the process itself says who it is
        command = [sys.executable, "-c", code, settings, *writer_command(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.writer = psutil.Process(self.process.pid)

    def start(self) -> "Parent":
        """Wait until the writer serves."""
        assert self.process.stdout is not None
        self.writer = psutil.Process(int(self.process.stdout.readline()))
        wait_for((self.directory / HEARTBEAT_NAME).exists, "the writer's heartbeat")
        return self

    def close(self) -> None:
        """End both."""
        if not is_gone(self.writer):
            self.writer.kill()
        self.process.kill()
        self.process.communicate()


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may be there to reap it
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    parent = Parent(tmp_path / "persist", str(tmp_path / "storage"))
    try:
        yield parent.start()
    finally:
        parent.close()


def test_writer_ends_when_its_parent_is_killed(parent: Parent) -> None:
    parent.process.kill()
    wait_for(lambda: is_gone(parent.writer), "the writer's end")


def test_writer_that_is_stopped_ends_when_its_parent_is_killed(parent: Parent) -> None:
    parent.writer.suspend()
    wait_for(lambda: parent.writer.status() == psutil.STATUS_STOPPED, "the writer to stop")
    parent.process.kill()
    wait_for(lambda: is_gone(parent.writer), "the writer's end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_writer_that_is_told_to_end_by_a_launcher_serves_on(
    tmp_path: Path, parent: Parent, number: signal.Signals
) -> None:
    parent.writer.send_signal(number)
    region, _ = fill_region(tmp_path / "rank")
    request = request_for(region)
    write_atomically(request_path(parent.directory, 0), msgspec.json.encode(request))
    wait_for(result_path(parent.directory, 0).exists, "the result")
    assert complete_iterations(Storage(str(tmp_path / "storage"))) == [5]


@pytest.mark.parametrize("settings", [b"", settings_of("/nowhere", 2**22)])
def test_writer_whose_parent_is_dead_already_ends_at_once(tmp_path: Path, settings: bytes) -> None:
    (tmp_path / "persist").mkdir()
    command = writer_command(tmp_path / "persist")
    done = subprocess.run(command, input=settings, timeout=30)
    assert done.returncode == 0
    assert not (tmp_path / "persist" / HEARTBEAT_NAME).exists()


def test_second_writer_of_a_node_waits_until_the_first_has_ended(
    tmp_path: Path, parent: Parent
) -> None:
    heartbeat = parent.directory / HEARTBEAT_NAME
    settings = settings_of(str(tmp_path / "storage"), os.getpid()) + b"\n"
    command = writer_command(parent.directory)
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as second:
        assert second.stdin is not None
        second.stdin.write(settings)
        parent.process.kill()
        wait_for(lambda: is_gone(parent.writer), "the first writer's end")
        heartbeat.unlink(missing_ok=True)
        wait_for(heartbeat.exists, "the second writer's heartbeat")
        second.kill()


def test_writer_that_is_killed_while_it_waits_leaves_no_checkpoint(
    tmp_path: Path, parent: Parent
) -> None:
    region, index = fill_region(tmp_path / "rank", identity=TWO_RANKS)
    request = request_for(region)
    write_atomically(request_path(parent.directory, 0), msgspec.json.encode(request))
    own = tmp_path / "storage" / "iter_0000005"
    wait_for(lambda: list(own.glob("rank_00000_*.json")), "the files of rank 0")
    parent.writer.kill()
    assert not find_manifests(Storage(str(tmp_path / "storage")), 5)
    assert request_path(parent.directory, 0).exists()  # the next writer serves it
