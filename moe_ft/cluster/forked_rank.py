"""A forked process that becomes a rank, as if a launcher had started Python with a script.

Also reasons for which a process must not be forked, and imports that are none.
"""

import importlib
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from moe_ft.cluster.target import Target
from moe_ft.processes import set_process_name
from moe_ft.saying import speak_for

_TASKS = "/proc/self/task"
_DRIVER = "/dev/nvidiactl"
_ENDING_THREADS_S = 0.2  # from the end of a thread until the kernel has removed it


def why_not_to_fork() -> str:
    """Return what this process has done that breaks one that is forked now; empty if nothing is known."""
    if (num_threads := _num_threads()) > 1:
        names = [each.name for each in threading.enumerate()[1:]]
        if num_native := num_threads - threading.active_count():
            names.append(f"{num_native} native")
        return f"has started threads ({', '.join(names)})"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith("/dev/nvidia"):
                return f"has used CUDA ({path} is open)"
    return ""


def has_driver() -> bool:
    """Return whether this machine has the driver of a GPU."""
    return os.path.exists(_DRIVER)


@contextmanager
def without_driver() -> Iterator[None]:
    """Answer from /dev whether there is a GPU, without the driver, while modules are imported.

    Modules of Megatron and torch ask `torch.cuda.is_available` when they are imported. That starts CUDA,
    which no forked process can use then; or NVML, which keeps the device open until the process ends. A
    forked process asks the driver itself.
    """
    if has_driver():
        with suppress(ImportError):
            importlib.import_module("torch")
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    original = torch.cuda.is_available
    # Also without a driver, if torch is there: so that ranks of tests are as on a machine with a GPU.
    torch.cuda.is_available = has_driver
    try:
        yield
    finally:
        torch.cuda.is_available = original


def _num_threads() -> int:
    """Return how many threads are left when a process is forked.

    OpenBLAS, which numpy brings, ends its own before each fork and starts others when it computes. OpenMP
    does not: its threads are missing in the forked process, which would wait for them.
    """
    if len(os.listdir(_TASKS)) == 1:
        return 1
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.kill(pid, signal.SIGKILL)  # it may hang
    os.waitpid(pid, 0)
    end_s = time.monotonic() + _ENDING_THREADS_S
    while (num_threads := len(os.listdir(_TASKS))) > 1 and time.monotonic() < end_s:
        time.sleep(0.01)
    return num_threads


def become(name: str, environment: Mapping[str, str]) -> None:
    """Be a process of its own: in its own session, with a name, variables and random numbers."""
    os.setsid()
    os.environ.update(environment)
    speak_for("")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # it may die at any time
    # The command line, which ps and top show too, is that of the agent.
    set_process_name(name)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


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
