"""Simulated processes: what each sees of its system, and the writer process in one."""

import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.clock import Clock
from moe_ft.engine.descriptors import allow_descriptors
from moe_ft.engine.memory.regions import file_system_type
from moe_ft.engine.persist.client import PersistClient, WriterSupervisor, writer_command
from moe_ft.engine.persist.writer import WriterSettings
from moe_ft.files.storage import Storage, file_tag
from moe_ft.recovery.restarts import note_launcher, recall_launcher
from tests.simulation.active import World
from tests.simulation.kernel import Process
from tests.simulation.processes import PARENT, lines_of
from tests.unit.moe_ft.builders import fill_region, make_identity
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.simulation.small_world import run, small_world, start


@pytest.fixture
def world() -> Iterator[World]:
    with small_world() as world:
        yield world
        assert not world.kernel.errors


def test_process_sees_its_own_environment(world: World) -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        own = os.environ["NAME"]
        os.environ["ADDED"] = own
        seen[own] = (os.getpid(), os.environ.get("PATH"), dict(os.environ), "HOME" in os.environ)
        assert os.getenv("ADDED") == own
        assert sorted(os.environ.copy()) == sorted(os.environ) == ["ADDED", "NAME"]
        del os.environ["ADDED"]

    first, second = run(world, look, look)
    assert seen == {
        "rank0": (first.pid, None, {"NAME": "rank0", "ADDED": "rank0"}, False),
        "rank1": (second.pid, None, {"NAME": "rank1", "ADDED": "rank1"}, False),
    }
    assert "PATH" in os.environ
    assert "ADDED" not in os.environ
    assert os.getpid() not in (first.pid, second.pid)


def test_randomness_comes_from_the_seed() -> None:
    def drawn(seed: int) -> list[Any]:
        found: list[Any] = []
        with small_world(seed) as world:
            run(world, lambda: found.extend([secrets.token_hex(8), uuid.uuid4(), os.urandom(4)]))
        return found

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(drawn(1)[0]) == 16


def test_process_that_exits_runs_nothing_more(world: World) -> None:
    def end() -> None:
        try:
            os._exit(3)
        finally:
            done.append(True)

    done: list[bool] = []
    (process,) = run(world, end)
    assert process.exit_code == 3
    assert not done


