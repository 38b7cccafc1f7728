"""Mistakes in keeper and repair, put in on purpose: the simulation of repairs must find each of them."""

import time
from dataclasses import replace
from typing import Any

from moe_ft.cluster import job_store, law, roster, rounds
from moe_ft.cluster.agent import Agent
from moe_ft.cluster.fork_server import ForkServer
from moe_ft.cluster.forks import Forks
from moe_ft.cluster.link import Pulse, RankLink
from moe_ft.cluster.membership import Job
from moe_ft.cluster.rounds import Entry, RoundMark, Rounds
from moe_ft.faults import Section
from moe_ft.loop import hangs
from moe_ft.loop.hangs import Hangs, Limits, Silence
from tests.simulation.active import Patches
from tests.simulation.mutations import Mutation, mutation, name_of
from tests.simulation.repairs.product import (
    Done,
    Links,
    Member,
    Watcher,
    be_replaced_again,
    hold_stops_against_threads,
)

OF_REPAIRS: set[str] = set()
OF_NODES: set[str] = set()
OF_HANGS: set[str] = set()
OF_ELASTIC: set[str] = set()


def repair_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that repairs show it."""
    OF_REPAIRS.add(name_of(make))
    return mutation(make)


def node_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that lost or silent nodes show it."""
    OF_NODES.add(name_of(make))
    return repair_mutation(make)


def hang_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that hangs in sections of the loop show it."""
    OF_HANGS.add(name_of(make))
    return repair_mutation(make)


def elastic_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that starts on another number of nodes show it."""
    OF_ELASTIC.add(name_of(make))
    return repair_mutation(make)


@hang_mutation
def evaluations_without_a_limit(patches: Patches) -> None:
    """A thread may be silent in an evaluation for as long as it likes."""
    original = Limits.of

    def of(self: Limits, section: Section) -> float:
        return float("inf") if section is Section.EVALUATION else original(self, section)

    patches.set(Limits, "of", of)


@hang_mutation
def waiting_ranks_blamed(patches: Patches) -> None:
    """A rank that waits for another one in a collective is taken for one that hangs."""
    patches.set(Hangs, "_waits", lambda self: False)


@hang_mutation
def own_stop_is_silence(patches: Patches) -> None:
    """Time in which a process did not run counts as silence of its training thread."""
    patches.set(hangs, "_LONGEST_LOOK_S", float("inf"))


@hang_mutation
def waits_for_storage_are_silence(patches: Patches) -> None:
    """A wait for storage, which has a deadline of its own, counts as silence."""
    patches.set(hangs, "excused_until_s", lambda thread: 0.0)


@hang_mutation
def slow_writes_are_silence(patches: Patches) -> None:
    """A checkpoint that is still being written counts as silence."""
    patches.set(Silence, "_writes", lambda self, silent_s: False)


@repair_mutation
def silent_ranks_live_on(patches: Patches) -> None:
    """The fork server does not kill a rank that is stopped."""
    patches.set(ForkServer, "_end_silent", lambda self: None)


@repair_mutation
def own_stop_held_against_ranks(patches: Patches) -> None:
    """Time in which the fork server did not run counts as silence of its ranks."""

    def silent_s(self: Pulse) -> float:
        now_s = time.monotonic()
        is_silent = self._link.limit_s and self._link.beats == self._beats
        self._silent_s = self._silent_s + now_s - self._looked_s if is_silent else 0.0
        self._looked_s, self._beats = now_s, self._link.beats
        return self._silent_s

    patches.set(Pulse, "silent_s", silent_s)


@repair_mutation
def own_stop_held_against_the_thread(patches: Patches) -> None:
    """Time in which a process did not run counts as a hang of its training thread."""
    hold_stops_against_threads(patches)


@elastic_mutation
def told_to_end_and_replaced(patches: Patches) -> None:
    """A rank that its agent has told to end is replaced: it lives on in the next start."""
    patches.set(RankLink, "retire", lambda self: None)


@repair_mutation
def replacement_without_the_token(patches: Patches) -> None:
    """The fork server does not pass the token of the start to a replacement."""
    original = Member.replacement

    def replacement(self: Member, died_s: float) -> Member:
        return Member(replace(original(self, died_s).assignment, token=""))

    patches.set(Member, "replacement", replacement)


@repair_mutation
def round_joined_twice(patches: Patches) -> None:
    """A replacement joins the round that its rank had joined before it died."""
    patches.set(Rounds, "has_joined", lambda self, number, rank: False)


@repair_mutation
def members_of_earlier_rounds_count(patches: Patches) -> None:
    """Ranks that have joined an earlier round count as members of the present one."""
    original = rounds._key

    def key(number: int, what: str) -> str:
        return original(0 if what == "members" else number, what)

    patches.set(rounds, "_key", key)


