"""Small operations on storage in a process of their own, which may hang without harm to the one that asks.

A call on a file system that stands still is ended by no signal (state D). Its process cannot end then: it
keeps its locks, and its launcher waits. A rank has such calls made here, and leaves the helper behind; that
ends when storage answers again, or when it is no longer asked. Files of state are read by ranks themselves,
and written by engine/persist/writer.py.
"""

import builtins
import importlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import msgspec

from moe_ft import errors
from moe_ft.processes import command_of, ignore_signals

_LOOK_S = 2.0  # between two looks for the process that asks
_IDLE_LOOKS = 30
_TRIES = 2  # a helper may have ended, since it had nothing to do


class _Request(msgspec.Struct, frozen=True, array_like=True):
    module: str
    function: str
    arguments: list[Any]


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """Result of a function, or its error: the class, the number of the system's error, and the text."""

    value: Any = None
    kind: str = ""
    number: int | None = None
    text: str = ""


_REQUEST, _ANSWER = msgspec.msgpack.Decoder(_Request), msgspec.msgpack.Decoder(_Answer)


_left: list["subprocess.Popen[bytes]"] = []  # which may be in state D


class Helper:
    """The process, which is started when it is first asked. Any thread may ask; they wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection[Any, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_left = False

    def perform[Result](self, act: Callable[..., Result], arguments: Sequence[Any]) -> Result:
        """Return what a function of a module returns there for arguments that msgspec encodes.

        Raises:
            OSError: if the helper ends meanwhile.
            Exception: what the function raises, if it is of the system, of moe_ft or of Python.
        """
        request = _Request(act.__module__, act.__name__, list(arguments))
        answer = self._ask(msgspec.msgpack.encode(request))
        if answer.number is not None:
            raise OSError(answer.number, answer.text)
        if answer.kind:
            kind = getattr(errors, answer.kind, None) or getattr(builtins, answer.kind, None)
            raise OSError(f"{answer.kind}: {answer.text}") if kind is None else kind(answer.text)
        return cast(Result, answer.value)

    def _ask(self, content: bytes) -> _Answer:
        with self._lock:
            for attempt in range(_TRIES):
                connection = self._connection or self._start()
                try:
                    connection.send_bytes(content)
                    return _ANSWER.decode(connection.recv_bytes())
                except (EOFError, OSError) as error:
                    if self._connection is connection:
                        self._connection = None
                    if attempt + 1 == _TRIES or self._is_left:
                        raise OSError(f"the helper for storage has ended: {error!r}") from error
        raise AssertionError

    def _start(self) -> "Connection[Any, Any]":
        own, other = socket.socketpair()
        with other:
            # Not the rank's output: a launcher waits until every holder of its pipe has closed it.
            self._process = subprocess.Popen(
                command_of(__name__, str(other.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self._connection = Connection(own.detach())
        return self._connection

    def abandon(self) -> None:
        """Leave a helper that does not answer, and is asked nothing any more; wait for nobody."""
        self._is_left = True
        if self._process is not None:
            self._process.kill()
            _left[:] = [each for each in (*_left, self._process) if each.poll() is None]


def main(descriptor: str, parent: str) -> None:
    """Serve a process until it ends, or asks nothing for a while."""
    ignore_signals()
    connection: Connection[Any, Any] = Connection(int(descriptor))
    num_looks = 0
    while num_looks < _IDLE_LOOKS and os.getppid() == int(parent):
        if not connection.poll(_LOOK_S):
            num_looks += 1
            continue
        num_looks = 0
        try:
            answer = _answer(_REQUEST.decode(connection.recv_bytes()))
            connection.send_bytes(msgspec.msgpack.encode(answer))
        except (EOFError, OSError):
            return


def _answer(request: _Request) -> _Answer:
    try:
        act = getattr(importlib.import_module(request.module), request.function)
        return _Answer(value=act(*request.arguments))
    except Exception as error:  # the one who asks raises it
        number, text = None, str(error)
        if isinstance(error, OSError) and error.errno is not None:
            number, text = error.errno, f"{os.strerror(error.errno)}: {error.filename!r}"
        return _Answer(kind=type(error).__name__, number=number, text=text)
