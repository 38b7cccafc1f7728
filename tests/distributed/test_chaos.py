"""Runs whose processes are killed from outside, at random times."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from moe_ft.events import event_path
from tests.harness import events
from tests.jobs import CheckpointJob
from tests.local_recoveries import INTERLEAVED, LOGGED

NUM_RANKS = 4
NUM_ITERATIONS = 120
KILLS_PER_RUN = 10
_MOST_ITERATIONS = 16  # that one start completes: enough for windows of 5
_EARLY = 0.3  # of the kills come before the first iteration ends, in recovery and replay
_LAST_KILL_S = 1.5  # after that; an iteration takes a few tenths of a second
_POLL_S = 0.1
_DEADLINE_S = (
    600.0  # for all iterations in one start, also where the machine is busy with other things
)
_TEST_S = 1800


SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window")
DENSE = ("--moe-ft-strategy", "dense", "--moe-ft-interval")
# Stages, layers and strategies of the runs in which single stages recover; with 8 layers, two chunks each.
LOCAL: list[tuple[int, int, tuple[str, ...]]] = [
    (2, 4, (*SPARSE, "2")),
    (2, 4, (*DENSE, "3")),
    (4, 4, (*SPARSE, "3")),
    (4, 8, (*SPARSE, "2")),
    (4, 4, (*DENSE, "2")),
]


class Killer:
    """Killer of random ranks of a job at random times, once in each start, up to a number of kills."""

    def __init__(self, log: Path, seed: int) -> None:
        self._log, self._random = log, random.Random(seed)
        self._should_end = threading.Event()
        self.kills: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._should_end.set()
        self._thread.join()

    def _run(self) -> None:
        while len(self.kills) < KILLS_PER_RUN and not self._should_end.is_set():
            pids = self._pids_of_next_start()
            if pids is None:
                self._should_end.wait(_POLL_S)
                continue
            is_early = self._random.random() < _EARLY
            num_iterations = 0 if is_early else self._random.randint(1, _MOST_ITERATIONS)
            self._await_iterations(num_iterations)
            self._should_end.wait(self._random.uniform(0, _LAST_KILL_S))
            victim = self._random.randrange(NUM_RANKS)
            with suppress(ProcessLookupError):
                os.kill(pids[victim], signal.SIGKILL)
            self.kills.append((victim, num_iterations))

    def _await_iterations(self, count: int) -> None:
        """Wait until rank 0 has logged a number of iterations of this start."""
        before = len(events(self._log, 0, "iteration"))
        while len(events(self._log, 0, "iteration")) < before + count:
            if self._should_end.wait(_POLL_S):
                return

    def _pids_of_next_start(self) -> list[int] | None:
        """Return the process ids of all ranks, once all of the next incarnation have started."""
        if not all(event_path(self._log, rank).exists() for rank in range(NUM_RANKS)):
            return None
        starts = [events(self._log, rank, "start") for rank in range(NUM_RANKS)]
        newest = [lines[-1] if lines else {"incarnation": -1} for lines in starts]
        has_started = all(line["incarnation"] >= len(self.kills) for line in newest)
        return [line["pid"] for line in newest] if has_started else None


def set_model(job: CheckpointJob, num_stages: int = 2, num_layers: int = 4) -> None:
    layout = {"pp": num_stages, "ep": NUM_RANKS // num_stages}
    chunks = INTERLEAVED if num_layers == 8 else ()
    model = {"train_iters": NUM_ITERATIONS, "num_layers": num_layers}
    job.set_model(NUM_RANKS, layout, *chunks, **model, clip_grad=0.1, lr_warmup_iters=30)


@pytest.mark.chaos
@pytest.mark.timeout(_TEST_S)
@pytest.mark.parametrize(("seed", "window"), [(1, "2"), (2, "3"), (3, "5"), (4, "3"), (5, "auto")])
def test_run_that_is_killed_again_and_again_ends_in_the_state_of_one_that_was_not(
    seed: int, window: str, job: CheckpointJob
) -> None:
    set_model(job)
    nodes, start = [f"node{rank % 2}" for rank in range(NUM_RANKS)], time.monotonic()
    with Killer(job.events_dir, seed) as killer:
        job.run_with_faults(
            flags=(*SPARSE, window),
            storage=True,
            nodes=lambda start: nodes,
            max_restarts=KILLS_PER_RUN + 3,
            deadline_s=_DEADLINE_S,
        )
    recovered = job.recoveries
    steps = "; ".join(str(each or "nothing") for each in recovered)
    print(f"{len(killer.kills)} kills in {time.monotonic() - start:.0f} s; recovered {steps}")
    # Only the first starts may leave nothing; no kill removes memory.
    assert sum(each is not None for each in recovered) > KILLS_PER_RUN // 2
    assert {tier for each in recovered if each for tier in each.tiers} == {"memory"}
    targets = [each.target_iteration if each else 0 for each in recovered]
    assert targets == sorted(targets)
    check_end(job, killer)


def check_end(job: CheckpointJob, killer: Killer) -> None:
    assert len(killer.kills) == KILLS_PER_RUN
    references = job.place.references
    assert job.digests() == references.digests(job.base, NUM_RANKS, deadline_s=_DEADLINE_S)


def local_recoveries(log: Path, num_stages: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the target of each recovery and the stages that ran iterations again alone, none if all did.

    All ranks agree on them, and a rank of another stage has run nothing again.
    """
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank in range(NUM_RANKS):
        for each in events(log, rank, "recovery"):
            stages = tuple(each["stages"]) if each["scope"] == "local" else ()
            told = each["target_iteration"], stages
            assert found.setdefault(each["incarnation"], told) == told
            if stages and rank * num_stages // NUM_RANKS not in stages:
                assert each["replayed_iterations"] == 0
    return [each for _, each in sorted(found.items())]


@pytest.mark.chaos
@pytest.mark.timeout(_TEST_S)
@pytest.mark.parametrize("seed", range(10))
def test_stages_that_are_killed_again_and_again_recover_alone(
    seed: int, job: CheckpointJob
) -> None:
    num_stages, num_layers, strategy = LOCAL[seed % len(LOCAL)]
    set_model(job, num_stages, num_layers)
    with Killer(job.events_dir, seed) as killer:
        job.run_with_faults(
            flags=(*strategy, *LOGGED),
            is_intact=False,
            max_restarts=KILLS_PER_RUN + 3,
            deadline_s=_DEADLINE_S,
        )
    found = local_recoveries(job.events_dir, num_stages)
    print(f"{len(killer.kills)} kills; targets and stages of recoveries: {found}")
    targets = [target for target, _ in found]
    assert targets == sorted(targets)
    # A kill before the first window, or before a new one after a recovery, is answered by all stages.
    assert sum(bool(stages) for _, stages in found) >= KILLS_PER_RUN // 4
    check_end(job, killer)