@repair_mutation
def broken_rounds_waited_for(patches: Patches) -> None:
    """Ranks that meet do not see that one of them has died."""
    original = Rounds._wait_for

    def wait_for(self: Rounds, number: int, what: str, deadline_s: float) -> Any:
        waiting = Patches()
        waiting.set(self, "is_declared", lambda number: False)
        try:
            return original(self, number, what, deadline_s)
        finally:
            waiting.restore()

    patches.set(Rounds, "_wait_for", wait_for)


@repair_mutation
def rounds_without_end(patches: Patches) -> None:
    """Repairs begin again, however many were broken."""
    patches.set(rounds, "MOST_UNFINISHED", 1000)


def _never_noted(patches: Patches, never: RoundMark) -> None:
    original = Rounds.note

    def note(self: Rounds, mark: RoundMark, number: int = 0) -> None:
        if mark is not never:
            original(self, mark, number)

    patches.set(Rounds, "note", note)


@repair_mutation
def finished_rounds_forgotten(patches: Patches) -> None:
    """Nobody says that a repair has ended."""
    _never_noted(patches, RoundMark.FINISHED)


@repair_mutation
def timeouts_kept_to_oneself(patches: Patches) -> None:
    """A rank that has timed out waiting for another one does not tell the others."""
    _never_noted(patches, RoundMark.TIMED_OUT)


@repair_mutation
def survivors_never_freed(patches: Patches) -> None:
    """The connections of those that hang in a collective are not ended."""
    patches.set(Links, "end", lambda self, number: 0)


@repair_mutation
def hang_not_ended(patches: Patches) -> None:
    """A training thread that does not leave its iteration is left alone."""
    patches.set(Watcher, "_end_if_stuck", lambda self: None)


@repair_mutation
def replacement_forever(patches: Patches) -> None:
    """A rank that was replaced once says in each later round that it has died."""
    original = Member._join_next

    def join_next(self: Any) -> None:
        if self.is_replacement:
            be_replaced_again(self)
        original(self)

    patches.set(Member, "_join_next", join_next)


@repair_mutation
def position_of_the_round_before(patches: Patches) -> None:
    """A survivor says where its loop was when it met the others last."""
    original, said = Rounds.join, dict[Any, Any]()

    def join(self: Rounds, number: int, entry: Entry) -> None:
        facts = said.get(self) or entry.facts
        original(self, number, replace(entry, facts=facts))
        said[self] = entry.facts

    patches.set(Rounds, "join", join)


@repair_mutation
def lines_logged_again_by_each_for_itself(patches: Patches) -> None:
    """A rank that has logged an iteration does not log it again, whether others had or not."""
    has_logged = property(lambda self: self.position.done >= Done.LOG)
    patches.set(Member, "all_had_logged", has_logged)


@repair_mutation
def log_lines_outside_of_repairs(patches: Patches) -> None:
    """A rank says of a log line that it was broken off in the iteration of its own loop that comes next."""
    original = Member.note

    def note(self: Any, done: Done) -> None:
        original(self, done)
        if done == Done.STEP:
            self.position = replace(self.position, iteration=self.position.iteration + 1)

    patches.set(Member, "note", note)


@node_mutation
def replaced_ranks_take_part(patches: Patches) -> None:
    """A node that wakes up joins the round in which it was replaced."""
    patches.set(Rounds, "is_own_lost", lambda self, number: False)


@node_mutation
def verdict_in_a_round_of_others(patches: Patches) -> None:
    """The loss of a node is declared in a round that may have begun for another reason."""

    def declare_lost(self: Rounds, ranks: Any, since: int = 0) -> int:
        number = max(1, self.newest(since))
        if self.is_finished(number):
            number += 1
        self._store.set(rounds._key(number, "declared"), {"ranks": list(ranks)})
        return number

    patches.set(Rounds, "declare_lost", declare_lost)


@node_mutation
def failed_ranks_end_the_job(patches: Patches) -> None:
    """The job ends when a rank has failed, although all could begin again (--max-restarts)."""
    patches.set(law, "can_restart", lambda job: False)


@node_mutation
def nobody_is_crowded(patches: Patches) -> None:
    """The job ends if nobody takes a lost node's ranks, although a node that trains could."""
    patches.set(law, "_hosts_of", lambda job, slots: {})


@node_mutation
def guests_have_devices(patches: Patches) -> None:
    """Ranks that a host runs for a lost node are not told that they share its devices."""
    patches.set(law, "_host_of", lambda seats, slot: None)


