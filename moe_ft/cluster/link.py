"""Link of a forked rank to its fork server: whether its death can be repaired in place, and whether it lives.

It is some memory that both share, so it outlives the rank and costs no call. A thread of the rank counts in
it. That needs the interpreter, so the count stands still if the process is stopped, or sleeps in the kernel,
or if some thread keeps the interpreter to itself. The fork server counts the time for which it has watched
the number stand still: if it did not run itself, or if nothing on the node did, that is not held against a
rank. Standard library only.
"""

import mmap
import signal
import threading
import time
from collections.abc import Sequence

from moe_ft.command_lines import flag_value
from moe_ft.faults import Section

_FLAG = "--moe-ft-repair"
_NUM_CELLS = 6
_ARMED, _RETIRED, _BEATS, _LIMIT_S, _HUNG_S, _SECTION = range(_NUM_CELLS)
_SECTIONS = tuple(Section)
_LONGEST_PERIOD_S = 1.0
_LOOKS_PER_LIMIT = 10


class RankLink:
    """A rank that is to be replaced if it dies while it is armed.

    The fork server makes the link and forks the rank, which then has it too. Either may change it, in any
    thread.
    """

    def __init__(self) -> None:
        """Be not armed, and expect no beats."""
        self._cells = memoryview(mmap.mmap(-1, 8 * _NUM_CELLS)).cast("d")

    @property
    def is_armed(self) -> bool:
        """True if the fork server replaces the rank when it dies."""
        return bool(self._cells[_ARMED]) and not self._cells[_RETIRED]

    def arm(self) -> None:
        """Have the rank replaced when it dies."""
        self._cells[_ARMED] = 1

    def disarm(self) -> None:
        """Have the end of the rank be reported, as without repairs."""
        self._cells[_ARMED] = 0

    def retire(self) -> None:
        """Disarm for good: the rank is to end, whatever its training thread is about to do."""
        self._cells[_RETIRED] = 1

    @property
    def beats(self) -> int:
        """Number of beats of the rank so far."""
        return int(self._cells[_BEATS])

    def beat(self) -> None:
        """Show that the rank runs. One thread alone may do so."""
        self._cells[_BEATS] += 1

    @property
    def limit_s(self) -> float:
        """Seconds without a beat after which the fork server kills the rank; 0 if none are expected."""
        return self._cells[_LIMIT_S]

    def expect_beats(self, limit_s: float) -> None:
        """Have the fork server kill the rank after so many seconds without a beat; 0 ends that."""
        self._cells[_LIMIT_S] = limit_s

    @property
    def hung_s(self) -> float:
        """Seconds for which the rank had hung when it was killed for that; 0 if it was not."""
        return self._cells[_HUNG_S]

    def note_hang(self, seconds: float) -> None:
        """Say that the rank is killed because it has hung for so long."""
        self._cells[_HUNG_S] = seconds

    @property
    def section(self) -> Section:
        """Section of the training loop in which the rank is."""
        return _SECTIONS[int(self._cells[_SECTION])]

    @section.setter
    def section(self, section: Section) -> None:
        self._cells[_SECTION] = _SECTIONS.index(section)


def period_s(limit_s: float) -> float:
    """Return the seconds between two beats, and between two looks.

    Args:
        limit_s: silence that is a hang; 0 if no beats are expected.
    """
    return min(_LONGEST_PERIOD_S, limit_s / _LOOKS_PER_LIMIT) if limit_s else _LONGEST_PERIOD_S


class Heart:
    """The thread of a rank that beats. Started and closed by the training thread."""

    def __init__(self, link: RankLink, limit_s: float) -> None:
        """Beat not yet.

        Args:
            limit_s: silence after which the fork server kills this process.
        """
        self._link = link
        self._limit_s = limit_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, limit_s: float | None = None) -> None:
        """Begin to beat, once; the fork server expects it from now on.

        Args:
            limit_s: silence after which it kills this process until the next call, which gives none.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="moe_ft-heart", daemon=True)
            self._thread.start()
        self._link.expect_beats(limit_s or self._limit_s)

    def _beat(self) -> None:
        while not self._ended.wait(period_s(self._limit_s)):
            self._link.beat()

    def close(self) -> None:
        """End the thread; nobody expects it to beat any more."""
        self._link.expect_beats(0)
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


class Pulse:
    """The fork server's view of one rank's beats."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._beats = link.beats
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """Look, and return the seconds for which this has watched the rank be silent."""
        now_s, limit_s = time.monotonic(), self._link.limit_s
        # A longer time between two looks says that this process did not run, and nothing about the rank.
        passed_s = min(now_s - self._looked_s, 2 * period_s(limit_s))
        self._looked_s = now_s
        if not limit_s or self._link.beats != self._beats:
            self._beats = self._link.beats
            self._silent_s = 0.0
        else:
            self._silent_s += passed_s
        return self._silent_s


def wants_repair(words: Sequence[str]) -> bool:
    """Return whether a command line turns repairs in place on."""
    return flag_value(words, _FLAG) in ("auto", "try")


def exit_signal(words: Sequence[str]) -> signal.Signals | None:
    """Return the signal at which Megatron saves and ends ranks of a command line, if there is one."""
    if "--exit-signal-handler" in words:
        return signal.Signals.__members__.get(flag_value(words, "--exit-signal") or "SIGTERM")
    if flag_value(words, "train.exit_signal_handler").lower() == "true":  # of Megatron-Bridge
        number = flag_value(words, "train.exit_signal") or str(int(signal.SIGTERM))
        return next((each for each in signal.Signals if str(int(each)) == number), None)
    return None
