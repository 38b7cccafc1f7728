"""Checks of recoveries against the state in memory and on storage before each start.

Digests alone do not tell a recovery from a run that began again: both end in the same state. Between two
starts `RecoveryWatch.look` reads what the dead processes have left and derives by its own rules what the
next start must recover: the newest state of the latest start that left state of every rank, and for each
rank the nearest tier that has it. It reads only indexes; a test that damages data checks the recovery
itself.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ft.errors import CorruptStateError
from moe_ft.events import last_incarnation
from moe_ft.format.encoding import decode
from moe_ft.format.index import IndexHead
from moe_ft.format.manifest import Manifest
from tests.harness import events


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Complete window of one rank in one place.

    Attributes:
        iteration: last iteration of the window.
        start: number of the start that wrote it.
        node: the node whose memory holds it, None for storage.
    """

    rank: int
    iteration: int
    window: int
    start: int
    node: str | None
    strategy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Recovery that a start must make.

    Attributes:
        tiers: ``[rank]`` the tier that its state must come from.
        has_parts: whether single experts may come from other tiers.
    """

    restored_iteration: int
    target_iteration: int
    tiers: tuple[str, ...]
    has_parts: bool = False

    def __str__(self) -> str:
        replayed = self.target_iteration - self.restored_iteration
        replays = f"+{replayed}" if replayed else ""
        return f"{self.restored_iteration}{replays} from {'/'.join(self.tiers)}"


def find_held(memory: Path, storage: Path | None) -> list[Held]:
    """Return every window that can be read.

    Args:
        memory: the memory directory of the job, with a directory for each node.
        storage: its persist directory, None without one.
    """
    found = []
    for path in memory.glob("*/*/region_*.json"):
        index = _decoded(path, IndexHead)
        if index is not None and index.is_whole and path.with_name(index.file).exists():
            found.append(_held(index, index.rank, path.parent.parent.name))
    for path in storage.glob("iter_*/manifest*.json") if storage is not None else ():
        manifest = _decoded(path, Manifest)
        if manifest is not None:
            found += [_held(manifest, file.rank, None) for file in manifest.files]
    return found


def _held(body: IndexHead | Manifest, rank: int, node: str | None) -> Held:
    return Held(
        rank=rank,
        iteration=body.iteration,
        window=body.window,
        start=body.identity.start.number,
        node=node,
        strategy=body.identity.strategy,
    )


def _decoded[Body: (IndexHead, Manifest)](path: Path, kind: type[Body]) -> Body | None:
    try:
        return decode(path.read_bytes(), kind, str(path))
    except CorruptStateError:
        return None


def newest(held: Sequence[Held], world_size: int, nodes: Sequence[str] | None) -> Expected | None:
    """Return what a start must recover, None if there is no state of all ranks.

    Args:
        nodes: ``[rank]`` its node in that start; None if there is only one node.
    """
    families: dict[tuple[int, int, int], dict[int, list[Held]]] = defaultdict(dict)
    for each in held:
        family = (each.start, each.iteration, -each.window)
        families[family].setdefault(each.rank, []).append(each)
    whole = [family for family, by_rank in families.items() if len(by_rank) == world_size]
    if not whole:
        return None
    best = max(whole)
    _, iteration, negative_window = best
    places = families[best]
    return Expected(
        restored_iteration=iteration + negative_window + 1,
        target_iteration=iteration,
        tiers=tuple(
            _nearest(places[rank], None if nodes is None else nodes[rank])
            for rank in range(world_size)
        ),
        has_parts=places[0][0].strategy in ("partial", "selective"),
    )


def _nearest(places: Sequence[Held], node: str | None) -> str:
    in_memory = {each.node for each in places if each.node is not None}
    if in_memory:
        return "memory" if node is None or node in in_memory else "peer"
    return "storage"


class RecoveryWatch:
    """Watch over the starts of a job: notes what each must recover, and checks at the end that it did.

    Attributes:
        expected: ``[start - 1]``.
    """

    def __init__(
        self,
        log: Path,
        world_size: int,
        memory: Path,
        storage: Path | None = None,
        nodes: Callable[[int], Sequence[str] | None] | None = None,
        *,
        has_begun: bool = False,
    ) -> None:
        """Begin to watch before or after the first start.

        Args:
            log: event log; earlier starts in it are not checked.
            memory: memory directory of the job, with a directory for each node.
            has_begun: whether the last start in the log is the first one to watch.
        """
        self._log, self._world_size = log, world_size
        self._memory, self._storage, self._nodes = memory, storage, nodes
        last = max(last_incarnation(log, rank) for rank in range(world_size))
        self._first = last if has_begun else last + 1
        self.expected: list[Expected | None] = []

    def look(self, start: int) -> None:
        """Note what the start after a failed one must recover."""
        assert start == len(self.expected)
        nodes = None if self._nodes is None else self._nodes(start + 1)
        held = find_held(self._memory, self._storage)
        self.expected.append(newest(held, self._world_size, nodes))

    def check(self, num_starts: int, *, has_breakpoints: bool = False) -> list[Expected | None]:
        """Check every start but the first on every rank; return what their windows had for them.

        With breakpoints a start may recover a newer state than that of the windows, never an older one.

        A rank that dies in its recovery or in the replay after it writes no recovery event. Every rank of a
        start that trained an iteration has one.
        """
        checked = self.expected[: num_starts - 1]
        for start, expected in enumerate(checked, 1):
            lines = recoveries_of(self._log, self._world_size, self._first + start)
            has_trained = self._has_trained(self._first + start)
            for rank, line in enumerate(lines):
                where = f"start {start}, rank {rank}: must recover {expected or 'nothing'}, "
                if line is None:
                    assert expected is None or not has_trained, f"{where}recovered nothing"
                elif has_breakpoints:
                    check_newer_recovery(line, expected, where)
                else:
                    assert expected is not None, f"{where}recovered {_said(line)}"
                    check_recovery(line, expected, rank, where)
        return checked

    def _has_trained(self, incarnation: int) -> bool:
        return any(
            line["incarnation"] == incarnation and line["event"] in ("iteration", "end")
            for rank in range(self._world_size)
            for line in events(self._log, rank)
        )


def recoveries_of(log: Path, world_size: int, incarnation: int) -> list[dict[str, Any] | None]:
    """Return ``[rank]`` the recovery event of an incarnation, None without one; fail if there are two."""
    found: list[dict[str, Any] | None] = []
    for rank in range(world_size):
        lines = [
            line for line in events(log, rank, "recovery") if line["incarnation"] == incarnation
        ]
        assert len(lines) <= 1, f"rank {rank} recovered {len(lines)} times in one start"
        found.append(lines[0] if lines else None)
    return found


def check_recovery(line: dict[str, Any], expected: Expected, rank: int, where: str = "") -> None:
    """Fail unless a rank's recovery event says what is expected."""
    names = ("restored_iteration", "target_iteration", "replayed_iterations")
    wanted = (
        expected.restored_iteration,
        expected.target_iteration,
        expected.target_iteration - expected.restored_iteration,
    )
    assert tuple(line[name] for name in names) == wanted, f"{where}recovered {_said(line)}"
    if not expected.has_parts:
        tiers = set(line["sources"])
        assert tiers == {expected.tiers[rank]}, f"{where}recovered {_said(line)}"


def check_newer_recovery(line: dict[str, Any], expected: Expected | None, where: str = "") -> None:
    """Fail unless a rank's recovery event says at least what is expected, and all of it together adds up."""
    reached = line["restored_iteration"] + line["replayed_iterations"]
    assert line["target_iteration"] == reached, f"{where}recovered {_said(line)}"
    least = 0 if expected is None else expected.target_iteration
    assert reached >= least, f"{where}recovered {_said(line)}"


def _said(line: dict[str, Any]) -> str:
    return f"{line['restored_iteration']}+{line['replayed_iterations']} from {line['sources']}"