@node_mutation
def host_forgotten_with_a_process(patches: Patches) -> None:
    """The process that takes the place of a rank on the same node is not told whose device it shares."""
    original = Member.replacement

    def replacement(self: Member, died_s: float) -> Member:
        return Member(replace(original(self, died_s).assignment, host_rank=None))

    patches.set(Member, "replacement", replacement)


@node_mutation
def crowded_slots_forgotten(patches: Patches) -> None:
    """Of the slots of a host that is lost, only its own gets another node."""
    original = Job.slots_of

    def slots_of(self: Job, ids: Any) -> frozenset[int]:
        own = dict(reversed([*((id, slot) for slot, id in self.seats.items())]))
        return original(self, ids) & {*own.values()}

    patches.set(Job, "slots_of", slots_of)


@node_mutation
def ranks_that_move_live_on(patches: Patches) -> None:
    """A host does not end ranks that another node gets, and reports that they have failed."""
    patches.set(Forks, "end", lambda self, ranks: None)


@node_mutation
def slots_move_in_the_middle_of_a_round(patches: Patches) -> None:
    """A node that comes gets a slot of a host although a repair is not finished."""
    original = law._uncrowd

    def uncrowd(job: Job) -> law.Done:
        newest = job.reports.newest
        moved, commands = original(replace(job, reports=replace(job.reports, finished=newest)))
        return replace(moved, reports=job.reports), commands

    patches.set(law, "_uncrowd", uncrowd)


@node_mutation
def store_is_waited_for(patches: Patches) -> None:
    """A node that is cut off waits for the job's store, and its ranks live on."""
    patches.set(Agent, "_ask", lambda self, ask: ask())


@node_mutation
def silent_nodes_are_waited_for(patches: Patches) -> None:
    """Nobody calls a node lost."""
    patches.set(law, "_lose", lambda job, ids, why, *_: (job, []))


@node_mutation
def ends_kept_to_oneself(patches: Patches) -> None:
    """A node does not say that its ranks have ended."""
    original = roster.NodeSeat.beat
    patches.set(roster.NodeSeat, "beat", lambda self, code, *_, **__: original(self, None))


@node_mutation
def orders_ignored(patches: Patches) -> None:
    """A node does not run the ranks that it is given."""
    patches.set(Agent, "_take", lambda self, order: None)


@elastic_mutation
def starts_share_a_store(patches: Patches) -> None:
    """Ranks of all starts use the same keys in the store."""
    original = job_store._open
    patches.set(job_store, "_open", lambda address, run, token, _: original(address, run, token, 0))


@elastic_mutation
def starts_after_all_are_to_save(patches: Patches) -> None:
    """All ranks begin again when a node is lost, although they were to save and end."""
    original = law._lose

    def lose(job: Job, ids: Any, *why: Any) -> law.Done:
        found, commands = original(replace(job, is_ending=False), ids, *why)
        return replace(found, is_ending=job.is_ending), commands

    patches.set(law, "_lose", lose)


@elastic_mutation
def ends_of_an_earlier_start_count(patches: Patches) -> None:
    """Ranks that have failed in the start before count as those of the present one."""
    original = roster.NodeRoster.hear

    class AnyStart(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    patches.set(
        roster.NodeRoster, "hear", lambda self, start, asked: original(self, AnyStart(), asked)
    )


@elastic_mutation
def growth_in_the_middle_of_a_round(patches: Patches) -> None:
    """All ranks begin again when a node comes, although a repair is not finished."""
    original = law._grow

    def grow(job: Job) -> law.Done:
        newest = job.reports.newest
        found, commands = original(replace(job, reports=replace(job.reports, finished=newest)))
        return (found if commands else job), commands

    patches.set(law, "_grow", grow)


@elastic_mutation
def untrained_starts_counted_for_ever(patches: Patches) -> None:
    """Nodes lost before an iteration was finished count, although one was finished since."""
    original = law._begin

    def begin(job: Job, *given: Any, **how: Any) -> law.Done:
        found, commands = original(job, *given, **how)
        return replace(found, vain=job.vain + how.get("is_failure", True)), commands

    patches.set(law, "_begin", begin)


@elastic_mutation
def nobody_left_is_no_reason(patches: Patches) -> None:
    """A job whose nodes were all lost in turn repairs, although no rank knows where training is."""
    patches.set(Rounds, "survivors", lambda self, number: {*range(self._world_size)} | {-1})


@elastic_mutation
def lost_nodes_live_on(patches: Patches) -> None:
    """A node that wakes up does not learn that it was called lost, and its ranks train on."""
    patches.set(roster.NodeSeat, "is_lost", lambda self: False)
