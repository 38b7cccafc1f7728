"""Remains of a failure by stage: the states that it could restore, and the logs and records for its replays.

planning/remains.py has the input, planning/local_recovery.py chooses. Pure.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from moe_ft.format.identity import Start
from moe_ft.planning.recovery import Version
from moe_ft.planning.remains import PipelineLayout, Remains, StageLink
from moe_ft.planning.scope import KeptRecord, SentLog

# Iteration of the whole state, number of snapshots, and the start that wrote a window: another one may have
# grouped its units differently. Whole states of several starts of one run fit together.
StateKey = tuple[int, int, Start | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageState:
    """State that all ranks of a stage have.

    Attributes:
        key: what states of several ranks, or of several stages, that were saved together have in common.
    """

    key: StateKey
    versions: Mapping[int, tuple[Version, ...]]

    @property
    def iteration(self) -> int:
        """Iteration of the whole state."""
        return self.key[0]

    @property
    def replay_from(self) -> int:
        """Iteration that is put back first."""
        return self.key[0] - self.key[1] + 1

    @property
    def order(self) -> tuple[int, int, Start]:
        """Greater for the better one: the later, then the one with the shorter window."""
        return self.replay_from, -self.key[1], self.key[2] or Start(number=0, resumed_at=0)


class Restorable:
    """Remains of a failure, arranged for questions. Does not change them."""

    def __init__(self, remains: Remains, pipelines: PipelineLayout) -> None:
        """Arrange the remains. What is of ranks that do not exist is left out."""
        self._pipelines = pipelines
        self._stage_of = {
            rank: stage for stage, ranks in enumerate(pipelines.stages) for rank in ranks
        }
        self.states = self._states(remains)
        self._logs: dict[tuple[int, int, str, int], list[SentLog]] = defaultdict(list)
        for log in remains.logs:
            if log.place in remains.unreadable:
                continue
            self._logs[log.sender, log.receiver, log.direction, log.iteration].append(log)
        self._records = self._records_of(remains)
        self._own_record_only = remains.own_record_only
        self._broken: dict[tuple[StageLink, int], tuple[int, int] | None] = {}

    def _states(self, remains: Remains) -> list[list[StageState]]:
        """Return ``[stage]`` the states that all its ranks have, in no particular order."""
        found: list[dict[StateKey, dict[int, list[Version]]]] = [
            defaultdict(lambda: defaultdict(list)) for _ in self._pipelines.stages
        ]
        for version in remains.versions:
            if version.rank in self._stage_of:
                start = None if version.window == 1 else version.start
                family = found[self._stage_of[version.rank]][
                    version.iteration, version.window, start
                ]
                family[version.rank].append(version)
        return [
            [
                StageState(key=key, versions={rank: tuple(by_rank[rank]) for rank in ranks})
                for key, by_rank in families.items()
                if len(by_rank) == len(ranks)
            ]
            for ranks, families in zip(self._pipelines.stages, found, strict=True)
        ]

    def _records_of(self, remains: Remains) -> dict[tuple[int, int], KeptRecord]:
        """Return by stage and iteration its best record: in memory, then of the lowest rank."""
        within = (
            KeptRecord(
                rank=each.rank, iteration=each.iteration - age, node=each.node, path=each.path
            )
            for each in remains.versions
            for age in range(each.window)
        )
        found: dict[tuple[int, int], KeptRecord] = {}
        for each in (*remains.records, *within):
            is_readable = each.numbers is not None or each.place not in remains.unreadable
            if each.rank in self._stage_of and is_readable:
                key = self._stage_of[each.rank], each.iteration
                found[key] = min(found.get(key, each), each, key=_rank_record)
        return found

    def broken_wire(self, link: StageLink, iteration: int) -> tuple[int, int] | None:
        """Return the first sender and receiver of a link whose log of an iteration is missing."""
        key = link, iteration
        if key not in self._broken:
            wires = self._pipelines.wires(link)
            missing = (
                wire for wire in wires if (*wire, link.direction, iteration) not in self._logs
            )
            self._broken[key] = next(missing, None)
        return self._broken[key]

    def log(self, link: StageLink, wire: tuple[int, int], iteration: int) -> SentLog:
        """Return the log of a sender for a receiver that is nearest to the receiver."""
        node = self._pipelines.node_of[wire[1]]
        return min(
            self._logs[*wire, link.direction, iteration],
            key=lambda each: (each.node is None, each.node != node, each.node or "", each.path),
        )

    def record(self, stage: int, iteration: int) -> KeptRecord | None:
        """Return a record of a state that answers for a stage: its own, else that of the nearest stage."""
        stages = [stage]
        if self._pipelines.has_common_records:
            everyone = range(self._pipelines.num_stages)
            stages = sorted(everyone, key=lambda other: (abs(other - stage), other))
        found = (self._records.get((other, iteration)) for other in stages)
        return next((each for each in found if each is not None), None)

    def first_gap(self, stage: int, state: StageState, target: int) -> int | None:
        """Return the first iteration after a state, up to the target, of which no record answers."""
        for each in range(state.iteration + 1, target + 1):
            if each in self._own_record_only or self.record(stage, each) is None:
                return each
        return None

    def reason_of_gap(self, iteration: int) -> str:
        """Return why a stage cannot run past an iteration, after its name."""
        if iteration in self._own_record_only:
            return (
                f"has no record of its own of iteration {iteration}, which was evaluated, or came before a "
                "change of the learning rate or another such flag"
            )
        return f"has no record of iteration {iteration}"


def _rank_record(record: KeptRecord) -> tuple[bool, int, str, str]:
    return record.node is None, record.rank, record.node or "", record.path
