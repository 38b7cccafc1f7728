"""The storage tier: what makes a checkpoint, and what a killed writer leaves."""

import errno
import mmap
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.config.config import MoeFtConfig, StorageConfig
from moe_ft.engine.persist.manifests import find_manifests, write_manifest
from moe_ft.errors import ConfigError, CorruptStateError, UnsafePathError
from moe_ft.files import back_ends
from moe_ft.files.back_ends import give_own_random
from moe_ft.files.local_files import page_blocks
from moe_ft.files.storage import (
    Storage,
    file_tag,
    rank_path,
)
from moe_ft.format.encoding import encode
from moe_ft.format.identity import Identity
from tests.unit.moe_ft.builders import (
    make_identity,
    make_state,
    manifest_of,
    persist_checkpoint,
    persist_rank,
)
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations, save
from tests.unit.moe_ft.faulty_storage import Injector, KilledError, faulty_urls, install

TWO_RANKS = make_identity(world_size=2)
BACK_ENDS = pytest.mark.parametrize("back_end", ["local", "objects"])


# What is a checkpoint


def test_checkpoint_that_was_written_is_read_back_bit_for_bit(storage: Storage) -> None:
    manifest = persist_checkpoint(storage, 5, TWO_RANKS)
    index, content = make_state(1, 5, TWO_RANKS)
    assert storage.read(manifest.files[1].data) == content
    assert storage.index(manifest.files[1].index).units == index.units


@pytest.mark.parametrize(
    ("rank", "iteration", "identity"),
    [(0, 5, TWO_RANKS), (1, 4, TWO_RANKS), (1, 5, make_identity("run-b", world_size=2))],
    ids=["of another rank", "of another iteration", "of another run"],
)
def test_manifest_of_indexes_that_do_not_belong_together_is_refused(
    storage: Storage, rank: int, iteration: int, identity: Identity
) -> None:
    persist_rank(storage, 0, 5, TWO_RANKS)
    index, _ = make_state(rank, iteration, identity)
    storage.write_atomically(rank_path(5, 1, file_tag(TWO_RANKS), "json"), encode(index))
    with pytest.raises(CorruptStateError, match="does not belong to this checkpoint"):
        write_manifest(storage, 5, file_tag(TWO_RANKS), 2)
    assert find_manifests(storage, 5) == []


def test_incarnations_that_write_one_iteration_have_files_of_their_own(storage: Storage) -> None:
    first, second = make_identity(), make_identity(history=((0, 0), (1, 3)))
    before = persist_checkpoint(storage, 5, first)
    persist_rank(storage, 0, 5, second)
    assert manifest_of(storage, 5) == before
    assert complete_iterations(storage) == [5]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../b", ""])
def test_path_outside_of_the_persist_directory_is_refused(storage: Storage, path: str) -> None:
    storage.make_root()
    for use in (storage.read, storage.exists, storage.remove):
        with pytest.raises(CorruptStateError, match="leaves its directory"):
            use(path)
    with pytest.raises(CorruptStateError, match="leaves its directory"):
        storage.write(path, [memoryview(b"x")])


def test_range_of_a_file_is_read_without_the_rest(storage: Storage) -> None:
    storage.write("file", [memoryview(b"0123456789")])
    assert storage.read("file", 3, 4) == b"3456"
    assert storage.read("file", 8, 4) == b"89"
    assert storage.read("file", 4, 0) == b""
    patient = storage.with_patience(60.0)
    assert patient.read("file", 3, 4) == b"3456"
    assert patient.read("file", 4, 0) == b""


def test_iterations_are_newest_first_and_other_names_ignored(storage: Storage) -> None:
    for name in ("iter_0000002", "iter_0000010", "iter_12345678", "iter_x", "iter_5", "notes"):
        storage.write_atomically(f"{name}/file", b"x")
    assert storage.iterations() == [12345678, 10, 2]


