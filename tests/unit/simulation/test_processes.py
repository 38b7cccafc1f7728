"""Simulated processes: what each sees of its system, and the writer process in one."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.clock import Clock
from moe_ft.engine.persist.client import PersistClient, WriterSupervisor, writer_command
from moe_ft.engine.persist.writer import WriterSettings
from moe_ft.files.storage import Storage, file_tag
from moe_ft.recovery.look import note_launcher, recall_launcher
from tests.simulation.active import World
from tests.simulation.kernel import Process
from tests.simulation.processes import PARENT
from tests.unit.moe_ft.builders import fill_region, make_identity
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.simulation.small_world import run, small_world, start


@pytest.fixture
def world() -> Iterator[World]:
    with small_world() as world:
        yield world
        assert not world.kernel.errors


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
