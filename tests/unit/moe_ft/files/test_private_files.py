"""Directories and files of ours are made private; what others own or could replace is refused."""

import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ft.errors import CorruptStateError, UnsafePathError
from moe_ft.files.private_files import (
    create_private,
    make_private,
    make_root,
    open_private,
    open_regular,
    read_private,
    replace_file,
    write_atomically,
)

STRANGER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def made(path: Path, mode: int, uid: int | None = None) -> Path:
    """Return a directory with a mode and, if root makes it, an owner."""
    path.mkdir()
    path.chmod(mode)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


@pytest.mark.parametrize("make", [make_root, make_private])
def test_directories_that_are_missing_are_created_for_their_user_only(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "a" / "b")
    assert (mode_of(tmp_path / "a"), mode_of(tmp_path / "a" / "b")) == (0o700, 0o700)


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777])
def test_named_directory_that_exists_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    make_root(made(tmp_path / "shm", mode))
    assert mode_of(tmp_path / "shm") == mode


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("make", [make_root, make_private])
def test_directory_in_which_others_can_rename_is_refused(
    tmp_path: Path, make: Callable[[Path], None], mode: int
) -> None:
    with pytest.raises(UnsafePathError, match=f"can be written by other users.*{mode:04o}"):
        make(made(tmp_path / "open", mode))


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o1777])
@pytest.mark.parametrize("make", [make_root, make_private])
def test_directory_of_another_user_is_refused(
    tmp_path: Path, make: Callable[[Path], None], mode: int
) -> None:
    with pytest.raises(UnsafePathError, match=f"belongs to user {STRANGER}, not to 0"):
        make(made(tmp_path / "theirs", mode, STRANGER))


def test_own_directory_in_a_sticky_place_is_refused_when_others_can_write_to_it(
    tmp_path: Path,
) -> None:
    # Not the place that the user named, but one that we create below it.
    with pytest.raises(UnsafePathError, match="can be written by other users"):
        make_private(made(tmp_path / "job", 0o1777))


@pytest.mark.parametrize("make", [make_root, make_private])
def test_directory_that_is_a_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        make(tmp_path / "file")


def test_named_directory_may_be_a_link_of_its_user(tmp_path: Path) -> None:
    made(tmp_path / "target", 0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    make_root(tmp_path / "link")
    assert mode_of(tmp_path / "target") == 0o755


@as_root
def test_named_directory_that_is_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "target", 0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.lchown(tmp_path / "link", STRANGER, STRANGER)
    with pytest.raises(
        UnsafePathError, match=f"link is a symbolic link that belongs to .*{STRANGER}"
    ):
        make_root(tmp_path / "link")


def test_directory_below_that_is_a_link_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "target", 0o700)
    (tmp_path / "job").symlink_to(tmp_path / "target")
    with pytest.raises(UnsafePathError, match="job is a symbolic link"):
        make_private(tmp_path / "job")


@pytest.mark.parametrize("open_", [open_private, create_private])
def test_link_to_a_file_is_refused_and_its_target_stays(
    tmp_path: Path, open_: Callable[[Path], object]
) -> None:
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(UnsafePathError, match="link is a symbolic link"):
        open_(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == b"secret"


def test_file_in_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "target", 0o700)
    (tmp_path / "target" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(UnsafePathError, match="link is a symbolic link"):
        read_private(tmp_path / "link" / "file")


@pytest.mark.parametrize("open_", [open_private, create_private])
def test_named_pipe_is_refused_without_waiting_for_its_other_end(
    tmp_path: Path, open_: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePathError, match="pipe is not a regular file"):
        open_(tmp_path / "pipe")


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, kind in (
            (tmp_path / "pipe", "named pipe"),
            (tmp_path / "socket", "socket"),
            (Path("/dev/null"), "device"),
        ):
            with pytest.raises(
                CorruptStateError, match=f"{path} is not a regular file, but a {kind}"
            ):
                open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


@as_root
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"planted")
    os.chown(tmp_path / "file", STRANGER, STRANGER)
    with pytest.raises(UnsafePathError, match=f"file belongs to user {STRANGER}"):
        read_private(tmp_path / "file")


def test_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(UnsafePathError, match="file can be written by other users"):
        read_private(tmp_path / "file")


def test_file_that_is_missing_is_said_to_be_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "missing")):
        read_private(tmp_path / "missing")


def test_file_that_is_created_is_its_users_only(tmp_path: Path) -> None:
    os.close(create_private(tmp_path / "file"))
    assert mode_of(tmp_path / "file") == 0o600


def test_small_file_of_any_size_is_written_whole(tmp_path: Path) -> None:
    for num_bytes in (0, 1, 1 << 22):
        write_atomically(tmp_path / "file", b"x" * num_bytes)
        assert read_private(tmp_path / "file") == b"x" * num_bytes


def test_small_file_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"secret")
    for name in ("file", f".file.{os.getpid()}"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "file", b"new")
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"secret"


def test_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "known")
    mine, page = tmp_path / "mine", tmp_path / "page"
    mine.write_text("mine")
    page.symlink_to(mine)
    replace_file(page, "new")
    assert (mine.read_text(), page.read_text(), page.is_symlink()) == ("mine", "new", False)
    (tmp_path / ".known.part").symlink_to(mine)  # a name that was guessed
    with pytest.raises(FileExistsError):
        replace_file(page, "newer")
    assert (mine.read_text(), page.read_text()) == ("mine", "new")
