"""Driver of the law (law.py): events from silence and values of the store, and commands as values and lines.

It runs in the process that keeps the store, and decides nothing. Each start has values of its own in the
store, which processes of earlier ones cannot sign.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from moe_ft.cluster import law
from moe_ft.cluster.failures import Reported
from moe_ft.cluster.membership import (
    Begin,
    Changed,
    Command,
    Declare,
    Declared,
    EndSlot,
    Event,
    Failed,
    HearAll,
    Job,
    Over,
    Passed,
    Policy,
    RankReports,
    Registered,
    Save,
    Say,
    Seat,
    Shape,
    StoreTold,
    Strike,
    ToldToEnd,
    Wait,
    Wake,
    WithoutSpare,
)
from moe_ft.cluster.options import KeepOptions
from moe_ft.cluster.roster import OVER, SAVE, NodeRoster, Order, of_node
from moe_ft.cluster.rounds import RoundMark, Rounds
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.config.lost_nodes import ELASTIC, answer_of
from moe_ft.errors import ConfigError
from moe_ft.failure_domains import SLURM, domains_of_slurm, read_domains
from moe_ft.files.private_files import replace_file
from moe_ft.saying import say, warn


class Coordinator:
    """Drives the law of one job. One thread, in the process that keeps the store."""

    def __init__(
        self,
        open_start: Callable[[int], SignedStore],
        policy: Policy,
        lost_after_s: float,
        status: str = "",
        kernel_silence_s: float = 0.0,
    ) -> None:
        """Know no node yet.

        Args:
            open_start: returns the store of a start by its number; nodes use the first one, 0.
            lost_after_s: silence of a node after which it is lost.
            status: path of a file, or empty. It has the exit code of the job, "-" before, and in the next
                lines names of nodes by slot. These get the same ranks again: their memory has their state.
            kernel_silence_s: silence after which others may say that a node is lost; 0 if they may not.
        """
        size = policy.shape.num_nodes
        self._status = Path(status) if status else None
        self.job = Job(policy=policy, before=_read_names(self._status, size), size=size)
        self._open_start = open_start
        self._store = open_start(0)
        self._rounds = Rounds(self._store, 0, len(self.job.ranks_of(range(size))))
        self._reported = Reported(self._store)
        self._roster = NodeRoster(self._store, lost_after_s, kernel_silence_s)
        self._written = ""  # to the file
        self._due_s: dict[str, float] = {}  # by the name of a `Wake`
        self._died_s: dict[int, float] = {}  # of the ranks that a round leaves out
        self._is_told = False

    @property
    def over(self) -> int | None:
        """Exit code of the job; None while it runs."""
        return self.job.over

    def tell(self) -> None:
        """Learn that the store is to end; may be called by a handler of a signal."""
        self._is_told = True

    def step(self) -> None:
        """Look once, and tell the law what there is to see."""
        if self.over is None:
            for event in self._events():
                self._feed(event)
            self._write_status()

    def _events(self) -> Iterator[Event]:
        """Yield what has happened since the last look; each is fed before the next one is looked for."""
        if arrived := self._roster.arrived():
            yield Registered(arrived)
        changed, silences = self._roster.hear(
            self.job.start, lambda: self._rounds.is_next_suspected(self.job.reports.newest)
        )
        failures = self._reported.new()  # after the exit codes, as a rank reports before it ends
        now_s = time.monotonic()
        due = [what for what, due_s in self._due_s.items() if now_s > due_s]
        nodes = (*changed, *self.job.nodes.values())
        may_lose = bool(silences or due or failures) or any(
            each.code or each.unreached for each in nodes
        )
        if (reports := self._reports(may_lose)) != self.job.reports:
            yield reports
        if failures:
            yield Failed(failures)
        if changed:
            yield Changed(changed)
        yield from silences
        if told := self._roster.told():
            yield ToldToEnd(told)
        if self._is_told:
            yield StoreTold()
        for what in due:
            if self._due_s.get(what, now_s) < now_s:  # nothing has asked for it again
                del self._due_s[what]
                yield Passed(what)
        if self._roster.has_heard_all():
            yield Passed("heard")

    def _reports(self, may_lose: bool) -> RankReports:
        """Read what ranks have reported; who knows where training is only if a node may be lost now."""
        known, rounds = self.job.reports, self._rounds
        newest = rounds.newest(known.newest)
        later = range(newest, known.finished, -1)
        finished = next((each for each in later if rounds.is_finished(each)), known.finished)
        knowing = None
        if newest > finished:
            knowing = known.knowing if newest == known.newest else None
            knowing = frozenset(rounds.survivors(newest)) if may_lose else knowing
        trained = known.trained or rounds.has(RoundMark.FINISHED)
        return RankReports(
            newest=newest,
            finished=finished,
            trained=trained,
            ended=known.ended or rounds.has(RoundMark.ENDED),
            waiting=rounds.waiting(known.waiting),
            knowing=knowing,
            full=rounds.has(RoundMark.FULL) if trained and not known.trained else known.full,
            in_place=not rounds.has(RoundMark.NOT_IN_PLACE)
            if trained and not known.trained
            else known.in_place,
        )

    def _feed(self, event: Event) -> None:
        self.job, commands = law.step(self.job, event)
        for each in commands:
            self._carry_out(each)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Seat(node, slot, round, lost, host):
                died_s = self._died_s.get(round, 0.0)
                ranks = self.job.ranks_of([slot])
                order = Order(ranks=ranks, round=round, died_s=died_s, lost_node=lost, host=host)
                self._order(node, order)
            case EndSlot(node, slot):
                # Before the round begins: whoever leaves because of it has been told to end.
                round = self.job.reports.newest
                self._order(node, Order(ends=self.job.ranks_of([slot]), round=round))
            case Wake(what, after_s):
                self._due_s[what] = time.monotonic() + after_s
            case Wait(round, is_over):
                self._rounds.note(RoundMark.WAITS_NO_MORE if is_over else RoundMark.WAITS, round)
            case Say(line, is_warning):
                (warn if is_warning else say)(line)
            case HearAll():
                self._roster.ask_for_all()
            case Strike() | Save() | Over():
                self._end(command)
            case Declare():
                self._declare(command)
            case Begin():
                self._begin(command)

    def _end(self, command: Strike | Save | Over) -> None:
        """Have a node, or all ranks, or the job end."""
        match command:
            case Strike(nodes, why):
                names = self._roster.strike(nodes)
                warn(
                    f"{f'node {names} is' if len(nodes) == 1 else f'nodes {names} are'} lost: {why}"
                )
            case Save(why):
                warn(f"{why}. All ranks are to end")
                self._store.set(SAVE, True)
            case Over(code, why):
                if why:
                    warn(f"the job ends: {why}")
                self._write_status()
                self._store.set(OVER, {"code": code, "why": why})

    def _order(self, node: str, order: Order) -> None:
        facts = asdict(order) | {"start": self.job.start, "num_nodes": self.job.size}
        self._store.append(of_node(node, "orders"), facts)

    def _declare(self, command: Declare) -> None:
        slots, is_loss = command
        died_s = self._roster.lost_s if is_loss else time.time()
        newest = self.job.reports.newest
        number = self._rounds.declare_lost(self.job.ranks_of(slots), newest)
        self._died_s[number] = died_s
        self._feed(Declared(number))

    def _begin(self, command: Begin) -> None:
        start, size, why = command
        store = self._open_start(start)
        self._rounds = Rounds(store, 0, len(self.job.ranks_of(range(size))))
        self._reported = Reported(store)
        self._roster.begin_start()
        self._died_s.clear()
        names = (self.job.nodes[id].name for _, id in sorted(self.job.seats.items()))
        warn(f"all ranks begin again on nodes {', '.join(dict.fromkeys(names))}: {why}")

    def _write_status(self) -> None:
        names = dict(enumerate(self.job.before)) | dict(self.job.names)
        code = "-" if self.over is None else str(self.over)
        text = "\n".join([code, *(name for _, name in sorted(names.items()))]) + "\n"
        if self._status is None or text == self._written:
            return
        self._written = text
        try:
            replace_file(self._status, text)
        except OSError as error:  # the job goes on without it
            warn(f"{self._status} is not written: {error}")


def policy_of(options: KeepOptions) -> Policy:
    """Return the policy of a job, from the options of the node that keeps its store."""
    given, domains = answer_of(options.flag, ELASTIC in options.words), dict[str, str]()
    # The ranks refuse another word.
    without: WithoutSpare = next((each for each in get_args(WithoutSpare) if each == given), "end")
    if domain := options.flag("--moe-ft-failure-domain"):
        with suppress(ConfigError):  # the ranks refuse it, with all that is wrong
            domains = domains_of_slurm() if domain == SLURM else read_domains(Path(domain))
    return Policy(
        shape=Shape(options.num_nodes, options.ranks_per_node, options.fewest),
        repair=options.repairs,
        without_spare=without,
        store=options.number,
        max_restarts=options.max_restarts,
        domains=domains,
    )


def _read_names(status: Path | None, num_nodes: int) -> tuple[str, ...]:
    """Return the nodes of the last start by slot; none if it had another number of nodes, or is not known."""
    try:
        names = [] if status is None else status.read_text().splitlines()[1:]
    except OSError:  # there was none, or it will not be written either
        return ()
    return tuple(names) if len(names) == num_nodes else ()
