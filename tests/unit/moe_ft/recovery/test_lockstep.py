"""Ranks that wait for a local recovery see that it makes progress, and hear when it makes none."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.engine.agreement import Agreement
from moe_ft.recovery.borders import Lockstep
from tests.unit.simulation.simulated import Simulated

TIMEOUT_S = 60.0
TARGET = 9


class Job:
    """Ranks in simulated time, which run iterations again as a recovery plan says.

    Attributes:
        run: what was run, ``[(iteration, rank)]`` in order.
        dies: by rank, the iteration in which it dies.
    """

    def __init__(
        self, simulated: Simulated, begins: Mapping[int, int], iteration_s: float = 25.0
    ) -> None:
        """Prepare.

        Args:
            begins: by rank, the iteration that it runs first; the target if it runs nothing again.
            iteration_s: time that an iteration takes.
        """
        self._simulated, self._begins, self._iteration_s = simulated, begins, iteration_s
        self.run: list[tuple[int, int]] = []
        self.dies: dict[int, int] = {}

    def act(self, rank: int) -> None:
        """Recover on one rank."""
        simulated, everyone = self._simulated, Agreement(TIMEOUT_S)
        everyone.start()
        plan: Any = SimpleNamespace(
            is_local=True, replay_from=min(self._begins.values()), iteration=TARGET
        )
        lockstep = Lockstep(everyone, plan)
        try:
            for iteration in range(self._begins[rank], TARGET):
                lockstep.before(iteration)
                if self.dies.get(rank) == iteration:
                    simulated.kernel.end(simulated.world.process)
                simulated.kernel.sleep(self._iteration_s)
                self.run.append((iteration, rank))
            lockstep.end()
        except RuntimeError as error:
            simulated.say(f"rank {rank}: {error}")
        else:
            simulated.say(f"rank {rank} continues")

    def start(self) -> "Job":
        """Run all ranks to their ends."""
        simulated, world_size = self._simulated, len(self._begins)
        for rank in self._begins:
            simulated.rank(lambda rank=rank: self.act(rank), rank, world_size)
        simulated.run()
        return self

    @property
    def said(self) -> list[str]:
        """Words of the ranks, sorted."""
        return sorted(self._simulated.said)


@pytest.fixture
def world() -> Iterator[Simulated]:
    with Simulated() as found:
        yield found


@pytest.mark.parametrize("replaying", [0, 1, 2])
def test_replay_that_is_longer_than_the_timeout_is_waited_for(
    world: Simulated,
    replaying: int,
) -> None:
    begins = {rank: 2 if rank == replaying else TARGET for rank in range(3)}
    job = Job(world, begins).start()
    assert world.kernel.now > 2 * TIMEOUT_S
    assert job.run == [(iteration, replaying) for iteration in range(2, TARGET)]
    assert job.said == [f"rank {rank} continues" for rank in range(3)]


def test_stages_that_begin_at_other_iterations_run_each_of_them_together(world: Simulated) -> None:
    job = Job(world, {0: 3, 1: TARGET, 2: 7, 3: 5}).start()
    assert [iteration for iteration, _ in job.run] == sorted(each for each, _ in job.run)
    assert sorted(job.run) == [
        *((iteration, 0) for iteration in (3, 4)),
        *((iteration, rank) for iteration in (5, 6) for rank in (0, 3)),
        *((iteration, rank) for iteration in (7, 8) for rank in (0, 2, 3)),
    ]
    assert job.said == [f"rank {rank} continues" for rank in range(4)]


def test_iteration_without_an_end_is_given_up_after_the_timeout(world: Simulated) -> None:
    job = Job(world, {0: TARGET, 1: 3, 2: TARGET}, iteration_s=1000.0)
    job.start()
    assert len(job.said) == 3
    assert any("Timed out waiting 60000ms" in each for each in job.said)
    assert min(now for now, _ in world.trace) < 2 * TIMEOUT_S


def test_rank_that_dies_in_its_replay_ends_the_wait_of_the_others(world: Simulated) -> None:
    job = Job(world, {0: TARGET, 1: 3, 2: 3})
    job.dies[1] = 6
    job.start()
    assert max(job.run) == (6, 2), "the rank that lives ends its iteration"
    assert [each[:6] for each in job.said] == ["rank 0", "rank 2"]
    assert all("Connection closed by peer" in each for each in job.said)
    heard_s = world.trace[0][0]
    assert 3 * 25.0 < heard_s < 3 * 25.0 + 10.0, "the rank that waits hears of it at once"
