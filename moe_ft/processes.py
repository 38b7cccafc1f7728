"""Processes of this machine: its boot, their start, end, name and cores, and what ends them.

Standard library only; Linux.
"""

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STATE, _FLAGS, _START_TICKS = 0, 6, 19  # in /proc/PID/stat after the name
_PF_EXITING = 0x4
_CODE = Path(__file__).resolve().parent.parent
# Only the package comes from there: nothing else in its directory may hide other packages.
_RUN = (
    "import sys; sys.path.insert(0, sys.argv[1]); import moe_ft; del sys.path[0]; "
    "from {} import main; main(*sys.argv[2:])"
)
_PENDING = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", re.MULTILINE)


def boot_id() -> str:
    """Return the id that the kernel draws when a machine starts; empty where there is none."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def process_namespace() -> str:
    """Return a name of the boot and the process numbers that this process can see; empty if unknown."""
    with suppress(OSError):
        return f"{boot_id()} {Path('/proc/self/ns/pid').stat().st_ino}" if boot_id() else ""
    return ""


def start_ticks(pid: int) -> int:
    """Return when a process was started, which tells it from earlier ones of its number.

    In ticks since boot: the time since 1970 changes when the clock is set. Raises OSError if it is gone.
    """
    return int(_status(pid)[_START_TICKS])


def has_ended(pid: int, started: int | None = None) -> bool:
    """Return whether a process has ended, also if its parent has not noticed yet.

    Args:
        started: its `start_ticks`; None if its number cannot be that of another one.
    """
    try:
        os.kill(pid, 0)
        status = _status(pid)
    except ProcessLookupError:
        return True
    except OSError:  # another user's, which may be hidden
        return False
    is_other = started is not None and int(status[_START_TICKS]) != started
    return is_other or status[_STATE] in ("Z", "X")


def is_ending(pid: int) -> bool:
    """Return whether nothing can keep a process from ending any more, though that may still take long.

    Its threads may wait for storage, where no signal ends them, and until then the kernel keeps its locks.
    """
    try:
        status, more = _status(pid), Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    killed = any(int(each, 16) >> signal.SIGKILL - 1 & 1 for each in _PENDING.findall(more))
    is_exiting = status[_STATE] in ("Z", "X") or int(status[_FLAGS]) & _PF_EXITING != 0
    return is_exiting or killed or "CoreDumping:\t1" in more


def holder_of_lock(path: Path) -> int | None:
    """Return the process that has the lock of a file; None if none has that is seen from here."""
    with suppress(OSError):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            *_, pid, place, _, _ = line.split()
            if place == device and "->" not in line:  # of one that waits for it
                return int(pid)
    return None


def is_stopped(pid: int) -> bool:
    """Return whether a process stands still until somebody lets it continue (SIGSTOP)."""
    with suppress(OSError):
        return _status(pid)[_STATE] == "T"
    return False


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def num_cores_of_rank() -> int:
    """Return how many cores are this rank's share of its node, or those that it is bound to; at least 1."""
    of_node = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(of_node, len(os.sched_getaffinity(0))))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def follow_parent(parent_pid: int) -> None:
    """Have this process killed when its parent ends."""
    die_with_parent()
    if os.getppid() != parent_pid:  # it has ended before
        os._exit(1)


def exit_within(seconds: float) -> None:
    """End this process after some seconds, whatever its other threads wait for until then."""

    def leave() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=leave, name="moe_ft-exit", daemon=True).start()


def command_of(module: str, *words: str) -> list[str]:
    """Return a command line that calls `main` of a module of moe_ft with words.

    It runs the code of this process and imports nothing from the working directory.
    """
    return [sys.executable, "-P", "-c", _RUN.format(module), str(_CODE), *words]


def ignore_signals() -> None:
    """Ignore what launchers and SLURM send to everyone: the parent decides when this process ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Megatron's --exit-signal, usually
        signal.signal(number, signal.SIG_IGN)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show, of which the kernel keeps 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def process_name(pid: int) -> str:
    """Return the name that ps and top show of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def raise_descriptors(wanted: int) -> int:
    """Raise the soft limit of this process as far as the hard limit allows; return what it may have then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