CHANGES: dict[str, Callable[[Storage, str], object]] = {
    "write": lambda files, path: files.write(path, [memoryview(b"new")]),
    "write_atomically": lambda files, path: files.write_atomically(path, b"new"),
    "remove": lambda files, path: files.remove(path),
}


@pytest.mark.parametrize("change", CHANGES)
def test_link_in_the_place_of_a_directory_leads_nowhere(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = Storage(str(tmp_path / "mine")), Storage(str(tmp_path / "theirs"))
    for files in (mine, theirs):
        files.write_atomically("iter_0000010/manifest.json", b"before")
    (tmp_path / "theirs" / "iter_0000020").symlink_to(tmp_path / "mine" / "iter_0000010")
    with pytest.raises(UnsafePathError, match="theirs/iter_0000020 is a symbolic link"):
        CHANGES[change](theirs, "iter_0000020/manifest.json")
    assert mine.names_in("iter_0000010") == ["manifest.json"]
    assert mine.read("iter_0000010/manifest.json") == b"before"
    assert theirs.iterations() == [10], "retention and prune look at nothing else"
    assert "theirs/iter_0000020 is a symbolic link, and not used" in capsys.readouterr().err


@pytest.mark.parametrize("patience_s", [None, 60.0])
def test_file_that_is_longer_than_any_json_is_not_read(
    tmp_path: Path, patience_s: float | None
) -> None:
    (tmp_path / "manifest.json").touch()
    os.truncate(tmp_path / "manifest.json", 1 << 40)  # no block on the disk
    with pytest.raises(CorruptStateError, match=f"manifest.json has {1 << 40} bytes"):
        Storage(str(tmp_path), patience_s).read("manifest.json")


@BACK_ENDS
def test_directory_that_cannot_be_looked_at_raises_instead_of_seeming_empty(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    storage = Storage(faulty_urls(tmp_path)[back_end])
    persist_checkpoint(storage, 5, make_identity())
    injector.broken = (("info", "persist"), ("info", "p"))
    with pytest.raises(OSError, match="injected failure"):
        storage.iterations()


# A writer that is killed or meets failures


def prepare(url: str) -> Storage:
    """Return storage that holds checkpoints 1 and 2 of a run, of which it keeps two."""
    storage = Storage(url)
    for iteration in (1, 2):
        save(storage, iteration, TWO_RANKS, 2)
    return storage


def count_operations(url: str, injector: Injector, act: Callable[[Storage], object]) -> int:
    storage = prepare(url)
    injector.forget()
    act(storage)
    return len(injector.operations)


def save_third(storage: Storage) -> None:
    save(storage, 3, TWO_RANKS, 2)


def kill(injector: Injector, number: int, storage: Storage) -> None:
    """Kill the writer of the third checkpoint before one of its operations."""
    injector.forget()
    injector.killed_at = number
    with suppress(KilledError):  # fsspec catches even this where it asks whether a file exists
        save_third(storage)
    assert len(injector.operations) > number
    injector.forget()


@BACK_ENDS
def test_writer_killed_before_any_operation_leaves_only_complete_checkpoints(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    num_operations = count_operations(
        faulty_urls(tmp_path / "count")[back_end], injector, save_third
    )
    assert num_operations > 30
    for number in range(num_operations):
        with install():
            url = faulty_urls(tmp_path / str(number))[back_end]
            storage = prepare(url)
            kill(injector, number, storage)
            found = complete_iterations(Storage(url))
        assert found in ([2, 1], [3, 2, 1], [3, 2]), f"killed before operation {number}"


@BACK_ENDS
def test_start_after_a_kill_before_any_operation_ends_with_the_same_files(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    num_operations = count_operations(
        faulty_urls(tmp_path / "count")[back_end], injector, save_third
    )
    later = make_identity(history=((0, 0), (1, 2)), world_size=2)
    for number in range(0, num_operations, 3):
        with install():
            url = faulty_urls(tmp_path / str(number))[back_end]
            storage = prepare(url)
            kill(injector, number, storage)
            storage = Storage(url)
            for iteration in (3, 4):
                save(storage, iteration, later, 2)
            assert complete_iterations(storage) == [4, 3]
            assert storage.iterations() == [4, 3], f"killed before operation {number}"


@given(st.sets(st.integers(0, 70), max_size=12).map(frozenset))
@settings(max_examples=150)
def test_any_number_of_failures_leaves_only_complete_checkpoints(fails_at: frozenset[int]) -> None:
    with install() as injector:
        storage = prepare(faulty_urls(Path())["objects"])
        injector.forget()
        injector.fails_at = fails_at
        try_to_save_third(storage)
        injector.forget()
        assert complete_iterations(storage) in ([2, 1], [3, 2, 1], [3, 2])


def try_to_save_third(storage: Storage) -> None:
    try:
        save_third(storage)
    except OSError:
        return


# Names, directories and URLs


def test_manifest_of_an_index_that_names_an_unknown_file_is_refused(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    path = rank_path(5, 0, file_tag(make_identity()), "json")
    index = storage.index(path)
    unit = msgspec.structs.replace(index.units["embedding"], file="iter_0000001/x.safetensors")
    units = {**index.units, "embedding": unit}
    storage.write_atomically(path, encode(msgspec.structs.replace(index, units=units)))
    with pytest.raises(CorruptStateError, match="unit embedding is in iter_0000001/x.safetensors"):
        write_manifest(storage, 5, file_tag(make_identity()), 1)


SECRETS = [
    "ftp://bob:{}@host/a",
    "simplecache::ftp://bob:{}@host/a",
    "s3://AKIA:{}@bucket/a",
    "http://host/a?X-Amz-Signature={}",
    "https://host/c/a?sv=1&sig={}",
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize(
    "secret", ["s3cret", "se/cret", "se@cret", "se:cret", "se?cret", "se%2Fcret"]
)
def test_url_with_a_secret_is_refused_without_showing_it(url: str, secret: str) -> None:
    given = url.format(secret)
    config = MoeFtConfig(storage=StorageConfig(persist_dir=given))
    for refuse in (lambda: Storage(given), lambda: config.validate(1)):
        with pytest.raises(ConfigError, match=r"must hold no password.*environment") as refused:
            refuse()
        assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "sftp://bob@host:22/a@b",
        "hdfs://host:8020/a@b",
        "abfs://container@account.dfs.core.windows.net/a",
        "s3://bucket/a:b@c",
        "/a/b?c=d",
    ],
)
def test_url_without_a_secret_is_taken_as_it_is(url: str) -> None:
    assert Storage(url).url == url


@pytest.mark.parametrize(
    ("name", "is_own"), [("s3fs.made_up", True), ("aiohttp.made_up", True), ("made_up", False)]
)
def test_modules_of_object_stores_draw_from_another_generator(
    monkeypatch: pytest.MonkeyPatch, name: str, is_own: bool
) -> None:
    module = ModuleType(name)
    module.random = random  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(back_ends, "_num_modules", 0)
    before = random.getstate()
    give_own_random()
    module.random.shuffle([1, 2, 3])
    assert (random.getstate() == before) is is_own


def _some_bytes(num_bytes: int, address: int = 0) -> memoryview:
    """Return bytes that begin at an address in a page of memory."""
    room = memoryview(mmap.mmap(-1, address + num_bytes + 1))[address:-1]
    room[:] = random.Random(num_bytes).randbytes(num_bytes)
    return room


PAGE, CHUNK = mmap.PAGESIZE, 16 << 20


@pytest.mark.parametrize(
    ("sizes", "addresses", "num_copied"),
    [
        ([3 * CHUNK + 5], [0], 5),  # a region as it is: all but its end
        ([CHUNK, 2 << 20], [0, 0], 0),
        ([PAGE, 2 * CHUNK, 7], [0, 0, 0], CHUNK + PAGE + 7),  # again in place once a block is full
        ([2 << 20], [8], 2 << 20),
        ([0, 3, 0, CHUNK - 3, 2 << 20], [0] * 5, CHUNK),
        ([], [], 0),
    ],
)
def test_blocks_are_whole_pages_from_a_page_on_and_only_what_is_not_so_already_is_copied(
    sizes: list[int], addresses: list[int], num_copied: int
) -> None:
    pieces = [_some_bytes(*each) for each in zip(sizes, addresses, strict=True)]
    starts = [(_address(piece), len(piece)) for piece in pieces if piece]
    lengths, content, copied = [], bytearray(), 0
    for block in page_blocks(pieces):
        assert _address(block) % PAGE == 0
        in_place = [start for start, length in starts if start <= _address(block) < start + length]
        copied += 0 if in_place else len(block)
        lengths.append(len(block))
        content += block
    assert bytes(content) == b"".join(pieces)
    assert all(length % PAGE == 0 for length in lengths[:-1])
    assert copied == num_copied


def _address(block: memoryview) -> int:
    return np.frombuffer(block, np.uint8).ctypes.data if block else 0


def _is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def _keeps_files_in_memory(folder: Path) -> bool:
    other = folder / "other"
    other.write_bytes(bytes(PAGE))
    with other.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _is_cached(other)


def test_large_file_is_written_past_the_page_cache(tmp_path: Path) -> None:
    if _keeps_files_in_memory(tmp_path):
        pytest.skip("this file system is in memory")
    pieces = [_some_bytes(2 * CHUNK), _some_bytes(PAGE + 1)]
    Storage(str(tmp_path)).write("file", pieces)
    assert not _is_cached(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


@given(
    num_bytes=st.integers(1, 3 * PAGE),
    spans=st.lists(st.tuples(st.integers(0, 4 * PAGE), st.integers(1, 2 * PAGE)), min_size=1),
)
@settings(max_examples=60)
def test_ranges_of_local_files_are_read_as_they_are_past_the_page_cache(
    num_bytes: int, spans: list[tuple[int, int]]
) -> None:
    with TemporaryDirectory() as folder:
        content, storage = random.randbytes(num_bytes), Storage(folder)
        storage.write_atomically("file", content)
        expected = [content[start : start + count] for start, count in spans]

        def is_read_past_the_cache() -> bool:
            storage.forget_cached("file")
            found = storage.read_each(("file", start, count) for start, count in spans)
            assert [bytes(each) for each in found] == expected
            return not _is_cached(Path(folder) / "file")

        # Now and then the kernel does not forget pages of a file that was just written.
        is_past = any(is_read_past_the_cache() for _ in range(20))
        assert is_past or _keeps_files_in_memory(Path(folder))


def test_two_machines_that_write_one_file_at_the_same_time_both_write_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two nodes do that rescue a job: the other writes all of it before the first names its own."""

    def replace_after_the_other(source: str, target: str, **directories: int) -> None:
        monkeypatch.undo()
        Storage(str(tmp_path)).write_atomically("file", b"the other's")
        assert (tmp_path / "file").read_bytes() == b"the other's"
        os.replace(source, target, **directories)

    monkeypatch.setattr("moe_ft.files.local_files.os.replace", replace_after_the_other)
    Storage(str(tmp_path)).write_atomically("file", b"own")
    assert (tmp_path / "file").read_bytes() == b"own"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_file_that_could_not_be_written_leaves_the_one_before_and_nothing_else(
    tmp_path: Path,
) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"new")
        raise OSError(errno.ENOSPC, "no room")

    files = Storage(str(tmp_path))
    files.write("file", [memoryview(b"before")])
    with pytest.raises(OSError, match="no room"):
        files.write("file", pieces())
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"before")]


def test_file_is_written_where_the_file_system_refuses_to_pass_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.files.local_files.page_blocks", iter)
    pieces = [_some_bytes(2 << 20, address=1), _some_bytes(2 << 20, address=1), _some_bytes(3)]
    Storage(str(tmp_path)).write("file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
