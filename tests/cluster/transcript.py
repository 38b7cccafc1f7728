"""Transcripts of the law in etcd's form: an event a line, and after "->" the commands that answer it.

A line "job ..." begins another job. Each event has all its commands, with " | " between; without "->" there
are none, and a line that begins with it goes on. Those that
look after nodes that come ("gathered", "missing") are left out. After a `Declare` the round begins at once.
With `trains` all nodes are there, named a, b, c ..., and have finished an iteration. A node c' is the node c
that has registered again.

Run `python -m tests.cluster.transcript FILE ...` to write the answers again, and read what has changed.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from moe_ft.cluster import law
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
    Lost,
    Node,
    Over,
    Passed,
    Policy,
    Quiet,
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
)
from moe_ft.verdicts import Failure, FailureKind

FOLDER = Path(__file__).parent
_LETTERS = "abcdefghij"
_BETWEEN = " | "
_WIDTH = 100


class Driver:
    """A job, and what its driver does: it answers `Declare`, and reports for the ranks."""

    def __init__(self, policy: Policy, before: tuple[str, ...] = ()) -> None:
        self.job = Job(policy=policy, before=before, size=policy.shape.num_nodes)
        self.num_registered = 0

    def feed(self, event: Event) -> list[Command]:
        """Return the commands that answer an event."""
        self.job, commands = law.step(self.job, event)
        if self.job.is_declaring:
            assert isinstance(commands[-1], Declare), commands
            number = self.job.reports.newest + 1
            commands = [*commands, *self.feed(Declared(number))]
        return commands

    def report(self, **changes: object) -> list[Command]:
        return self.feed(replace(self.job.reports, **changes))  # type: ignore[arg-type]

    def finish(self) -> list[Command]:
        """Finish an iteration."""
        return self.report(trained=True, finished=self.job.reports.newest, knowing=None)

    def register(self, words: list[str]) -> list[Command]:
        id, number, *facts = words
        name = id.rstrip("'")
        found = {key: float(each) for key, _, each in (fact.partition("=") for fact in facts)}
        room = found.get("room", math.inf)
        return self.feed(Registered((Node(id=id, name=name, number=int(number), room_bytes=room),)))

    def change(self, words: list[str]) -> list[Command]:
        id, *facts = words
        node = self.job.nodes.get(id, Node(id=id, name=id, number=0))
        for fact in facts:
            key, _, value = fact.partition("=")
            match key:
                case "code":
                    node = replace(node, code=int(value))
                case "used":
                    node = replace(node, used_bytes=int(value))
                case "room":
                    node = replace(node, room_bytes=float(value))
                case "unreached" | "missed":
                    ids = tuple(filter(None, value.split(",")))
                    node = replace(node, **{key: ids})  # type: ignore[arg-type]
                case _:
                    raise ValueError(fact)
        return self.feed(Changed((node,)))


def _quiet(driver: Driver, words: list[str]) -> list[Command]:
    """Have nodes be silent for some seconds; all others were just heard, unless "unheard" names them."""
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    unheard = {*given.pop("unheard", "").split(","), *given}
    heard = frozenset(driver.job.nodes.keys() - unheard)
    return driver.feed(Quiet({id: float(each) for id, each in given.items()}, heard))


def _ranks(text: str) -> frozenset[int]:
    return frozenset(map(int, filter(None, text.split(","))))


def _report(driver: Driver, words: list[str]) -> list[Command]:
    values: dict[str, object] = {}
    for word in words:
        key, is_given, value = word.partition("=")
        values[key] = not is_given
        if value:
            values[key] = int(value) if key == "newest" else _ranks(value)
    return driver.report(**values)


def _fail(driver: Driver, words: list[str]) -> list[Command]:
    """Have ranks report failures, with "and" between: RANK KIND [what=X] [at=3] [in=SECTION] [on=NODE]."""
    failures = list[Failure]()
    for text in " ".join(words).split(" and "):
        rank, kind, *facts = text.split()
        given = dict(fact.split("=") for fact in facts)
        failures.append(
            Failure(
                rank=int(rank),
                kind=FailureKind[kind.upper()],
                what=given.get("what", "X"),
                iteration=int(given.get("at", "3")),
                section=given.get("in", ""),
                node=given.get("on", ""),
                time_s=float(given.get("time", len(driver.job.failures))),
            )
        )
    return driver.feed(Failed(tuple(failures)))


_EVENTS: dict[str, Callable[[Driver, list[str]], list[Command]]] = {
    "register": Driver.register,
    "change": Driver.change,
    "finished": lambda driver, words: driver.finish(),
    "died": lambda driver, words: driver.report(newest=driver.job.reports.newest + 1),
    "report": _report,
    "lost": lambda driver, words: driver.feed(Lost(tuple(words), "silent")),
    "quiet": _quiet,
    "failed": _fail,
    "told": lambda driver, words: (
        driver.feed(StoreTold()) if words == ["store"] else driver.feed(ToldToEnd(tuple(words)))
    ),
    "passed": lambda driver, words: driver.feed(Passed(" ".join(words))),
}


def begin(words: list[str]) -> Driver:
    """Return the job of a line "job ..."."""
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    shape = Shape(int(given["nodes"]), int(given.get("ranks", "1")), int(given.get("fewest", "0")))
    domains = given.get("domains", "")
    policy = Policy(
        shape=shape,
        repair="unrepaired" not in given,
        without_spare=given.get("without", "end"),  # type: ignore[arg-type]
        store=int(given.get("store", "0")),
        max_restarts=int(given.get("restarts", "0")),
        domains=dict(zip(_LETTERS, domains, strict=False)),
    )
    driver = Driver(policy, tuple(filter(None, given.get("before", "").split(","))))
    if "trains" in given:
        for number in range(shape.num_nodes):
            driver.register([_LETTERS[number], str(number)])
        driver.report(trained=True)
    return driver


def answer(driver: Driver, event: str) -> list[str]:
    """Return the words of the commands that answer an event."""
    name, *words = event.split()
    return list(filter(None, map(_text, _EVENTS[name](driver, words))))


def _listed(each: tuple[object, ...]) -> str:
    return " ".join(map(str, each)) or "-"


def _seated(node: str, slot: int, round: int, lost: str, host: int | None) -> str:
    text = f"seat {node} {slot}"
    if round:
        text += f" in round {round} for {lost}"
    if host is not None:
        text += f" beside {host}"
    return text


_TEXTS: dict[type[Command], Callable[..., str]] = {
    Seat: _seated,
    EndSlot: lambda node, slot: f"end {slot} on {node}",
    Strike: lambda nodes, why: f"strike {_listed(nodes)}: {why}",
    Declare: lambda slots, is_loss: f"declare {_listed(slots)}" + " moved" * (not is_loss),
    Begin: lambda start, size, why: f"start {start} of {size}: {why}",
    Save: lambda why: f"save: {why}",
    Wait: lambda round, is_over: f"wait{' no more' if is_over else ''} in round {round}",
    Wake: lambda what, after_s: (
        f"wake {what} in {after_s:g} s" * (what not in ("gathered", "missing"))
    ),
    HearAll: lambda: "hear all",
    Say: lambda line, is_warning: f"{'warn' if is_warning else 'say'} {line}",
    Over: lambda code, why: f"over {code}" + f": {why}" * bool(why),
}


def _text(command: Command) -> str:
    return _TEXTS[type(command)](*command)


def lines_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the events of a file, or other lines, each with the commands that it has written behind it."""
    found: tuple[str, list[str]] | None = None
    for line in path.read_text().splitlines():
        event, arrow, commands = line.partition("->")
        if event.strip() or not arrow:
            if found is not None:
                yield found
            found = event.rstrip(), []
        if arrow and found is not None:
            found[1].extend(commands.strip().split(_BETWEEN))
    if found is not None:
        yield found


def replay(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the lines of a file, the commands behind each, and those of the law."""
    driver: Driver | None = None
    for line, expected in lines_of(path):
        words = line.partition("#")[0].split()
        if not words:
            yield line, expected, []
        elif words[0] == "job":
            driver = begin(words[1:])
            yield line, expected, []
        else:
            assert driver is not None, line
            yield line, expected, answer(driver, " ".join(words))


def _rewrite(path: Path) -> None:
    """Write the answers of the law: behind the event as long as a line has room, else below it."""
    lines: list[str] = []
    for line, _, commands in replay(path):
        lines.append(line)
        for number, each in enumerate(commands):
            link = _BETWEEN if number and len(lines[-1]) + len(each) < _WIDTH else " -> "
            if link == " -> " and (number or len(line) + len(each) > _WIDTH):
                lines.append("   ")
            lines[-1] += link + each
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        _rewrite(Path(name))
