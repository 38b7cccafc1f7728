"""System calls whose first answer is not the last: done in part, or to be made again.

A file system near its quota, Lustre and FUSE may write less than they were asked to. On NFS a file that
another machine has replaced answers ESTALE, once, until its name is looked up again. After EINTR Python
itself makes a call again. Standard library only.
"""

import ctypes
import errno
import functools
import os
import socket
from collections.abc import Callable

_TRIES = 5


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write to a file where it stands, and continue after a part; raises OSError if a call fails."""
    rest = memoryview(content)
    while rest:
        if not (count := os.write(descriptor, rest)):
            raise OSError(errno.EIO, "the file system writes nothing and names no error")
        rest = rest[count:]


def receive_all(connection: socket.socket, num_bytes: int) -> bytes:
    """Return the next bytes; raises ConnectionError if the other side closes before."""
    content = bytearray(num_bytes)
    rest = memoryview(content)
    while rest:
        if not (count := connection.recv_into(rest)):
            raise ConnectionError("the other side closed the connection")
        rest = rest[count:]
    return bytes(content)


def looks_again[**Arguments, Result](
    *others: int,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Have a function called again, at once, if a file was replaced meanwhile; it may have succeeded then.

    Args:
        others: numbers of errors besides ESTALE that mean this here, such as EEXIST of a directory.
    """

    def decorated(act: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(act)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            for _ in range(_TRIES - 1):
                try:
                    return act(*arguments, **options)
                except OSError as error:
                    if error.errno not in (errno.ESTALE, *others):
                        raise
            return act(*arguments, **options)

        return call

    return decorated


def nccl_version() -> int:
    """Return the version of the NCCL that torch calls; torch.cuda.nccl.version is that of its headers.

    Raises OSError if there is none.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))  # of LD_PRELOAD
    except AttributeError:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value
