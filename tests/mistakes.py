"""Small mistakes in the product: which tests notice each of them, and whether others would without these.

    python -m tests.mistakes notice RUN TESTS... --module FOLDER  # who notices mistakes there
    python -m tests.mistakes simulate RUN TESTS... [--module F]   # which does the simulation find?
    python -m tests.mistakes choose RUN TESTS...                  # print tests that may go

RUN is a folder for what is found; each command continues what is there, and ends after --seconds. TESTS are
paths of tests that may go, --other TESTS such that remain. A mistake changes one place of a function: a
comparison, a condition, a number, an operator, a statement that is left out, None instead of a result. It is
put into the function's code object in a fork of a warm process, so that it costs about as much as the tests
that run its line.

A test may go if whatever it notices is noticed by others that remain, or by simulated schedules. A few
mistakes are weak evidence: read a test before it goes, and keep it if its own claim was not tried. Where a
test is said to remain, slower tests or more schedules may notice too. Tests in other processes, such as
tests/distributed, are not asked.
"""

import argparse
import ast
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_PRODUCT = (f"{ROOT}/moe_ft/", f"{ROOT}/megatron/fault_tolerance/")
_TOOL = 3  # number among those of sys.monitoring
_TESTS_S = 1.5  # of the tests that are run with one mistake, the quickest first
_PATIENCE_S = 8.0  # beyond the usual time of tests
_SCHEDULES_S, _NUM_SCHEDULES = 8.0, 8  # for one mistake
_BATCH = 5  # schedules that are recorded at a time
_LEAST_TRIED = 3  # mistakes on the lines of a test that may go
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_DROPPED = (ast.AugAssign, ast.Raise, ast.Delete)

