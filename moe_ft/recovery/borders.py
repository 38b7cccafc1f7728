"""Borders of a local recovery: logs of neighbours that keep their state, and meetings.

Logs and numbers are read and verified before any live state is overwritten, except for logs on other nodes:
these are fetched while the replay runs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from moe_ft.engine.agreement import Agreement
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.engine.boundary.reading import FetchedLog, LoggedIteration, NeighbourLog, open_slot
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.errors import CorruptStateError
from moe_ft.format.boundary import BoundaryIndex
from moe_ft.format.encoding import decode
from moe_ft.format.records import JobNumbers, numbers_of
from moe_ft.planning.recovery import Plan, Source
from moe_ft.planning.scope import KeptRecord, Place, Scope, SentLog
from moe_ft.recovery.media import connect
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import Readers


class Lockstep:
    """Meetings of one local recovery; there are none in any other. Owned by the training thread.

    All ranks meet before each iteration that some stage runs again. Ranks that run nothing again learn from
    these meetings that the others make progress. So they wait for many iterations, but never longer for one
    than the timeout of the job's groups; and they hear of a rank that has died at the next meeting. The plan
    says which iterations these are, the same on all ranks.
    """

    def __init__(self, everyone: Agreement, plan: Plan | None) -> None:
        self._everyone = everyone
        self._next = 0
        self._target = -1
        if plan is not None and plan.is_local:
            self._next = plan.replay_from
            self._target = plan.iteration

    def before(self, iteration: int) -> None:
        """Meet before an iteration that this rank runs again, and before those that only others have run.

        Raises RuntimeError if a rank does not come in time, or has died.
        """
        while self._next <= min(iteration, self._target):
            self._everyone.barrier()
            self._next += 1

    def end(self) -> None:
        """Wait until all ranks have the state of the target; see `before`."""
        self.before(self._target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Borders:
    """Answers to a rank that runs iterations again with its scope alone.

    Attributes:
        ranks: that run iterations again together; links and collectives reach no others.
        tail: numbers of the job after each iteration that follows the rank's own window.
    """

    ranks: frozenset[int]
    player: BoundaryPlayer
    tail: tuple[JobNumbers, ...]
    fetched: tuple[FetchedLog, ...] = ()

    def close(self) -> None:
        """Close what the logs are fetched with: the replay is over."""
        for each in self.fetched:
            each.close()


def read_borders(plan: Plan, met: Met, readers: Readers) -> tuple[Borders | None, dict[Place, str]]:
    """Read what the replay of this rank needs. Not collective.

    Returns:
        Nothing for a rank without borders: it runs nothing again, or all ranks do. And what is missing, or
        damaged, by its place.
    """
    if not plan.is_local:
        return None, {}
    stage, pipelines = met.facts.stage, met.pipelines
    scope = plan.scope_of(stage)
    if scope is None or pipelines is None:
        return None, {}
    missing: dict[Place, str] = {}
    tail = []
    for record in scope.records[stage]:
        numbers = _read_numbers(record, plan, met, readers)
        if numbers is None:
            missing[record.place] = f"record of iteration {record.iteration}"
        else:
            tail.append(numbers)
    logs = {
        sender: _open_logs(sent, met, missing)
        for sender, sent in _sent_to(met.site.rank, scope).items()
    }
    borders = Borders(
        ranks=frozenset(rank for each in scope.stages for rank in pipelines.stages[each]),
        player=BoundaryPlayer(met.site.rank, logs, _live_from(plan, scope, met)),
        tail=tuple(tail),
        fetched=tuple(each for each in logs.values() if isinstance(each, FetchedLog)),
    )
    return borders, missing


def _live_from(plan: Plan, scope: Scope, met: Met) -> dict[int, int]:
    """Return by rank the iteration with which each rank of the scope begins."""
    assert met.pipelines is not None
    return {
        rank: plan.stages[stage].replay_from
        for stage in scope.stages
        for rank in met.pipelines.stages[stage]
    }


def _sent_to(rank: int, scope: Scope) -> Mapping[int, Sequence[SentLog]]:
    found: dict[int, list[SentLog]] = defaultdict(list)
    for each in scope.logs:
        if each.receiver == rank:
            found[each.sender].append(each)
    return found


def _read_numbers(record: KeptRecord, plan: Plan, met: Met, readers: Readers) -> JobNumbers | None:
    """Return the numbers of a record, from the state that it is kept with."""
    if record.numbers is not None:
        return record.numbers
    for source in _sources_with(record, plan, met):
        reader = readers.open(source)
        for each in reader.index.records if reader is not None else ():
            if each.iteration == record.iteration:
                return numbers_of(each)
    return None


def _sources_with(record: KeptRecord, plan: Plan, met: Met) -> Iterator[Source]:
    for source in plan.elsewhere.get(record.rank, ()):
        version = source.version
        if (version.node, version.path) == (record.node, record.path):
            yield version.seen_from(met.site.node)  # not as the rank of the state sees it


def _open_logs(sent: Sequence[SentLog], met: Met, missing: dict[Place, str]) -> NeighbourLog:
    """Open the logs of one neighbour; note those that cannot be read."""
    here: dict[int, LoggedIteration] = {}
    elsewhere: dict[int, BoundaryIndex] = {}
    nodes = _Nodes(met)
    for each in sent:
        try:
            if each.node == met.site.node:
                here[each.iteration] = _open_here(each, met)
            else:
                elsewhere[each.iteration] = nodes.open_log(each)
        except OSError as error:
            missing[each.place] = (
                f"boundary log of rank {each.sender}, iteration {each.iteration} ({error})"
            )
    if elsewhere:
        return FetchedLog(elsewhere, sent[0].receiver, nodes.fetch, nodes.close, here)
    nodes.close()
    return here


def _open_here(sent: SentLog, met: Met) -> LoggedIteration:
    logged = open_slot(met.site.node_dir / sent.path)
    _check_is_planned(logged.index, sent)
    logged.check(sent.receiver)
    return logged


def _check_is_planned(index: BoundaryIndex, sent: SentLog) -> None:
    if (index.rank, index.iteration) != (sent.sender, sent.iteration):
        raise CorruptStateError(
            f"{sent.path} now holds iteration {index.iteration} of rank {index.rank}, not what was planned"
        )


class _Nodes:
    """Other nodes that keep logs of one neighbour. Used by one thread at a time."""

    def __init__(self, met: Met) -> None:
        self._met = met
        self._connections: dict[str, PeerConnection] = {}
        self._paths: dict[int, tuple[str, str]] = {}  # of data, by iteration, with the node
        self._unreachable: dict[str, OSError] = {}

    def open_log(self, sent: SentLog) -> BoundaryIndex:
        """Return the index of a log; raises OSError if it cannot be read, or is of something else."""
        assert sent.node is not None
        if sent.node in self._unreachable:  # not once more for each of its logs
            raise self._unreachable[sent.node]
        try:
            content = bytes(self._connect(sent.node).get(sent.path))
        except (ConnectionError, TimeoutError) as error:
            self._unreachable[sent.node] = error
            raise
        index = decode(content, BoundaryIndex, f"{sent.path} of node {sent.node}")
        _check_is_planned(index, sent)
        path = PurePosixPath(sent.path).with_name(index.file)
        self._paths[sent.iteration] = sent.node, str(path)
        return index

    def fetch(self, index: BoundaryIndex, offset: int, num_bytes: int) -> memoryview:
        """Return a range of a log that was opened; raises OSError if that fails."""
        node, path = self._paths[index.iteration]
        return memoryview(self._connect(node).get(path, offset, num_bytes))

    def _connect(self, node: str) -> PeerConnection:
        if node not in self._connections:
            self._connections[node] = connect(self._met, node)
        return self._connections[node]

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
