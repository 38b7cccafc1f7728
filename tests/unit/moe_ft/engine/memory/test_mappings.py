"""Mapped memory: what a later start of a process takes up and what not, and what CUDA refuses to pin."""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.memory import mappings
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.errors import PinError
from moe_ft.topology import RankInfo, Topology
from tests.pins import Registrations

SIZE, MIB = 3 * mmap.PAGESIZE, 1 << 20


@pytest.fixture
def counts() -> Iterator[Registrations]:
    with Patches() as patches:
        found = Registrations()
        found.install(patches)
        yield found


@pytest.fixture
def kept() -> Iterator[Mappings]:
    """Yield what a rank keeps from one start to the next."""
    found = Mappings(lasts=True)
    yield found
    found.close()


def start(folder: Path, kept: Mappings, **changes: Any) -> RankMemory:
    """Open and pin the two regions of a rank."""
    info = RankInfo(rank=0, node="a", stage=0, pid=1, address=None, region_bytes=SIZE)
    topology = Topology(ranks=(replace(info, **changes),))
    memory = RankMemory(folder, 0, topology, [], persists=False)
    memory.take_up(kept)
    memory.open(None)
    memory.pin()
    return memory


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_second_start_pins_and_touches_only_the_file_that_was_replaced_and_writes_to_the_new_one(
    tmp_path: Path, counts: Registrations, kept: Mappings
) -> None:
    memory = start(tmp_path, kept)
    first, second = memory.regions
    first.mapping[-1:], second.mapping[-1:] = b"1", b"2"
    assert counts.registered == counts.touched == [SIZE, SIZE]
    memory.close()
    counts.forget()
    memory = start(tmp_path, kept)
    assert counts.registered == counts.touched == []
    assert [bytes(each.mapping[-1:]) for each in memory.regions] == [b"1", b"2"]
    memory.close()
    second.data_path.rename(tmp_path / "another")  # a file of the same size takes its place
    second.data_path.write_bytes(bytes(SIZE))
    second.data_path.chmod(0o600)
    memory = start(tmp_path, kept)
    assert counts.registered == counts.touched == [SIZE]
    memory.regions[1].mapping[-1:] = b"3"
    assert second.data_path.read_bytes()[-1:] == b"3"
    assert (tmp_path / "another").read_bytes()[-1:] == b"2"
    assert len(counts.sizes) == 2


def test_what_the_next_start_does_not_need_is_unpinned_and_unmapped_before_it_takes_more(
    tmp_path: Path, counts: Registrations, kept: Mappings
) -> None:
    memory = start(tmp_path, kept, breakpoint_bytes=SIZE)
    assert memory.breakpoint is not None
    memory.close()
    assert is_mapped(memory.breakpoint.data_path)
    for path in (memory.breakpoint.data_path, memory.regions[0].data_path):
        path.unlink()  # its bytes stay in use as long as it is mapped
    info = RankInfo(rank=0, node="a", stage=0, pid=1, address=None, region_bytes=SIZE)
    following = RankMemory(tmp_path, 0, Topology(ranks=(info,)), [], persists=False)
    following.take_up(kept)
    assert not is_mapped(memory.breakpoint.data_path)
    assert not is_mapped(memory.regions[0].data_path)
    assert is_mapped(memory.regions[1].data_path)
    assert len(counts.sizes) == 1
    kept.close()
    assert not is_mapped(memory.regions[1].data_path)
    assert counts.sizes == {}


def test_memory_of_one_start_is_unpinned_and_unmapped_with_it(
    tmp_path: Path, counts: Registrations
) -> None:
    memory = start(tmp_path, Mappings())
    assert is_mapped(memory.regions[0].data_path)
    memory.close()
    assert not is_mapped(memory.regions[0].data_path)
    assert counts.sizes == {}


