"""Checkpoints that are written before the vote on them, and read back after their manifest."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.manifests import checkpoints
from moe_ft.engine.persist.requests import PersistRequest, announced_path
from moe_ft.engine.persist.soundness import Listings, check_checkpoint, check_data, read_file
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import write_atomically
from moe_ft.files.storage import Storage, rank_path
from moe_ft.format.manifest import Manifest
from tests.unit.moe_ft.builders import fill_region, make_identity
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.engine.persist.writer_office import Office, confirm, opened, request_for
from tests.unit.moe_ft.faulty_storage import INJECTOR, KilledError, faulty_urls, install
from tests.waiting import wait_for

NUM_RANKS = 2
IDENTITY = make_identity(world_size=NUM_RANKS)
KEEP = 2


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with opened(tmp_path, str(tmp_path / "storage")) as office:
        yield office


def data_path(request: PersistRequest) -> str:
    return rank_path(request.iteration, request.rank, request.tag, "safetensors")


def flip(storage: Storage, path: str) -> None:
    """Flip a bit of the last byte that a checksum covers."""
    index = storage.index(f"{path.removesuffix('safetensors')}json")
    last = max(unit.offset + unit.num_bytes for _, unit in index.entries()) - 1
    place = Path(storage.url.removeprefix("faulty-local://")) / path
    content = bytearray(place.read_bytes())
    content[last] ^= 0x10
    place.write_bytes(content)


# Ahead of the vote


def test_announced_region_is_written_without_an_index_and_not_again_when_asked_for(
    tmp_path: Path, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, _ = fill_region(tmp_path / "rank")
    request = request_for(region)
    announced = announced_path(office.directory, 0)
    write_atomically(announced, msgspec.json.encode(request))
    wait_for(lambda: office.storage.exists(data_path(request)), "the data")
    assert complete_iterations(office.storage) == []
    assert not office.storage.exists(rank_path(5, 0, request.tag, "json"))
    monkeypatch.setattr(PersistWorker, "_write", None)  # nothing may write it any more
    office.ask(region)
    assert office.result().error == ""
    assert complete_iterations(office.storage) == [5]


def test_region_that_changes_while_it_is_written_ahead_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path / "storage"))
    worker = PersistWorker(tmp_path, storage, KEEP)
    region, _ = fill_region(tmp_path / "rank")
    request, write = request_for(region), PersistWorker._write

    def write_and_fill(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        fill_region(tmp_path / "rank", iteration=5)  # bit by bit as before

    with monkeypatch.context() as patch:
        patch.setattr(PersistWorker, "_write", write_and_fill)
        assert worker._write_ahead(request).content == b""
    assert not storage.exists(data_path(request))
    worker.persist(request)
    assert complete_iterations(storage) == [5]


def test_request_for_another_window_than_the_one_announced_writes_its_own(
    tmp_path: Path,
) -> None:
    storage = Storage(str(tmp_path / "storage"))
    worker = PersistWorker(tmp_path, storage, KEEP)
    dropped, _ = fill_region(tmp_path / "rank", number=0, iteration=5)
    region, _ = fill_region(tmp_path / "rank", number=1, iteration=6)
    _announce(worker, request_for(dropped))
    worker.persist(request_for(region))
    assert complete_iterations(storage) == [6]
    assert storage.names_in("iter_0000005") == []  # removed with what never became a checkpoint


def _announce(worker: PersistWorker, request: PersistRequest) -> None:
    """Have a worker write ahead, in this thread."""
    written: Future[object] = Future()
    written.set_result(worker._write_ahead(request))
    worker._ahead[request.rank] = written  # type: ignore[assignment]


# After the manifest


@pytest.mark.parametrize("back_end", ["local", "objects"])
def test_rank_tells_that_it_has_written_before_it_reads_back(tmp_path: Path, back_end: str) -> None:
    with install():
        storage = Storage(faulty_urls(tmp_path)[back_end])
        worker = PersistWorker(tmp_path, storage, KEEP)
        region, _ = fill_region(tmp_path / "rank")
        found: list[list[int]] = []
        worker.persist(
            request_for(region), tell=lambda *_: found.append(complete_iterations(storage))
        )
        assert found == [[5]]


def test_rank_that_reads_other_bytes_takes_its_index_back_and_says_so(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    worker = PersistWorker(tmp_path, storage, KEEP)
    region, _ = fill_region(tmp_path / "rank")
    request = request_for(region)
    with pytest.raises(CorruptStateError, match="it is no checkpoint, and older ones stay"):
        worker.persist(request, tell=lambda *_: flip(storage, data_path(request)))
    ((_, _, manifest),) = checkpoints(storage)
    assert isinstance(manifest, Manifest)
    with pytest.raises(FileNotFoundError, match="was taken back: its rank has read other bytes"):
        read_file(storage, manifest, manifest.files[0])


# A crash at each step, a flipped byte, a full disk


class Fleet:
    """Ranks of one job, which take checkpoints in this thread, and what they have agreed on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder, Storage(faulty_urls(folder)["local"])
        self.iteration = 0
        self.wrong = set[int]()
        self.known: list[int] = []  # iterations that all ranks have read back
        self._restart()

    def _restart(self) -> None:
        self.workers = [PersistWorker(self.folder, self.storage, KEEP) for _ in range(NUM_RANKS)]

    def take(self, ahead: set[int], fault: "Fault") -> bool:
        """Take a checkpoint, which a rank that fails fails; return whether nothing was killed."""
        self.iteration += 1
        requests = [self._request(rank) for rank in range(NUM_RANKS)]
        INJECTOR.forget()
        fault.arm()
        try:
            for rank in sorted(ahead):
                _announce(self.workers[rank], requests[rank])
            if fault.is_dropped:  # by the vote: nobody asks for it
                return True
            for rank in (1, 0):  # rank 0 waits for the others
                self.workers[rank].persist(
                    requests[rank], tell=lambda *_, each=rank: self._strike(requests[each], fault)
                )
            self.known.append(self.iteration)
            confirm(self.workers[0], rank_path(self.iteration, 0, requests[0].tag, "json"))
        except KilledError:
            INJECTOR.forget()
            self._restart()
            return False
        except OSError:
            pass
        finally:
            INJECTOR.forget()
        return True

    def _request(self, rank: int) -> PersistRequest:
        region: Region
        number = self.iteration % 3
        region, _ = fill_region(
            self.folder / f"rank_{rank}",
            number,
            rank=rank,
            iteration=self.iteration,
            identity=IDENTITY,
        )
        return request_for(region, rank=rank, deadline_s=0.0)

    def _strike(self, request: PersistRequest, fault: "Fault") -> None:
        if request.rank == fault.flips:
            self.wrong.add(self.iteration)
            flip(self.storage, data_path(request))

    def check(self) -> None:
        """Check that all that was read back and is not older than what is kept is there, byte by byte."""
        usable = {iteration for iteration, is_right in self._found() if is_right}
        assert {*self.known[-1:]} <= usable, "the newest one that all have read back is gone"
        newest = [each for each in self.known if each in usable]
        assert len(usable) >= min(KEEP, len(self.known)), (usable, self.known, newest)

    def _found(self) -> Iterator[tuple[int, bool]]:
        """Yield what a reader takes for a checkpoint, and whether all bytes are right."""
        for iteration, path, manifest in checkpoints(self.storage):
            if not path:
                continue
            assert isinstance(manifest, Manifest), manifest
            try:
                check_checkpoint(self.storage, manifest, Listings(self.storage))
            except OSError:
                continue  # its index was taken back, or it is being deleted
            is_right = all(self._is_right(file.index, file.data) for file in manifest.files)
            # Only one whose rank has died before it could read it back.
            assert is_right or iteration in self.wrong
            yield iteration, is_right

    def _is_right(self, index: str, data: str) -> bool:
        try:
            check_data(self.storage, self.storage.index(index), data, with_older=True)
        except CorruptStateError:
            return False
        return True


