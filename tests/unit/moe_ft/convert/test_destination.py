"""The destination appears when it is complete, continues after an interruption, and goes after an error."""

import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from moe_ft.convert import destination as destinations
from moe_ft.convert.destination import LocalDestination
from moe_ft.convert.foreign_files import signature_of
from moe_ft.errors import ConfigError, UnsafePathError
from moe_ft.format.encoding import checksum


def make(folder: Path, plan: str = "plan") -> LocalDestination:
    return LocalDestination(str(folder / "dst"), plan, f"conversion {plan}")


FACTS = {"file": "shard", "parts": [["all", 7, checksum(b"content")]]}


def write_one(destination: LocalDestination) -> None:
    """Write a shard, and note it."""
    (destination.work / "shard").write_text("content")
    destination.note("0", FACTS)


def interrupt(destination: LocalDestination) -> None:
    """Interrupt a conversion after its first shard."""
    with pytest.raises(KeyboardInterrupt), destination.writing():
        write_one(destination)
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_there", [False, True])
def test_folder_appears_complete(is_there: bool, tmp_path: Path) -> None:
    destination = make(tmp_path)
    if is_there:
        destination.path.mkdir()
    destination.check(1)
    with destination.writing():
        write_one(destination)
        assert not destination.path.exists() or not any(destination.path.iterdir())
    assert [each.name for each in destination.path.iterdir()] == ["shard"]
    assert not destination.work.exists()


def test_interrupted_conversion_continues(tmp_path: Path) -> None:
    interrupt(make(tmp_path))
    again = make(tmp_path)
    again.check(1)
    assert (again.written("0"), again.written("1")) == (FACTS, None)
    with again.writing():
        pass
    assert (again.path / "shard").read_text() == "content"


def test_shard_that_was_changed_since_is_written_again(tmp_path: Path) -> None:
    interrupt(make(tmp_path))
    (tmp_path / "dst.incomplete/shard").write_text("forgery")
    with (again := make(tmp_path)).writing():
        assert again.written("0") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("spoil", ["owner", "mode", "link"])
def test_beginning_that_others_can_have_made_is_refused(spoil: str, tmp_path: Path) -> None:
    interrupt(make(tmp_path))
    work = tmp_path / "dst.incomplete"
    if spoil == "owner":
        os.chown(work, 65534, 65534)
    elif spoil == "mode":
        work.chmod(0o777)
    else:
        work.rename(tmp_path / "theirs")
        work.symlink_to(tmp_path / "theirs")
    with pytest.raises(UnsafePathError, match=f"{work} (belongs to|can be written|is a symbolic)"):
        make(tmp_path).check(1)
    with pytest.raises(UnsafePathError), make(tmp_path).writing():
        pass


def test_shards_of_before_a_restart_of_the_machine_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(make(tmp_path))
    monkeypatch.setattr(destinations, "boot_id", lambda: "another")
    again = make(tmp_path)
    again.check(1)
    assert again.written("0") is None


@pytest.mark.parametrize(("journal", "found"), [(None, "conversion plan"), ("{", "something else")])
def test_beginning_of_another_conversion_is_refused(
    journal: str | None, found: str, tmp_path: Path
) -> None:
    interrupt(make(tmp_path))
    if journal is not None:
        (tmp_path / "dst.incomplete/conversion.json").write_text(journal)
    with pytest.raises(ConfigError, match=f"holds that of {found}. Remove it"):
        make(tmp_path, "other").check(1)


def test_conversion_that_is_started_twice_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    for each in (first, second):
        each.check(1)
    with first.writing():
        write_one(first)
        with (
            pytest.raises(ConfigError, match=r"DST=.*dst is being written by another process"),
            second.writing(),
        ):
            pass
    assert [each.name for each in tmp_path.iterdir()] == ["dst"]
    assert (first.path / "shard").read_text() == "content"
    with pytest.raises(ConfigError, match="must be a new or an empty folder"), second.writing():
        pass  # it was checked before the first one ended
    assert (first.path / "shard").read_text() == "content"


def test_conversion_that_was_killed_is_continued(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        killed = make(tmp_path)
        writing = killed.writing()
        writing.__enter__()
        write_one(killed)
        os.write(writer, b"written")
        signal.pause()
    os.read(reader, 7)
    again = make(tmp_path)
    with pytest.raises(ConfigError, match="is being written by another process"), again.writing():
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with again.writing():
        assert again.written("0") == FACTS
    assert [each.name for each in tmp_path.iterdir()] == ["dst"]


def test_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(ConfigError, match=r"DST=.*dst must be on a file system with locks"),
        make(tmp_path).writing(),
    ):
        pass


@pytest.mark.parametrize("is_file", [False, True])
def test_destination_with_content_is_refused(is_file: bool, tmp_path: Path) -> None:
    destination = make(tmp_path)
    if is_file:
        destination.path.write_text("mine")
    else:
        (destination.path / "mine").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"DST=.*dst must be a new or an empty folder"):
        destination.check(1)


def test_destination_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be made: .*file is a file"):
        make(tmp_path / "file").check(1)


def test_too_little_space_is_found_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DST=.*dst needs \d+ bytes, but .* has only \d+ free"):
        make(tmp_path).check(shutil.disk_usage(tmp_path).total * 2)


def test_signature_changes_when_a_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a")
    before = signature_of([path])
    assert signature_of([path]) == before
    path.write_text("ab")
    assert signature_of([path]) != before
