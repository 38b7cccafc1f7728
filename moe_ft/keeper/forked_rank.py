"""A forked process that becomes a rank, as if the launcher had started Python with a script."""

import ctypes
import os
import random
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from moe_ft.keeper.protocol import RankRequest
from moe_ft.keeper.target import Target

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def become(request: RankRequest, streams: Sequence[int]) -> None:
    """Take over from the worker: its streams, environment, folder and cores, in a session of its own."""
    os.setsid()
    follow_parent(os.getppid())
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.umask(request.mask)
    os.sched_setaffinity(0, request.cpus)
    _call_itself(f"rank_{request.environment.get('RANK', '')}")
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def follow_parent(parent_pid: int) -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _call_itself(name: str) -> None:
    """Set the name that ps and top show: the command line is that of the process with the imports."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def run(target: Target) -> None:
    """Run the script or module as ``__main__``; returns, or raises, as it does."""
    started_from = sys.path[0]
    sys.path[0] = target.first_path
    if started_from not in sys.path:
        sys.path.append(started_from)  # a checkout of moe_ft that is not installed
    sys.argv = [target.name, *target.arguments]
    if target.is_module:
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
    else:
        run_script(target.name)


def run_script(name: str) -> None:
    """Run a file as the module ``__main__``, which it stays until the process has ended.

    With runpy it would end too early for what a script leaves to the end of the process.
    """
    path = os.path.abspath(name)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, vars(main))