class Fault:
    """Misfortune of one checkpoint, if it has any.

    Attributes:
        flips: rank of whose data a bit flips between fsync and reading back; less than 0 for none.
        is_dropped: whether the vote on its window fails.
    """

    def __init__(self, kind: str, at: int) -> None:
        self._kind, self._at = kind, at
        self.flips = at % NUM_RANKS if kind == "flip" else -1
        self.is_dropped = kind == "drop"

    def __repr__(self) -> str:
        return f"{self._kind} at {self._at}"

    def arm(self) -> None:
        """Have storage fail as this fault says."""
        if self._kind == "kill":
            INJECTOR.killed_at = self._at
        elif self._kind == "fail":
            INJECTOR.fails_at = frozenset({self._at})
        elif self._kind == "full":
            INJECTOR.broken = (("write", ".part"),)


FAULTS = st.builds(
    Fault,
    st.sampled_from(["none", "none", "kill", "fail", "full", "flip", "drop"]),
    st.integers(0, 120),
)
AHEAD = st.sets(st.integers(0, NUM_RANKS - 1))


@given(steps=st.lists(st.tuples(AHEAD, FAULTS), min_size=3, max_size=9))
@settings(max_examples=60, deadline=None)
def test_no_checkpoint_is_deleted_before_a_newer_one_that_all_ranks_have_read_back(
    steps: list[tuple[set[int], Fault]],
) -> None:
    with install(), TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        for ahead, fault in steps:
            fleet.take(ahead, fault)
            fleet.check()


def test_crash_at_each_step_of_a_checkpoint_leaves_what_was_read_back(tmp_path: Path) -> None:
    with install():
        fleet = Fleet(tmp_path)
        for _ in range(KEEP + 1):
            fleet.take({0, 1}, Fault("none", 0))
        for number in range(1000):
            is_over = fleet.take({0, 1}, Fault("kill", number))
            fleet.check()
            if is_over:  # there are no more steps
                break
            for _ in range(2):
                fleet.take({0, 1}, Fault("none", 0))
            assert len(complete_iterations(fleet.storage)) == KEEP
        assert 50 < number < 999
