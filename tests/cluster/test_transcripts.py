"""Transcripts of the law (*.txt): what each event is answered with; and rules that hold whatever happens."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from moe_ft.cluster import law, membership, ring
from moe_ft.cluster.membership import (
    MOST_UNFINISHED,
    Begin,
    Changed,
    Command,
    Declare,
    EndSlot,
    Failed,
    Job,
    Lost,
    Node,
    Over,
    Passed,
    Policy,
    Quiet,
    Registered,
    Seat,
    Shape,
    StoreTold,
    Strike,
    ToldToEnd,
    Wake,
)
from moe_ft.config.lost_nodes import CROWDED
from moe_ft.verdicts import Failure, FailureKind
from tests.cluster.transcript import FOLDER, Driver, replay

TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_each_event_is_answered_as_written(path: Path) -> None:
    for line, expected, found in replay(path):
        assert found == expected, line


def _lines(code: CodeType) -> Iterator[int]:
    """Yield the lines of functions, without those that define them."""
    if code.co_flags & 0x0003:  # a function, and not a module or class
        yield from {line for *_, line in code.co_lines() if line} - {code.co_firstlineno}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _lines(each)


@pytest.mark.parametrize("module", [law, membership, ring], ids=lambda each: each.__name__)
def test_transcripts_reach_each_line(module: ModuleType) -> None:
    assert module.__file__ is not None
    reached, monitoring = set[int](), sys.monitoring
    text = Path(module.__file__).read_text()

    def note(code: CodeType, line: int) -> object:
        if code.co_filename == module.__file__:
            reached.add(line)
        return monitoring.DISABLE

    tool = monitoring.OPTIMIZER_ID
    monitoring.use_tool_id(tool, "transcripts")
    try:
        monitoring.register_callback(tool, monitoring.events.LINE, note)
        monitoring.set_events(tool, monitoring.events.LINE)
        monitoring.restart_events()
        for path in TRANSCRIPTS:
            list(replay(path))
    finally:
        monitoring.free_tool_id(tool)
    missed = {*_lines(compile(text, module.__file__, "exec"))} - reached
    lines = text.splitlines()
    assert not missed, [f"{each}: {lines[each - 1].strip()}" for each in sorted(missed)]


class Chance:
    """A job to which anything happens, drawn from a seed; its commands are checked."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"law {seed}")
        nodes = rng.choice((1, 2, 3, 4))
        self.policy = Policy(
            shape=Shape(nodes, rng.choice((1, 2)), rng.choice((0, 0, 1, min(2, nodes)))),
            repair=rng.random() < 0.9,
            without_spare=rng.choice(("end", "wait", "crowd", "share", "shrink")),
            store=rng.choice((0, nodes, nodes)),
            max_restarts=rng.choice((0, 0, 2)),
            domains={f"n{number}": "xy"[number % 2] for number in range(nodes)},
        )
        self.driver = Driver(self.policy, tuple(f"n{each}" for each in range(nodes)))
        self.known, self.struck, self.due = set[str](), set[str](), {"gathered", "missing"}
        self.num_in_vain = 0
        self.trace = [repr(self.policy)]
        self.finishes = rng.random() < 0.5  # often
        ids = [f"n{number}.start" for number in range(nodes)]
        self.known.update(ids)
        for number, id in enumerate(ids):
            node = Node(id=id, name=f"n{number}", number=number)
            self.check(self.driver.feed(Registered((node,))))

    @property
    def job(self) -> Job:
        return self.driver.job

    def _id(self) -> str:
        """Return a node, which may be lost already, or none."""
        return self.rng.choice(["nobody", *sorted(self.known)])

    def register(self) -> list[Command]:
        number = self.rng.randrange(self.policy.shape.num_nodes + 2)
        id = f"n{number}.{len(self.known)}"
        self.known.add(id)
        room = self.rng.choice((50.0, float("inf")))
        node = Node(id=id, name=f"n{number}", number=number, room_bytes=room)
        return self.driver.feed(Registered((node,)))

    def finish(self) -> list[Command]:
        self.num_in_vain = 0
        return self.driver.finish()

    def die(self) -> list[Command]:
        return self.driver.report(newest=self.job.reports.newest + 1)

    def lose(self) -> list[Command]:
        ids = {self._id() for _ in range(self.rng.choice((1, 1, 1, 2)))}
        return self.driver.feed(Lost(tuple(sorted(ids)), "silent"))

    def be_quiet(self) -> list[Command]:
        rng, ids = self.rng, [self._id(), self._id()]
        silent_s = {id: rng.choice((1.2, 2.2)) for id in ids}
        heard = frozenset(each for each in self.known if rng.random() < 0.7)
        return self.driver.feed(Quiet(silent_s, heard))

    def tell(self) -> list[Command]:
        is_store = self.rng.random() < 0.02
        return self.driver.feed(StoreTold() if is_store else ToldToEnd((self._id(),)))

    def change(self) -> list[Command]:
        rng, id = self.rng, self._id()
        node = self.job.nodes.get(id, Node(id=id, name=id, number=9))
        code = rng.choice((None,) * 40 + (0, 0, 1, 2)) if id in self.job.seats.values() else None
        unreached, missed = ((self._id(),) if rng.random() < 0.3 else () for _ in range(2))
        used = rng.choice((0, 30))
        node = replace(node, code=code, used_bytes=used, unreached=unreached, missed=missed)
        return self.driver.feed(Changed((node,)))

    def report(self) -> list[Command]:
        ranks = range(len(self.job.ranks_of(range(self.job.size))))
        some = frozenset(each for each in ranks if self.rng.random() < 0.8)
        ended = self.job.reports.ended or self.rng.random() < 0.02
        return self.driver.report(knowing=some, ended=ended)

    def fail(self) -> list[Command]:
        rng, size = self.rng, self.policy.shape.ranks_per_node
        kind = rng.choice((*FailureKind, FailureKind.DEVICE, FailureKind.NETWORK))
        node = rng.choice(("", f"n{rng.randrange(self.policy.shape.num_nodes)}"))
        rank = rng.randrange(self.job.size * size)
        failure = Failure(rank=rank, kind=kind, what="X", iteration=rng.randrange(2), node=node)
        return self.driver.feed(Failed((failure,)))

    def wake(self) -> list[Command]:
        return self.driver.feed(Passed(self.rng.choice(sorted(self.due))))

    def step(self) -> None:
        """Have one thing happen, and check what is to be done about it."""
        was_over = self.job.over
        rare = (
            self.die,
            self.lose,
            self.be_quiet,
            self.fail,
            self.change,
            self.tell,
            self.report,
            self.wake,
            self.register,
        )
        act = self.finish if self.finishes and self.rng.random() < 0.5 else self.rng.choice(rare)
        commands = act()
        self.trace.append(f"{act.__name__} -> {commands}")
        assert was_over is None or not commands, "something is done after the end"
        self.check(commands)

    def check(self, commands: list[Command]) -> None:
        """Check commands, and the state after them."""
        for each in commands:
            match each:
                case Seat(node, slot) | EndSlot(node, slot):
                    assert node in self.known - self.struck, f"{node} is no node"
                    assert 0 <= slot < self.job.size
                    is_fit = node.partition(".")[0] not in self.job.unfit
                    assert is_fit or isinstance(each, EndSlot), "a node that is not fit gets ranks"
                case Strike(nodes):
                    assert not self.struck.intersection(nodes), "lost twice"
                    self.struck.update(nodes)
                case Declare() | Begin():
                    self.num_in_vain = self.num_in_vain + 1 if isinstance(each, Declare) else 0
                case Wake(what):
                    self.due.add(what)
                case Over(code):
                    assert each is commands[-1] and self.job.over == code
        assert self.num_in_vain <= MOST_UNFINISHED, "too many rounds in a row"
        self._check_slots()

    def _check_slots(self) -> None:
        job, policy = self.job, self.policy
        assert job.nodes.keys() <= self.known - self.struck
        assert {*job.seats.values()} <= job.nodes.keys(), "a slot has a node that is none"
        places = [job.seats.keys(), job.opened.keys(), job.left.keys()]
        found = [slot for place in places for slot in place]
        assert len({*found}) == len(found), "a slot is in two places"
        has_all = job.names.keys() == {*range(job.size)}  # else some nodes have never come
        assert job.over is not None or not has_all or len(found) == job.size, "a slot has no node"
        is_crowded = len({*job.seats.values()}) < len(job.seats)
        assert not is_crowded or policy.without_spare in CROWDED
        assert not job.opened or policy.without_spare == "wait"
        assert policy.shape.fewest or job.size == policy.shape.num_nodes


@pytest.mark.parametrize("seed", range(20))
def test_rules_hold_whatever_happens(seed: int) -> None:
    for number in range(100):
        chance = Chance(100 * seed + number)
        try:
            for _ in range(60):
                chance.step()
        except AssertionError as error:
            pytest.fail("\n".join([*chance.trace, f"seed {100 * seed + number}: {error}"]))
