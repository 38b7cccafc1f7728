"""Seconds until a node without power is called lost, and nodes that live and are called lost, under load.

    python -m benchmarks.verdicts [--minutes M] [--repeats N] [--hogs K] [--quick] [--output FILE.md]

Four nodes and one that keeps the job's store have a network namespace each, and `moe_ft keep` as it is; their
ranks only sleep. K processes compute beside them. Needs root, and `ip` (iproute2).

power     The link of a node is cut, and all its processes are killed. Seconds until the line "is lost".
stops     All processes of a node are stopped for 0.3 to 2.5 s, one node after the other.
keeper    All processes of the store's node are stopped for 0.5 to 5 s.
store     The link of the store's node is cut for 0.5 to 5 s.
path      What one node and the store's node send each other is lost for 0.5 to 5 s.
losses 2  What a node sends and gets is lost for 0.3 to 0.8 s, with --kernel-silence 2. It has a carrier.
flaps 2   The link of a node is down for so long, with --kernel-silence 2. Linux announces a carrier that is
          back up to a second late.
flaps 1   The same with --kernel-silence 1.

Nobody may be called lost but in `power`, and in `flaps 1`. The minutes are shared by the other kinds.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import override

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from tests.kept_nodes import KeptNodes
from tests.namespaces import Namespaces, why_none
from tests.waiting import wait_for

_KEEP = (
    "import sys; from moe_ft.cluster import options; options.PRELOADED = ('json',); "
    "from moe_ft.commands.launch import keep; keep(sys.argv[1:])"
)
_HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100000))"
_NAMES = ("node0", "node1", "node2", "node3")
_STORE = "node4"
_LONG_S = (0.5, 5.0)
_SHORT_S = (0.3, 0.8)
_LOST = "is lost"
_ESTABLISHED = " 01 "  # in a table of TCP connections
_DEADLINE_S = 120.0
_SETTLE_S = 4.0  # from the connections to the first fault, and from the last fault to its verdict
# By kind: shares of the minutes, and seconds of silence.
_SHARES = {
    "stops": (0.25, 1),
    "keeper": (0.1, 1),
    "store": (0.1, 1),
    "path": (0.15, 1),
    "losses 2": (0.15, 2),
    "flaps 2": (0.2, 2),
    "flaps 1": (0.05, 1),
}


class Nodes(KeptNodes):
    """Nodes whose ranks import nothing."""

    silence_s = 1

    @override
    def command(self, number: int) -> tuple[list[str], list[str], dict[str, str]]:
        _, words, variables = super().command(number)
        options = ["--kernel-silence", str(self.silence_s)]
        return [sys.executable, "-c", _KEEP], [*options, *words], variables

    def wait_until_watched(self) -> None:
        """Wait until each agent watches three others, which watch it."""

        def found() -> bool:
            # One connection to the store, and two by which it and each other node watch each other.
            agents = [dict(self._nodes)[name].pid for name in _NAMES]
            tables = [Path(f"/proc/{pid}/net/tcp").read_text() for pid in agents]
            return all(each.count(_ESTABLISHED) >= 7 for each in tables)

        wait_for(found, "connections between agents", _DEADLINE_S, poll_s=0.2)
        time.sleep(_SETTLE_S)


@contextmanager
def job(silence_s: int) -> Iterator[tuple[Nodes, Namespaces]]:
    """Run a job until the end of this context; agents watch each other."""
    with tempfile.TemporaryDirectory(prefix="verdicts_") as folder:
        script = Path(folder, "script.py")
        script.write_text("import time\ntime.sleep(10**6)\n")
        with (
            Namespaces(*_NAMES, _STORE) as networks,
            Nodes(
                Path(folder),
                [str(script)],
                num_nodes=4,
                ranks_per_node=1,
                networks=networks,
                store=4,
            ) as nodes,
        ):
            nodes.silence_s = silence_s
            nodes.start(*_NAMES, _STORE)
            nodes.wait_until_watched()
            yield nodes, networks


def lose(repeats: int) -> Iterator[float]:
    """Yield the seconds from losses of power to verdicts, in a job each."""
    for number in range(repeats):
        with job(1) as (nodes, networks):
            lost = _NAMES[1 + number % 3]
            begin_s = time.monotonic()
            networks.cut(lost)
            nodes.kill(lost)
            wait_for(lambda: _LOST in nodes.log(_STORE), _LOST, _DEADLINE_S, poll_s=0.02)
            yield time.monotonic() - begin_s


Act = Callable[..., None]


def _fault_of(
    kind: str, nodes: Nodes, networks: Namespaces
) -> tuple[Act, Act, tuple[float, float]]:
    """Return what begins a fault of some nodes and what ends it, and the limits of its seconds."""
    faults: dict[str, tuple[Act, Act, tuple[float, float]]] = {
        "stops": (nodes.stop, nodes.wake, (0.3, 2.5)),
        "keeper": (nodes.stop, nodes.wake, _LONG_S),
        "store": (networks.cut, networks.restore, _LONG_S),
        "path": (networks.part, networks.join, _LONG_S),
        "losses 2": (networks.unplug, networks.plug, _SHORT_S),
        "flaps 2": (networks.cut, networks.restore, _SHORT_S),
        "flaps 1": (networks.cut, networks.restore, _SHORT_S),
    }
    return faults[kind]


def inflict(kind: str, nodes: Nodes, networks: Namespaces, rng: random.Random) -> None:
    """Begin a fault of some nodes, end it after a time that is drawn, and wait until it has no effect."""
    begin, end, limits_s = _fault_of(kind, nodes, networks)
    names = [] if kind in ("keeper", "store") else [rng.choice(_NAMES)]
    if kind in ("keeper", "store", "path"):
        names.append(_STORE)
    begin(*names)
    time.sleep(rng.uniform(*limits_s))
    end(*names)
    if kind != "stops":  # others may be stopped at once
        time.sleep(_SETTLE_S)


def disturb(kind: str, seconds: float) -> tuple[int, int]:
    """Inflict faults of a kind for so long; return their number, and that of false verdicts."""
    rng, end_s = random.Random(kind), time.monotonic() + seconds
    num_faults = num_false = 0
    while num_faults == 0 or time.monotonic() < end_s:
        with job(_SHARES[kind][1]) as (nodes, networks):
            while _LOST not in nodes.log(_STORE):
                inflict(kind, nodes, networks, rng)
                num_faults += 1
                time.sleep(rng.uniform(0.2, 1.0))
                if time.monotonic() >= end_s:
                    break
            time.sleep(_SETTLE_S)
            if _LOST in nodes.log(_STORE):
                num_false += 1
                print(kind, nodes.log(_STORE)[-300:], file=sys.stderr, flush=True)
    print(f"{kind}: {num_faults} faults, {num_false} false", file=sys.stderr, flush=True)
    return num_faults, num_false


def main() -> None:
    """Lose and disturb nodes, and print the table."""
    options = read_options(
        minutes=(60.0, 1.0, "of faults that are no loss"),
        repeats=(9, 1, "losses of power"),
        hogs=(8, 8, "processes that compute"),
    )
    parts = [
        conditions(f"{options.minutes:g} minutes of faults, {options.hogs} processes compute.")
    ]
    rows = [("not run: " + why_none(), "", "", "")]
    if not why_none():
        hogs = [
            subprocess.Popen([sys.executable, "-c", _HOG], env=os.environ)
            for _ in range(options.hogs)
        ]
        try:
            taken_s = [*lose(options.repeats)]
            print("power:", *taken_s, file=sys.stderr, flush=True)
            rows = [("power", spread(taken_s, ".2f"), str(options.repeats), "0")]
            for kind, (share, _) in _SHARES.items():
                faults, false = disturb(kind, share * options.minutes * 60)
                rows.append((kind, "-", str(faults), str(false)))
        finally:
            for each in hogs:
                each.kill()
                each.wait()
    headers = ("kind", "to the verdict, s", "faults", "false verdicts")
    show([*parts, markdown_table(rows, headers)], options.output)


if __name__ == "__main__":
    main()
