"""System calls that do a part, or are to be made again."""

import errno
import os
import socket
from pathlib import Path

import pytest

from moe_ft.calls import looks_again, receive_all, write_all


class Stale:
    """A function that fails so many times, and then returns how often it was called."""

    def __init__(self, num_failures: int, error: int = errno.ESTALE) -> None:
        self.num_calls = 0
        self._num_failures = num_failures
        self._error = error

    def __call__(self) -> int:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise OSError(self._error, os.strerror(self._error))
        return self.num_calls


def test_stale_file_is_looked_for_again_and_given_up_after_a_while() -> None:
    assert looks_again()(Stale(4))() == 5
    never = Stale(10**6)
    with pytest.raises(OSError, match="Stale"):
        looks_again()(never)()
    assert never.num_calls == 5


@pytest.mark.parametrize("others", [(), (errno.ENOENT,)])
def test_only_named_errors_mean_to_look_again(others: tuple[int, ...]) -> None:
    missing, failing = Stale(1, errno.ENOENT), Stale(1, errno.EIO)
    if others:
        assert looks_again(*others)(missing)() == 2
    else:
        with pytest.raises(FileNotFoundError):
            looks_again()(missing)()
    with pytest.raises(OSError, match="Input/output"):
        looks_again(*others)(failing)()


def test_file_system_that_writes_nothing_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setattr("moe_ft.calls.os.write", lambda descriptor, data: 0)
        with pytest.raises(OSError, match="writes nothing"):
            write_all(file.fileno(), b"content")


def test_bytes_that_arrive_in_pieces_are_all_received_and_an_end_is_noticed() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        one.sendall(b"ab")
        one.sendall(b"cd")
        assert receive_all(other, 3) == b"abc"
        one.close()
        with pytest.raises(ConnectionError, match="closed the connection"):
            receive_all(other, 3)