def test_lines_on_standard_error_are_kept_with_their_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def say() -> None:
        print("one", os.getpid(), file=sys.stderr, flush=True)
        time.sleep(5)
        sys.stderr.write("two\nthr")
        sys.stderr.write("ee")

    with small_world() as world:
        first, second = run(world, say, say)
    assert lines_of(first) == [f"one {first.pid}", "two", "three"]
    assert lines_of(second) == [f"one {second.pid}", "two", "three"]
    assert [round(now) for now, _ in first.local["stderr"]] == [0, 5, 5]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_process_can_kill_another_but_for_signals_that_it_ignores(
    world: World, number: signal.Signals
) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)

    other = start(world, ignore)
    world.kernel.run(lambda: False, 1)
    run(world, lambda: os.kill(other.pid, number))
    assert other.is_alive == (number == signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


def test_signal_to_a_dead_process_is_an_error(world: World) -> None:
    def kill() -> None:
        with pytest.raises(ProcessLookupError):
            os.kill(dead.pid, 0)

    (dead,) = run(world, lambda: os._exit(0))
    run(world, kill)


def test_system_says_what_a_rank_asks_it(world: World) -> None:
    def ask() -> None:
        allow_descriptors(10_000, 1000)
        assert file_system_type(world.files.memory) == "tmpfs"

    run(world, ask)


def test_launcher_is_known_again_until_another_takes_its_place(world: World) -> None:
    def begin(is_known: bool) -> Callable[[], None]:
        def act() -> None:
            os.environ["TORCHELASTIC_RUN_ID"] = "job"
            assert (recall_launcher(directory, os.environ) is not None) == is_known
            note_launcher(directory, os.environ, [])

        return act

    directory = world.files.memory / "job" / "a"
    directory.mkdir(parents=True, mode=0o700)
    for parent, is_known in ((50, False), (50, True), (51, False), (51, True)):
        process = start(world, begin(is_known))
        process.local[PARENT] = parent
        world.kernel.run(lambda process=process: process.threads[0].is_done)


@dataclass
class Rank:
    """A rank that has a writer and hands checkpoints to it.

    Attributes:
        said: what its log would hold, each with the virtual time.
    """

    world: World
    said: list[tuple[float, str]] = field(default_factory=list)
    supervisor: WriterSupervisor | None = None

    @property
    def node_dir(self) -> Path:
        """Its memory."""
        return self.world.files.memory / "job" / "a"

    @property
    def storage(self) -> Storage:
        """Its persist directory."""
        return Storage(str(self.world.files.storage / "persist"))

    @property
    def writer(self) -> Process:
        """The writer that it has started last."""
        return self.world.kernel.processes[-1]

    def add(self, event: str, iteration: int, **values: Any) -> None:
        """Note an event."""
        self.said.append((self.world.kernel.now, f"{event} {iteration}"))

    def degraded(self, part: Any, iteration: int, reason: str) -> None:
        """Note what went wrong."""
        self.said.append((self.world.kernel.now, reason))

    def start_writer(self) -> PersistClient:
        """Start the writer; return the client."""
        self.node_dir.mkdir(parents=True, mode=0o700)
        directory = self.node_dir / "persist"
        settings = WriterSettings(url=self.storage.url, keep=2, parent=os.getpid(), lock_owner="")
        reports: Any = self
        command = writer_command(directory)
        self.supervisor = WriterSupervisor(directory, command, reports, Clock(), settings)
        self.supervisor.start()
        client = PersistClient(directory, 0, reports, lambda *_: None, Clock())
        client.start()
        return client

    def persist(self, client: PersistClient, iteration: int) -> None:
        """Have a checkpoint written, and wait until that is over."""
        region, _ = fill_region(self.node_dir / "rank_00000", iteration=iteration)
        client.submit(region, (), "", file_tag(make_identity()))
        while client.poll() is None:
            time.sleep(0.1)


def test_writer_serves_and_is_started_again_when_it_is_killed(world: World) -> None:
    rank = Rank(world)

    def act() -> None:
        client = rank.start_writer()
        rank.persist(client, 5)
        os.kill(rank.writer.pid, signal.SIGKILL)
        rank.persist(client, 6)
        assert rank.supervisor is not None
        rank.supervisor.close()

    run(world, act)
    said = [text for _, text in rank.said]
    assert said == [
        "persist 5",
        "the writer process ended with code -9; it is started again",
        "persist 6",
    ]
    assert complete_iterations(rank.storage) == [6, 5]
    assert 1 < rank.said[-1][0] < 10
    assert not any(each.is_alive for each in world.kernel.processes[1:])


def test_writer_dies_with_its_rank_and_the_next_serves_what_is_left(world: World) -> None:
    rank = Rank(world)

    def act() -> None:
        rank.persist(rank.start_writer(), 5)
        time.sleep(1000)

    process = start(world, act)
    world.kernel.run(lambda: len(world.kernel.processes) == 2 and rank.node_dir.exists(), 60)
    world.kernel.run(lambda: bool(list(rank.node_dir.glob("persist/request_*"))), 60)
    writer = rank.writer
    assert writer.is_alive
    world.kernel.end(process)
    assert not writer.is_alive
    assert complete_iterations(rank.storage) == []


def test_writer_whose_input_ends_exits(world: World) -> None:
    def act() -> None:
        directory = world.files.memory / "job" / "a"
        directory.mkdir(parents=True, mode=0o700)
        with pytest.raises(subprocess.TimeoutExpired):
            child = subprocess.Popen(writer_command(directory), stdin=subprocess.PIPE)
            child.wait(10)
        assert child.poll() is None
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(10) == 0
        with pytest.raises(BrokenPipeError):
            child.stdin.write(b"x")

    run(world, act)


def test_writer_that_is_stuck_in_storage_when_it_is_killed_ends_when_that_answers(
    world: World,
) -> None:
    rank = Rank(world)

    def act() -> None:
        client = rank.start_writer()
        world.files.stuck("storage", for_s=200)
        rank.persist(client, 5)
        time.sleep(100)
        rank.persist(client, 6)

    run(world, act)
    assert rank.said[0][1] == "the writer did not finish in time"
    assert rank.said[1][1].startswith("the writer process did not finish in time and was killed")
    # Those that are started meanwhile wait for its lock.
    *waiting, (done, text) = rank.said[2:]
    assert all("no sign of life" in reason for _, reason in waiting)
    assert text == "persist 6"
    assert 200 < done < 300


def test_idle_writer_costs_few_events(world: World) -> None:
    rank = Rank(world)

    def act() -> None:
        rank.start_writer()
        time.sleep(5)
        before = world.kernel.num_events
        time.sleep(100)
        counted.append(world.kernel.num_events - before)

    counted: list[int] = []
    run(world, act)
    assert counted[0] < 1500


def test_same_seed_gives_the_same_story_of_a_writer() -> None:
    def story_of(seed: int) -> list[str]:
        with small_world(seed) as world:
            events: list[str] = []
            pass_event = world.kernel.event

            def note(what: str) -> None:
                events.append(f"{world.kernel.now} {world.kernel.running} {what}")
                pass_event(what)

            world.kernel.event = note  # type: ignore[method-assign]
            rank = Rank(world)
            run(world, lambda: rank.persist(rank.start_writer(), 5))
            return events

    assert len(story_of(3)) > 100
    assert story_of(3) == story_of(3)