Lines = dict[str, set[int]]  # by file
LATE: Any = ["late", None]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One place of a function that is changed.

    Attributes:
        function: its qualified name.
        first: line of the function's code object.
        lines: of the place.
        change: makes it in the tree that it was found in.
    """

    what: str
    function: str
    first: int
    lines: range
    change: Callable[[], None]


def mistakes_in(tree: ast.Module) -> list[Mistake]:
    """Return the mistakes that can be made in a file, in the order of the tree."""
    return [each for name, function in _functions(tree.body, "") for each in _of(name, function)]


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def _of(name: str, function: ast.FunctionDef) -> Iterator[Mistake]:
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    for statement in function.body:
        for node in ast.walk(statement):
            for what, place, change in _changes(node):
                lines = range(place.lineno, (place.end_lineno or place.lineno) + 1)
                yield Mistake(what=what, function=name, first=first, lines=lines, change=change)
    for what, place, change in _omissions(function):
        lines = range(place.lineno, (place.end_lineno or place.lineno) + 1)
        yield Mistake(what=what, function=name, first=first, lines=lines, change=change)


def _changes(node: ast.AST) -> Iterator[tuple[str, Any, Callable[[], None]]]:
    """Yield what can be done to an expression, or to the statements below a node."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _SWAPS:
            swapped = [_SWAPS[type(op)](), *node.ops[1:]]
            yield "comparison", node, lambda: setattr(node, "ops", swapped)
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _SWAPS:
            yield "operator", node, lambda: setattr(node, "op", _SWAPS[type(op)]())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            negated = ast.UnaryOp(op=ast.Not(), operand=test)
            yield "condition", test, lambda: setattr(node, "test", negated)
        case ast.comprehension(ifs=[test, *rest]):
            kept = [ast.UnaryOp(op=ast.Not(), operand=test), *rest]
            yield "filter", test, lambda: setattr(node, "ifs", kept)
        case ast.Constant(value=bool() as value):
            yield "constant", node, lambda: setattr(node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            greater = value + 1
            yield "number", node, lambda: setattr(node, "value", greater)
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "result", node, lambda: setattr(node, "value", ast.Constant(value=None))
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_NAMES:
            other = ast.Name(id=_OTHER_NAMES[name], ctx=ast.Load())
            yield "function", node, lambda: setattr(node, "func", other)
    if not isinstance(node, ast.FunctionDef):
        yield from _omissions(node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _omissions(node: ast.AST) -> Iterator[tuple[str, Any, Callable[[], None]]]:
    for field in ("body", "orelse", "finalbody"):
        below = getattr(node, field, None)
        for number, each in enumerate(below if isinstance(below, list) else ()):
            is_docstring = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            is_kept = isinstance(each, ast.Assign) and all(
                isinstance(target, ast.Attribute | ast.Subscript) for target in each.targets
            )
            if isinstance(each, _DROPPED) or is_kept or type(each) is ast.Expr and not is_docstring:

                def leave_out(below: Any = below, number: int = number) -> None:
                    below[number] = ast.Pass(lineno=0, col_offset=0)

                yield "omission", each, leave_out


class Source:
    """A file of the product, and its functions that live in this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._text = Path(path).read_text()
        self.mistakes = mistakes_in(ast.parse(self._text))

    def make(self, number: int, live: Sequence[FunctionType]) -> bool:
        """Put a mistake into the live functions; return whether there are any."""
        tree = ast.parse(self._text)
        mistake = mistakes_in(tree)[number]
        mistake.change()
        ast.fix_missing_locations(tree)
        name, first = mistake.function, mistake.first
        code = _code_of(compile(tree, self.path, "exec", dont_inherit=True), name, first)
        found = [
            each
            for each in live
            if each.__code__.co_qualname == name and each.__code__.co_firstlineno == first
        ]
        if code is None or any(each.__code__.co_freevars != code.co_freevars for each in found):
            return False
        for each in found:
            each.__code__ = code
        return bool(found)


def _code_of(module: CodeType, name: str, first: int) -> CodeType | None:
    for each in module.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name and each.co_firstlineno == first:
                return each
            if (found := _code_of(each, name, first)) is not None:
                return found
    return None


def live_functions() -> dict[str, list[FunctionType]]:
    """Return the functions of the product in this process, by file."""
    found: dict[str, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(_PRODUCT):
            found[each.__code__.co_filename].append(each)
    return found


class Recorder:
    """Lines of the product that run, in all threads."""

    def __init__(self) -> None:
        self._lines: Lines = defaultdict(set)
        self._begun_s = time.monotonic()
        monitoring = sys.monitoring
        monitoring.use_tool_id(_TOOL, "mistakes")
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._note)
        monitoring.set_events(_TOOL, monitoring.events.LINE)

    def _note(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(_PRODUCT):
            self._lines[code.co_filename].add(line)
        return sys.monitoring.DISABLE

    def take(self) -> dict[str, Any]:
        """Return the lines and the seconds since the last call."""
        lines = {path: sorted(lines) for path, lines in self._lines.items()}
        spent_s = time.monotonic() - self._begun_s
        self._lines.clear()
        sys.monitoring.restart_events()
        self._begun_s = time.monotonic()
        return {"lines": lines, "s": spent_s}


def in_fork(work: Callable[[Callable[[Any], None]], None], patience_s: float) -> list[Any]:
    """Return what work tells in a fork of this process, and LATE at its end if patience was over first."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        os.close(reading)
        try:
            work(lambda told: _write(writing, told))
        finally:
            os._exit(0)
    os.close(writing)
    deadline_s, told = time.monotonic() + patience_s, b""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([reading], [], [], left_s)[0]:
            if not (read := os.read(reading, 1 << 20)):
                break
            told += read
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return [*map(json.loads, told.split(b"\n")[:-1]), *([LATE] if left_s <= 0 else [])]


def _write(file: int, told: Any) -> None:
    data = json.dumps(told).encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]


class Run:
    """The folder of a run: what was found of each mistake, by its name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def read(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {each["name"]: each for each in map(json.loads, lines)}

    def add(self, kind: str, **found: Any) -> None:
        with (self.folder / f"{kind}.jsonl").open("a") as file:
            file.write(f"{json.dumps(found)}\n")


def sources(modules: Sequence[str]) -> dict[str, Source]:
    """Return files of the product, or of its folders, all imported."""
    given = [ROOT / each for each in modules]
    paths = sorted(
        {path for each in given for path in (each, *each.rglob("*.py")) if path.is_file()}
    )
    for path in paths:
        with suppress(ImportError):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return {str(path): Source(str(path)) for path in paths}


def _in_random_order(of: dict[str, Source]) -> list[tuple[str, str, int]]:
    """Return all mistakes, each as its name, file and number."""
    found = [
        (f"{path.removeprefix(f'{ROOT}/')}:{each.lines[0]} {number} {each.what}", path, number)
        for path, source in of.items()
        for number, each in enumerate(source.mistakes)
    ]
    random.Random(0).shuffle(found)
    return found


def _runs(mistake: Mistake, lines: dict[str, Any], path: str) -> bool:
    return not {*mistake.lines}.isdisjoint(lines.get(path, ()))


class Noticing:
    """Plugin of pytest that runs the collected tests with mistakes, and notes which fail."""

    def __init__(
        self,
        run: Run,
        modules: Sequence[str],
        candidates: tuple[str, ...],
        seconds: float,
        per_test: int,
    ) -> None:
        self._run = run
        self._modules = modules
        self._candidates = candidates
        self._end_s = time.monotonic() + seconds
        self._per_test = per_test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _make_hypothesis_quick()
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        items = {each.nodeid: each for each in session.items}
        known = self._run.read("tests")
        new = [each for name, each in items.items() if name not in known]
        if new:
            self._record(new)
        known = {name: each for name, each in self._run.read("tests").items() if name in items}
        passing = {name: each for name, each in known.items() if each["passes"]}
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            self._try_mistakes(items, passing)
        return True

    def _record(self, items: Sequence[pytest.Item]) -> None:
        def work(tell: Callable[[Any], None]) -> None:
            recorder = Recorder()
            for number, item in enumerate(items):
                passes = _passes(item, items[number + 1 : number + 2])
                tell({"name": item.nodeid, "passes": passes, **recorder.take()})

        for each in in_fork(work, 3600):
            self._run.add("tests", **each)

    def _try_mistakes(self, items: dict[str, pytest.Item], known: dict[str, Any]) -> None:
        of = sources(self._modules)
        live = live_functions()
        gc.freeze()
        for name, path, number, there in self._wanted(of, known):
            if time.monotonic() > self._end_s:
                break
            chosen, usual_s = list[pytest.Item](), 0.0
            for each in sorted(there, key=lambda each: known[each]["s"]):
                if not chosen or usual_s + known[each]["s"] < _TESTS_S:
                    chosen.append(items[each])
                    usual_s += known[each]["s"]

            def work(
                tell: Callable[[Any], None],
                chosen: Sequence[pytest.Item] = chosen,
                made: Callable[[], bool] = lambda: of[path].make(number, live[path]),
            ) -> None:
                tell(["made", made()])
                for number, item in enumerate(chosen):
                    tell(["begins", item.nodeid])
                    tell([_passes(item, chosen[number + 1 : number + 2]), item.nodeid])
                tell(["ends", ""])

            told = [each for each in in_fork(work, 3 * usual_s + _PATIENCE_S) if each is not LATE]
            by = [test for passes, test in told if passes is False]
            if told and told[-1][0] == "begins":  # it has not ended, or has ended the process
                by.append(told[-1][1])
            if told and told[0][1]:
                tests = [each.nodeid for each in chosen]
                self._run.add("noticed", name=name, tests=tests, by=by)

    def _wanted(
        self, of: dict[str, Source], known: dict[str, Any]
    ) -> Iterator[tuple[str, str, int, list[str]]]:
        """Yield mistakes with the tests that run their lines: the rarest of each test, long ones first.

        A test that alone notices a mistake remains, and need not be tried any further.
        """
        places = {name: (path, number) for name, path, number in _in_random_order(of)}
        runners = _tests_by_mistake(of, places, known)
        of_test: dict[str, list[str]] = defaultdict(list)
        for name in sorted(runners, key=lambda each: len({*map(function_of, runners[each])})):
            for test in {*map(function_of, runners[name])}:
                if test.startswith(self._candidates):
                    of_test[test].append(name)
        lengths = _lengths(self._run, self._candidates)
        for test in sorted(of_test, key=lambda each: -lengths.get(each, 0)):
            done = self._run.read("noticed").keys() | found_by_simulation(self._run)
            for name in of_test[test][: self._per_test]:
                if name not in done and test not in self._needed():
                    yield name, *places[name], runners[name]

    def _needed(self) -> set[str]:
        """Return the tests that alone notice a mistake, which the simulation does not find either."""
        noticed, simulated = Evidence.of(self._run).noticed, found_by_simulation(self._run)
        alone = (by for name, by in noticed.items() if name not in simulated and len(by) == 1)
        return set().union(*alone)


def _tests_by_mistake(
    of: dict[str, Source], places: dict[str, tuple[str, int]], known: dict[str, Any]
) -> dict[str, list[str]]:
    """Return by mistake the names of the tests that run its lines."""
    by_line: dict[tuple[str, int], list[str]] = defaultdict(list)
    for test, each in known.items():
        for path in of.keys() & each["lines"].keys():
            for line in each["lines"][path]:
                by_line[path, line].append(test)
    return {
        name: sorted(
            {test for line in of[path].mistakes[number].lines for test in by_line[path, line]}
        )
        for name, (path, number) in places.items()
    }


def _passes(item: pytest.Item, following: Sequence[pytest.Item]) -> bool:
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, log=False, nextitem=following[0] if following else None)
    return not any(each.failed for each in reports)


def _make_hypothesis_quick() -> None:
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mistakes",
        deadline=None,
        database=None,
        derandomize=True,
        max_examples=30,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mistakes")


def _schedules() -> Iterator[Any]:
    """Yield schedules of all kinds of simulated jobs."""
    from tests.simulation import drawers, schedule
    from tests.simulation.halves import draw_halved
    from tests.simulation.repairs import schedule as repairs

    kinds: list[tuple[Callable[[int], Any], int]] = [
        (schedule.draw, 14),
        (drawers.draw_changing, 5),
        (drawers.draw_aging, 2),
        (drawers.draw_followed, 5),
        (drawers.draw_selective, 3),
        (drawers.draw_parity, 5),
        (draw_halved, 3),
        (repairs.draw, 9),
        (repairs.draw_with_spares, 3),
        (repairs.draw_elastic, 4),
        (repairs.draw_hangs, 3),
        (repairs.draw_bad_batches, 2),
        (repairs.draw_corrupt, 3),
    ]
    for draw, count in kinds:
        yield from map(draw, range(count))


class Simulating:
    """Looks for schedules that find mistakes."""

    def __init__(self, run: Run) -> None:
        import torch

        torch.set_num_threads(1)
        self._run = run
        self._schedules = list(_schedules())
        gc.collect()
        for first in range(len(run.read("schedules")), len(self._schedules), _BATCH):
            self._new = range(first, min(first + _BATCH, len(self._schedules)))
            for each in in_fork(self._record, 3600):
                run.add("schedules", **each)
        known = run.read("schedules")
        self._passing = {int(name): each for name, each in known.items() if each["passes"]}
        self._live = live_functions()
        gc.freeze()
        self._sources: dict[str, Source] = {}

    def _record(self, tell: Callable[[Any], None]) -> None:
        recorder = Recorder()
        for number, passes in self._attempts(self._new):
            tell({"name": number, "passes": passes, **recorder.take()})

    def _attempts(self, numbers: Sequence[int]) -> Iterator[tuple[int, bool]]:
        from tests.simulation.simulate import installed
        from tests.simulation.soak import attempt

        with installed():
            for number in numbers:
                verdict = attempt(self._schedules[number], Path("/dev/shm"))
                yield number, verdict.is_crash or not verdict.violations

    def try_mistakes(self, names: Sequence[str], seconds: float) -> None:
        """Note which schedule finds each mistake, if any does."""
        end_s, known = time.monotonic() + seconds, self._run.read("simulated")
        for name in names:
            if name not in known and time.monotonic() < end_s:
                path, number = f"{ROOT}/{name.partition(':')[0]}", int(name.split()[1])
                chosen, usual_s = self._schedules_for(name, path, number)
                found = self._find(path, number, chosen, usual_s) if chosen else None
                self._run.add("simulated", name=name, by=found, num_schedules=len(chosen))

    def _schedules_for(self, name: str, path: str, number: int) -> tuple[list[int], float]:
        """Return schedules that run a mistake's lines, and their usual time."""
        source = self._sources.setdefault(path, Source(path))
        mistake, passing = source.mistakes[number], self._passing
        there = [each for each in passing if _runs(mistake, passing[each]["lines"], path)]
        random.Random(name).shuffle(there)
        chosen, usual_s = list[int](), 0.0
        for each in there[:_NUM_SCHEDULES]:
            if not chosen or usual_s + passing[each]["s"] < _SCHEDULES_S:
                chosen.append(each)
                usual_s += passing[each]["s"]
        return chosen, usual_s

    def _find(self, path: str, number: int, chosen: Sequence[int], usual_s: float) -> int | None:
        """Return the first schedule that breaks a promise with a mistake, or does not end."""

        def work(tell: Callable[[Any], None]) -> None:
            if self._sources[path].make(number, self._live[path]):
                for each, passes in self._attempts(chosen):
                    tell([each, passes])
                    if not passes:
                        return

        told = in_fork(work, 3 * usual_s + _PATIENCE_S)
        if told and told[-1] is LATE:
            return chosen[len(told) - 1] if len(told) <= len(chosen) else None
        return told[-1][0] if told and not told[-1][1] else None


def function_of(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.partition("[")[0]


@dataclass
class Evidence:
    """Mistakes that were tried, and the tests that notice them.

    Attributes:
        noticed: names of test functions by mistake; mistakes that no test notices are not there.
        tried: number of mistakes on the lines of a test function that were tried with it.
    """

    noticed: dict[str, set[str]]
    tried: dict[str, int]
    num_tried: int

    @staticmethod
    def of(run: Run) -> "Evidence":
        noticed, tried, num_tried = dict[str, set[str]](), dict[str, int](), 0
        for name, each in run.read("noticed").items():
            num_tried += 1
            for test in {*map(function_of, each["tests"])}:
                tried[test] = tried.get(test, 0) + 1
            if each["by"]:
                noticed[name] = {*map(function_of, each["by"])}
        return Evidence(noticed, tried, num_tried)


def found_by_simulation(run: Run) -> set[str]:
    """Return the names of mistakes that break a promise in a simulated job."""
    return {name for name, each in run.read("simulated").items() if each["by"] is not None}


def to_simulate(evidence: Evidence, candidates: tuple[str, ...]) -> list[str]:
    """Return the mistakes that only candidates notice, those first that keep the fewest of them."""
    only = {
        name: by
        for name, by in evidence.noticed.items()
        if all(each.startswith(candidates) for each in by)
    }
    num_only: dict[str, int] = defaultdict(int)
    for by in only.values():
        if len(by) == 1:
            num_only[next(iter(by))] += 1
    return sorted(
        only, key=lambda name: (len(only[name]), min(num_only[each] for each in only[name]))
    )


def choose(run: Run, candidates: tuple[str, ...]) -> list[str]:
    """Return the test functions that may go, longest first, and print how that is known."""
    evidence = Evidence.of(run)
    simulated = found_by_simulation(run)
    lengths = _lengths(run, candidates)
    left = {name: {*by} for name, by in evidence.noticed.items() if name not in simulated}
    of: dict[str, set[str]] = defaultdict(set)
    for name, by in left.items():
        for test in by:
            of[test].add(name)
    gone = []
    for test in sorted(lengths, key=lambda each: -lengths[each]):
        if evidence.tried.get(test, 0) >= _LEAST_TRIED and all(
            len(left[each]) > 1 for each in of[test]
        ):
            gone.append(test)
            for each in of[test]:
                left[each].discard(test)
    here = {
        name
        for name, by in evidence.noticed.items()
        if all(each.startswith(candidates) for each in by)
    }
    print(
        f"{evidence.num_tried} mistakes tried, {len(evidence.noticed)} noticed by tests, "
        f"{len(here)} only by these; simulated {len(here & {*run.read('simulated')})} of these, "
        f"found {len(here & simulated)}; {len(gone)} of {len(lengths)} tests may go, "
        f"{sum(lengths[each] for each in gone)} of {sum(lengths.values())} lines",
        file=sys.stderr,
    )
    return gone


def _lengths(run: Run, candidates: tuple[str, ...]) -> dict[str, int]:
    """Return the number of lines of each test function."""
    found = {}
    names = {function_of(each) for each, it in run.read("tests").items() if it["lines"]}
    for path in {each.partition("::")[0] for each in names if each.startswith(candidates)}:
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.FunctionDef) and f"{path}::{node.name}" in names:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found[f"{path}::{node.name}"] = (node.end_lineno or first) - first + 3
    return found


def main(words: list[str]) -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes")
    parser.add_argument("command", choices=("notice", "simulate", "choose"))
    parser.add_argument("run", type=Path)
    parser.add_argument("tests", nargs="+", help="files or folders of tests that may go")
    parser.add_argument("--other", action="append", default=[], help="tests that remain")
    parser.add_argument("--module", action="append", default=[], help="product's files or folders")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--per-test", type=int, default=4, help="mistakes on the lines of a test")
    options = parser.parse_args(words)
    run, candidates = Run(options.run), tuple(options.tests)
    if options.command == "notice":
        plugin = Noticing(run, options.module, candidates, options.seconds, options.per_test)
        pytest.main(["-p", "no:cacheprovider", "-q", *candidates, *options.other], plugins=[plugin])
    elif options.command == "simulate":
        names = to_simulate(Evidence.of(run), candidates)
        names += [name for name, _, _ in _in_random_order(sources(options.module))]
        Simulating(run).try_mistakes(names, options.seconds)
    else:
        print(*choose(run, candidates), sep="\n")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets decides what a simulation does
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    raise SystemExit(main(sys.argv[1:]))
