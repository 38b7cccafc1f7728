"""Protection of a run: what is kept where, and what the loss of a rank or a node, or a time limit, costs it.

Facts in, words out: loop/protects.py gathers the facts of a start and prints the lines. The answers to losses
are those of cluster/law.py and of docs/when_something_dies.md.
"""

import shlex
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moe_ft.config.fields import flag_of, size_text
from moe_ft.config.lost_nodes import CROWDED
from moe_ft.planning.placement import Survival

_SIGTERM = "SIGTERM"
_NAME_WIDTH = 12
_WIDTH = 100  # of what follows a name
_WITHOUT_SPARE = {
    "crowd": "a node that trains runs its ranks, too, if it has the memory",
    "share": "a node that trains runs its ranks, too, if it has the memory, and peers share their work",
    "wait": "training waits until one registers",
    "shrink": "all ranks start again on the nodes that are left",
    "end": "the job ends",
}


class Launcher(StrEnum):
    """Process that has started the ranks."""

    AGENT = "agent"
    TORCHRUN = "torchrun"
    OTHER = "other"


class LossAnswer(StrEnum):
    """Answer to a loss: see `cluster.law.SlotAnswer`."""

    REPAIR = "repair"
    RESTART = "restart"
    END = "end"


class NodeSource(StrEnum):
    """Best place of what a lost node has kept."""

    COPIES = "copies"
    PARITY = "parity"
    STORAGE = "storage"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Starter:
    """Launcher of the ranks, and what it does when some of them fail.

    Attributes:
        max_restarts: starts of all ranks after failures: of an agent in a row without a finished iteration,
            of torchrun those that it has left.
        without_spare: value of --moe-ft-without-spare that counts, where dead ranks are replaced in place;
            else empty.
        no_repair: why they are not, if that was asked for.
        is_watched: whether agents of several nodes notice that one is lost.
        shrinks: whether the job can train with fewer nodes.
        store: number of the node that keeps the job's store, and whose loss ends the job.
    """

    launcher: Launcher = Launcher.OTHER
    max_restarts: int = 0
    without_spare: str = ""
    no_repair: str = ""
    is_watched: bool = False
    shrinks: bool = False
    store: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """Facts about a start that protects a run.

    Attributes:
        contents: of a snapshot, in words.
        interval: iterations between snapshots; None for automatic.
        window: most snapshots that make up a state.
        node_bytes: host memory that is reserved on the node with the most.
        copies: of each rank's state on other nodes; `survival` is what they cover.
        parity_nodes: of a group that keeps parity of each other's state in place of copies; 0 without.
        storage: its URL; empty without.
        persist_interval: states in memory for each one on storage; 0 for none before the end.
        dense_interval: iterations between whole states on storage; 0 for none before the end.
        breakpoints: whether a rank that has to end writes its state to memory first.
        exit_signal: that ends training as planned; empty for none, None if the loop alone knows.
        answers_sigterm: whether SIGTERM, if it is not that signal, is answered with a report and the end.
        other_states: checkpoints of the loop itself, in words; empty for none, None if it alone knows.
        event_log: its directory; empty without.
    """

    strategy: str
    contents: str
    is_exact: bool
    interval: int | None
    window: int
    memory_dir: str
    node_bytes: int
    num_nodes: int
    copies: int
    survival: Survival
    parity_nodes: int = 0
    storage: str = ""
    persist_interval: int = 0
    dense_interval: int = 0
    breakpoints: bool = False
    exit_signal: str | None = ""
    answers_sigterm: bool = True
    other_states: str | None = ""
    event_log: str = ""
    starter: Starter = Starter()

    @property
    def most_repeated(self) -> int | None:
        """Most complete iterations that run again from memory if no snapshot fails; None if not known.

        The newest snapshot may not be complete yet when a rank dies. A window's own iterations are replayed,
        and those of the next one, which is not complete, are trained again.
        """
        return None if self.interval is None else self.interval + 2 * (self.window - 1)

    @property
    def storage_interval(self) -> int | None:
        """Iterations from one state on storage to the next; None if not known, or there is only the last."""
        known = [self.dense_interval] if self.dense_interval else []
        if self.persist_interval and self.interval is not None:
            known.append(self.persist_interval * self.interval * self.window)
        return min(known, default=None)

    @property
    def source(self) -> NodeSource:
        """Place from which the state of a lost node comes."""
        if self.parity_nodes:
            return NodeSource.PARITY
        if self.copies:
            return NodeSource.COPIES
        return NodeSource.STORAGE if self.storage else NodeSource.NOTHING

    @property
    def lost_rank(self) -> LossAnswer:
        """Answer to a lost rank, after the first iteration."""
        starter = self.starter
        if starter.without_spare:
            return LossAnswer.REPAIR
        return LossAnswer.RESTART if starter.max_restarts else LossAnswer.END

    @property
    def lost_node(self) -> LossAnswer:
        """Answer to a lost node, if a spare is there."""
        starter, has_others = self.starter, self.num_nodes > 1
        is_agents = starter.launcher is Launcher.AGENT
        if is_agents and starter.without_spare and starter.is_watched and has_others:
            return LossAnswer.REPAIR
        can_restart = starter.is_watched if is_agents else has_others
        can_restart &= bool(starter.max_restarts or starter.shrinks)
        return LossAnswer.RESTART if can_restart else LossAnswer.END

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event "protects"."""
        return {
            "strategy": self.strategy,
            "exact": self.is_exact,
            "interval": self.interval,
            "window": self.window,
            "node_bytes": self.node_bytes,
            "nodes": self.num_nodes,
            "copies": self.copies,
            "parity_nodes": self.parity_nodes or None,
            "nodes_survived": self.survival.num_nodes,
            "storage": self.storage or None,
            "storage_interval": self.storage_interval if self.storage else None,
            "launcher": self.starter.launcher.value,
            "max_restarts": self.starter.max_restarts,
            "lost_rank": self.lost_rank.value,
            "lost_node": self.lost_node.value,
            "lost_node_source": self.source.value,
            "repeated_iterations": self.most_repeated,
            "breakpoints": self.breakpoints,
            "exit_signal": self.exit_signal or None,
            "no_repair": self.starter.no_repair or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLine:
    """One line of the block."""

    text: str
    is_warning: bool = False


def block_of(protection: Protection) -> list[BlockLine]:
    """Return the lines that a start prints about its protection."""
    kept, lines = protection, list[BlockLine]()

    def add(name: str, *texts: str, is_warning: bool = False) -> None:
        for text in texts:
            lines.append(BlockLine(text=f"  {name:<{_NAME_WIDTH}}{text}", is_warning=is_warning))
            name = ""

    lines.append(
        BlockLine(text=f"on: {flag_of('strategy')} is {kept.strategy}: {_snapshots(kept)}")
    )
    nodes = f"each of {kept.num_nodes} nodes" if kept.num_nodes > 1 else "this node"
    add("memory", f"{size_text(kept.node_bytes)} reserved on {nodes}, in {kept.memory_dir}")
    if kept.parity_nodes:
        add("parity", _parity(kept))
    else:
        add("copies", _copies(kept), is_warning=not kept.copies)
    add("storage", _storage(kept))
    add("lost work", _lost_work(kept))
    if kept.starter.no_repair:
        add("repair", *_wrapped(f"no rank is replaced in place: {kept.starter.no_repair}"))
    add("lost rank", *_lost_rank(kept))
    add("lost node", *_lost_node(kept))
    add("time limit", *_told_to_end(kept))
    watch = "python -m moe_ft watch"  # on a line of its own, to be copied
    if kept.event_log:
        add("event log", kept.event_log, f"{watch} {shlex.quote(kept.event_log)}")
    else:
        add("event log", f"none: --moe-ft-event-log DIR writes one, which {watch} DIR shows")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _snapshots(kept: Protection) -> str:
    if kept.interval is None:
        when = f"as often as {flag_of('overhead_limit')} allows"
    else:
        when = (
            "after every iteration" if kept.interval == 1 else f"every {kept.interval} iterations"
        )
    return f"{when} a snapshot of {kept.contents}"


def _parity(kept: Protection) -> str:
    domain = ", or of a failure domain" if kept.survival.domain else ""
    return (
        f"groups of {kept.parity_nodes} nodes keep XOR of their states: memory survives the loss of one node "
        f"of each{domain}"
    )


def _copies(kept: Protection) -> str:
    if kept.copies:
        nodes = "another node" if kept.copies == 1 else f"{kept.copies} other nodes"
        covered = kept.survival.nodes
        if kept.survival.domain:
            covered += ", or of a failure domain"
        return f"each rank's state is on {nodes}, too: memory survives the loss of {covered}"
    why = "there is no other" if kept.num_nodes == 1 else f"{flag_of('replication_factor')} 0"
    lost = "what is not on storage" if kept.storage else _lost_with_memory(kept)
    return f"on no other node ({why}): the loss of a node loses {lost}"


def _lost_with_memory(kept: Protection) -> str:
    """Return what is lost with the memory of a node, where neither copies nor storage have it."""
    if kept.other_states is None:
        return "all that moe_ft keeps"
    return f"all but {kept.other_states}" if kept.other_states else "all training so far"


def _storage(kept: Protection) -> str:
    if not kept.storage:
        return f"none; {flag_of('persist_dir')} names one"
    every = []
    if kept.persist_interval:
        what = "snapshot" if kept.window == 1 else "window"
        is_each = kept.persist_interval == 1
        every.append(f"every {what}" if is_each else f"every {kept.persist_interval} {what}s one")
    if kept.dense_interval:
        every.append(f"the whole state every {kept.dense_interval} iterations")
    return f"{kept.storage}: {', '.join([*every, 'and the last state'] if every else ['the last state'])}"


def _lost_work(kept: Protection) -> str:
    most = kept.most_repeated
    again = (
        "the iterations since the last snapshot" if most is None else f"up to {_iterations(most)}"
    )
    text = f"{again} and the interrupted one run again"
    if kept.storage and (interval := kept.storage_interval):
        text += f"; from storage about {interval}"
    return text if kept.is_exact else f"{text}; updates of experts are lost, and counted"


def _iterations(number: int) -> str:
    return f"{number} iteration" if number == 1 else f"{number} iterations"


def _restart(starter: Starter) -> str:
    """Return how all ranks start again, or that the job ends."""
    most = starter.max_restarts
    if most and starter.launcher is Launcher.AGENT:
        return f"all ranks start again (at most {most} times in a row without a finished iteration)"
    if most and starter.launcher is Launcher.TORCHRUN:
        return f"torchrun starts all ranks again (at most {most} more time{'s' * (most > 1)})"
    if starter.launcher is Launcher.OTHER:
        return "the job ends, unless what has started the ranks starts them again"
    return "the job ends (--max-restarts 0)"


def _lost_rank(kept: Protection) -> list[str]:
    restart = _restart(kept.starter)
    if kept.lost_rank is LossAnswer.REPAIR:
        return [
            "is replaced in place, from memory; not before the first iteration or in a save: then",
            restart,
        ]
    if kept.lost_rank is LossAnswer.RESTART:
        return [f"{restart}, from memory"]
    return [restart, "the next start on these nodes continues from memory"]


def _lost_node(kept: Protection) -> list[str]:
    starter, state = kept.starter, _state_of_lost_node(kept)
    if kept.lost_node is LossAnswer.END:
        ends = "the job ends with it" if kept.num_nodes == 1 else _restart(starter)
        return [f"{ends}; at the next start {state}"]
    if kept.lost_node is LossAnswer.REPAIR:
        what = f"a spare takes over in place; without one {_without_spare(starter)}"
    elif starter.launcher is Launcher.AGENT:
        without = _WITHOUT_SPARE["shrink" if starter.shrinks else "end"]
        what = without
        if starter.max_restarts:
            what = f"all ranks start again with a spare; without one {without}"
    else:
        on = ", on the nodes that are left" if starter.shrinks else ", once it has as many nodes"
        what = f"{_restart(starter)}{on}"
    lines = [what, state]
    if starter.is_watched:
        lines[1] += f"; the loss of node {starter.store}, which keeps the job's store, ends the job"
    return lines


def _without_spare(starter: Starter) -> str:
    """Return what happens without a spare: a job that can shrink neither waits nor ends."""
    value = starter.without_spare
    if value not in CROWDED:
        value = "shrink" if starter.shrinks else value.replace("shrink", "end")
    return _WITHOUT_SPARE[value]


def _state_of_lost_node(kept: Protection) -> str:
    if kept.source is NodeSource.COPIES:
        return "its state comes from the copies on other nodes"
    if kept.source is NodeSource.PARITY:
        return "its state is made again from parity on other nodes"
    if kept.source is NodeSource.NOTHING:
        return f"{_lost_with_memory(kept)} is lost"
    if kept.persist_interval or kept.dense_interval:
        return "all state comes from storage"
    return "all state comes from storage, which has that of the last planned end"


def _told_to_end(kept: Protection) -> list[str]:
    lines = []
    if kept.exit_signal:
        where = "brings its state to storage" if kept.storage else "leaves its state in memory"
        by_agent = kept.starter.launcher is Launcher.AGENT and kept.exit_signal != _SIGTERM
        also = " (or SIGTERM to the agent, with --grace above 30)" * by_agent
        lines.append(f"{kept.exit_signal}{also} finishes the iteration, and {where}")
    if kept.exit_signal != _SIGTERM:
        lines.append(f"SIGTERM {_sigterm(kept)}")
    if kept.exit_signal == "":
        needs = "" if kept.storage else f"{flag_of('persist_dir')} URL "
        lines.append(f"to save first: {needs}--exit-signal-handler --exit-signal SIGUSR1")
    return lines


def _sigterm(kept: Protection) -> str:
    if not kept.answers_sigterm:
        return "is left to the training loop"
    what = "ends the ranks at once; the next start continues from memory on these nodes"
    if kept.breakpoints:
        what = (
            "has the ranks write their state to memory: if all can, the next start on these nodes repeats "
            "nothing"
        )
    return f"{what}, else from storage" if kept.storage else what
