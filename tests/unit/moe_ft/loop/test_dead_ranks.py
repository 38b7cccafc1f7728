"""Checkpoints of a rank and of the dead ranks for which it speaks act together at each seam."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.engine.background import ThreadWorker
from moe_ft.engine.voices import Voice, Voices
from moe_ft.events import EventLog, event_path, read_events
from moe_ft.loop.dead_ranks import DeadRank, Idle, Together

LIMIT_S = 20.0


class Acting:
    """Checkpoints of one rank; at each seam it meets the others."""

    def __init__(self, voice: Voice, log: EventLog) -> None:
        self._voice, self.log = voice, log
        self.met: list[Any] = []
        self.fails = False

    def after_setup(self, built: Any) -> None:
        self.log.write("recovery", 3)
        self.met.append(built[1])

    def before_step(self) -> None:
        if self.fails:
            raise OSError("no room")
        self.met.append(self._voice.exchange(self._voice.rank, lambda given: [*given]))

    def suspend(self, iteration: int) -> None:
        self.met.append(iteration)

    def close(self) -> None:
        self.met.append("closed")


@pytest.fixture
def both(tmp_path: Any) -> Iterator[tuple[Together, list[Acting]]]:
    """Be rank 0, which speaks for rank 1."""
    voices = Voices({0: 0, 1: 0}, 0, lambda ranks: None, LIMIT_S)
    acting = [Acting(Voice(voices, rank), EventLog(tmp_path, rank)) for rank in range(2)]
    acting[0].log.start()
    own: Any = acting[0]
    dead: Any = acting[1]
    shard = SimpleNamespace(name="shard")
    worker = ThreadWorker("rank-1")
    found = DeadRank(checkpoints=dead, shard=shard, log=dead.log, worker=worker)
    together = Together(own, {1: found}, voices, LIMIT_S, lambda: own.met.append("told"))
    yield together, acting
    together._end()
    acting[0].log.close()
    assert "moe_ft-rank-1" not in {each.name for each in threading.enumerate()}


def test_all_ranks_are_at_one_seam_at_the_same_time(
    both: tuple[Together, list[Acting]], tmp_path: Any
) -> None:
    together, (own, dead) = both
    together.after_setup(("model", "optimizer", "scheduler"))
    together.before_step()
    together.suspend(5)
    together.close()  # of this rank alone: the dead one has ended
    assert own.met == ["optimizer", "told", [0, 1], 5, "closed"]
    assert dead.met[1:] == [[0, 1], 5, "closed"]  # nobody else uses what it keeps for a next start
    assert dead.met[0].name == "shard"
    (line,) = read_events(event_path(tmp_path, 1))
    assert (line["rank"], line["event"]) == (1, "recovery")


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_a_rank_ends_the_wait_of_the_other(
    both: tuple[Together, list[Acting]], failing: int
) -> None:
    together, acting = both
    acting[failing].fails = True
    with pytest.raises((OSError, RuntimeError)) as raised:
        together.before_step()
    if failing:  # the own rank has waited for it
        assert "speaks for ranks [0, 1]" in str(raised.value)
        assert isinstance(raised.value.__cause__, OSError)


def test_idle_rank_follows_the_others_and_acts_at_no_seam(
    both: tuple[Together, list[Acting]],
) -> None:
    _, (_, acting) = both
    own: Any = acting
    idle = Idle(own, lambda: acting.met.append("told"))
    idle.after_setup(("model", "optimizer", "scheduler"))
    idle.before_step()
    idle.suspend(5)
    assert (idle.own, acting.met) == (own, ["told"])