def test_file_that_cuda_refuses_leaves_none_pinned_is_named_and_not_tried_again(
    tmp_path: Path, counts: Registrations, kept: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    latched: list[str] = []

    def launch(*_: Any, **__: Any) -> torch.Tensor:
        latched.append("CUDA reports the error again, once")
        raise RuntimeError(latched[0])

    monkeypatch.setattr(torch, "zeros", launch)
    counts.refuses = lambda num_bytes: num_bytes == 2 * SIZE
    words = "/breakpoint.*: cudaHostRegister of 24.00 KiB failed with error 2 .out of memory"
    with pytest.raises(PinError, match=words):
        start(tmp_path, kept, breakpoint_bytes=2 * SIZE)
    assert (counts.registered, counts.sizes) == ([SIZE, SIZE], {})
    assert len(latched) == 1
    counts.refuses = lambda num_bytes: False
    with pytest.raises(PinError, match=words):
        start(tmp_path, kept, breakpoint_bytes=2 * SIZE)
    assert (len(counts.registered), len(latched)) == (2, 1)


def test_pages_of_a_large_file_are_touched_by_as_many_threads_as_cores_of_the_rank(
    tmp_path: Path, counts: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "num_cores_of_rank", lambda: 3)
    monkeypatch.setattr(mappings, "_SLICE_BYTES", SIZE)
    threads = set[int]()
    together, touch = threading.Barrier(3, timeout=15.0), mappings._populate_slice

    def touch_together(*args: int) -> None:
        threads.add(threading.get_ident())
        together.wait()  # for two other threads
        touch(*args)

    monkeypatch.setattr(mappings, "_populate_slice", touch_together)
    kept = Mappings()
    kept.open(tmp_path / "file", 5 * SIZE + 1)
    assert sorted(counts.touched) == [1, *[SIZE] * 5]
    assert len(threads) == 3
    kept.close()


def test_large_file_that_is_whole_is_mapped_as_it_is_and_touched_after_the_start(
    tmp_path: Path, counts: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "_SLICE_BYTES", SIZE)
    path, num_bytes, kept = tmp_path / "file", 2 * SIZE + 1, Mappings()
    kept.open(path, num_bytes)[-2:] = b"ab"
    kept.close()
    for holes in (False, True):
        if holes:  # as of a process that was killed while it made the file
            content = path.read_bytes()
            path.unlink()
            with path.open("wb") as file:
                file.truncate(num_bytes)
                file.seek(num_bytes - 2)
                file.write(content[-2:])
            path.chmod(0o600)
            assert path.stat().st_blocks * 512 < num_bytes
        counts.forget()
        found = Mappings()
        assert found.open(path, num_bytes)[-2:] == b"ab"
        assert sorted(counts.touched) == ([1, SIZE, SIZE] if holes else [])
        before = {*threading.enumerate()}
        found.touch_later()
        for thread in {*threading.enumerate()} - before:
            thread.join()
        assert sorted(counts.touched) == [1, SIZE, SIZE]
        found.touch_later()
        assert len(counts.touched) == 3
        found.close()
        assert not is_mapped(path)
    counts.forget()
    assert kept.open(path, num_bytes + 1)[-1:] == b"\0"  # another size: it is made again
    assert sorted(counts.touched) == [2, SIZE, SIZE]
    kept.close()


def test_large_file_that_is_whole_is_pinned_instead_of_touched(
    tmp_path: Path, counts: Registrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "_SLICE_BYTES", SIZE)
    path = tmp_path / "file"

    def register(_: int, num_bytes: int) -> str:
        counts.registered.append(num_bytes)
        return ""

    for num_touches in (2, 0):
        kept = Mappings()
        kept.open(path, 2 * SIZE)
        kept.pin([path], register, lambda address: None)
        kept.touch_later()
        assert len(counts.touched) == num_touches
        kept.close()
        counts.touched.clear()
    assert counts.registered == [2 * SIZE] * 2


def test_page_that_cannot_be_had_is_an_error_and_an_old_kernel_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter((errno.EFAULT, errno.EINVAL))

    def refuse(*args: int) -> None:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mappings, "_populate_slice", refuse)
    with pytest.raises(OSError, match="Bad address"):
        Mappings().open(tmp_path / "file", SIZE)
    kept = Mappings()
    assert len(kept.open(tmp_path / "file", SIZE)) == SIZE
    kept.close()


def test_new_file_takes_huge_pages_where_the_mount_gives_them_when_asked(
    mount_small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mount_small("16m,huge=advise")
    folder.chmod(0o700)
    allocate, blocks = os.posix_fallocate, list[int]()

    def note(descriptor: int, start: int, num_bytes: int) -> None:
        blocks.append(os.fstat(descriptor).st_blocks * 512)
        allocate(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", note)
    kept = Mappings()
    kept.open(folder / "file", 4 * MIB)
    # Whatever posix_fallocate adds here is small pages.
    assert blocks == [4 * MIB]
    smaps = Path("/proc/self/smaps").read_text().partition(str(folder / "file"))[2]
    flags = next(line for line in smaps.splitlines() if line.startswith("VmFlags"))
    assert "hg" in flags.split()
    with pytest.raises(OSError, match="No space left"):
        kept.open(folder / "large", 32 * MIB)
    assert (folder / "large").stat().st_size == 0
    kept.close()
