"""Power losses of the simulated shared file system: what is synced survives, the rest may not."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.files.storage import Storage
from tests.simulation.active import World
from tests.simulation.durability import damaged
from tests.unit.simulation.small_world import run, small_world

OLD, NEW = b"old content", b"something else that is longer"
PATH = "iter_0000005/manifest.json"


def sync(path: Path) -> None:
    """Sync a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def survivors(
    work: Callable[[Path], Any],
    prepare: Callable[[Path], Any] = lambda directory: None,
    seeds: int = 100,
) -> list[dict[str, bytes]]:
    """Return what storage may hold after something was done there and the power was lost, each once."""
    found: list[dict[str, bytes]] = []
    for seed in range(seeds):
        with small_world(seed) as world:
            world.files.tearing = 0.0
            prepare(world.files.storage)
            run(world, lambda world=world: work(world.files.storage))
            assert not world.kernel.errors
            world.files.power_loss()
            left = {
                path.removeprefix("storage/"): content
                for path, content in world.files.snapshot("storage").items()
            }
            if left not in found:
                found.append(left)
    return found


def prepare(directory: Path) -> None:
    """Write two files that are on the disk from the beginning."""
    (directory / "file").write_bytes(OLD)
    (directory / "other").write_bytes(NEW)


BOTH = {"file": OLD, "other": NEW}


def test_new_file_that_is_not_synced_may_vanish_or_hold_anything_of_its_length() -> None:
    found = survivors(lambda directory: (directory / "new").write_bytes(NEW))
    assert {} in found
    contents = {left["new"] for left in found if left}
    assert {b"", NEW} < contents
    assert any(content and NEW.startswith(content) for content in contents - {NEW})
    assert any(content.endswith(b"\0") for content in contents)
    assert any(not NEW.startswith(content.rstrip(b"\0")) for content in contents)


def test_file_that_is_overwritten_may_be_the_old_one_or_a_mixture() -> None:
    def work(directory: Path) -> None:
        with (directory / "file").open("r+b") as file:
            file.write(b"OLD")

    contents = {left["file"] for left in survivors(work, prepare, 200)}
    assert {OLD, b"OLD content", b"OLd content"} < contents


def test_rename_survives_or_not_but_never_half() -> None:
    found = survivors(lambda path: (path / "other").rename(path / "file"), prepare)
    assert len(found) == 2
    assert BOTH in found
    assert {"file": NEW} in found


def test_rename_may_survive_when_the_data_does_not() -> None:
    def work(directory: Path) -> None:
        (directory / "file.part").write_bytes(NEW)
        (directory / "file.part").rename(directory / "file")
        sync(directory)

    assert {"file": b""} in survivors(work, lambda path: (path / "file").write_bytes(OLD))


def test_later_change_of_a_name_never_survives_without_the_earlier() -> None:
    def work(directory: Path) -> None:
        for content in (b"1", b"2", b"3"):
            (directory / "file.part").write_bytes(content)
            sync(directory / "file.part")
            (directory / "file.part").rename(directory / "file")

    for left in survivors(work, lambda path: (path / "file").write_bytes(b"0"), 300):
        part = left.get("file.part", b"")
        assert part in (b"", bytes([left["file"][0] + 1])), left


def test_files_of_a_removed_directory_do_not_return_into_its_successor() -> None:
    def work(directory: Path) -> None:
        (directory / "old" / "a").unlink()
        (directory / "old").rmdir()
        (directory / "old").mkdir()
        (directory / "old" / "b").write_bytes(b"")

    def fill(directory: Path) -> None:
        (directory / "old").mkdir()
        (directory / "old" / "a").write_bytes(OLD)

    found = survivors(work, fill, 200)
    assert {"old/a": OLD} in found
    assert {"old/b": b""} in found
    assert {"old/a": OLD, "old/b": b""} not in found


def test_data_is_lost_after_a_sync_that_failed_though_the_next_succeeds() -> None:
    left = set()

    def work(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(NEW)
            file.flush()
            with pytest.raises(OSError, match="Input/output"):
                os.fsync(file.fileno())
            os.fsync(file.fileno())

    for seed in range(20):
        with small_world(seed) as world:
            path = world.files.storage / "file"
            path.write_bytes(OLD)
            world.files.fail("fsync", 5, "storage")
            run(world, lambda path=path: work(path))
            assert not world.kernel.errors
            world.files.power_loss()
            left.add(path.read_bytes())
    assert left == {OLD}


def test_damaged_content_is_never_longer_than_what_was_written_or_there() -> None:
    found = {damaged(b"ab", b"abcd", random.Random(seed)) for seed in range(200)}
    assert {b"ab", b"abcd", b"a", b"", bytes(4)} < found
    assert max(map(len, found)) == 4


def persist(world: World, content: bytes) -> None:
    """Write a file as the writer process does."""
    storage = Storage(str(world.files.storage / "persist"))
    storage.make_root()
    storage.write_atomically(PATH, content)


def left_after_power_loss(
    seed: int, number: int, write: Callable[[World, bytes], None] = persist
) -> tuple[bytes | None, bool]:
    """Return what is in a file, and whether its writer got to the end before it was killed."""
    with small_world(f"{seed} {number}") as world:
        world.files.tearing = 1.0
        run(world, lambda: persist(world, OLD))
        world.kernel.call_at_event(
            world.kernel.num_events + number, lambda what: world.kernel.end(world.process)
        )
        (process,) = run(world, lambda: write(world, NEW))
        assert not world.kernel.errors
        world.files.power_loss()
        path = world.files.storage / "persist" / PATH
        return path.read_bytes() if path.exists() else None, process.is_alive


def test_file_on_storage_is_whole_after_a_kill_at_every_event_and_a_power_loss() -> None:
    num_finished, left = 0, set()
    for number in range(1, 24):
        for seed in range(8):
            content, is_finished = left_after_power_loss(seed, number)
            left.add(content)
            num_finished += is_finished
            assert content == NEW or not is_finished
    assert left == {OLD, NEW}
    assert 0 < num_finished < 23 * 8
