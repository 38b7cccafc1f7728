"""Checkpointing while training runs: the failures that it notes, and how it ends."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.agreement import Agreement
from moe_ft.engine.persist.storage_lock import LOCK_NAME
from moe_ft.errors import CorruptStateError, UnrecoverableError
from moe_ft.planning.recovery import Plan
from moe_ft.recovery import start as phases
from moe_ft.recovery.checkpointing import Checkpointing, note_failure
from moe_ft.recovery.failures import Attempt, read_attempts
from moe_ft.recovery.meet import Met, Ranks
from tests.unit.moe_ft.recovery.meetings import (
    config_of,
    facts_of,
    initialized,
    leave_window,
    met_alone,
)
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    with ExitStack() as opened:
        met = met_alone(config_of(tmp_path), facts_of(), opened)
        met.site.node_dir.mkdir(parents=True, mode=0o700)
        yield met


@pytest.fixture
def plan() -> Plan:
    (found,), _ = plans_of(versions_of((start(0, 0, "writer"),), 7))
    return found


# Failures


def test_failure_that_speaks_against_a_state_is_noted_with_its_place_and_its_start(
    met: Met, plan: Plan
) -> None:
    note_failure(met, plan, "iteration 8", ValueError("bad\nmore of it"))
    expected = Attempt(
        start="writer", iteration=7, failure="iteration 8: ValueError: bad", by=met.names.name
    )
    assert read_attempts(met.site.node_dir) == [expected]


def test_rejected_results_are_one_failure_whatever_the_words(met: Met, plan: Plan) -> None:
    for rank in (3, 5):
        note_failure(met, plan, "iteration 8", RuntimeError(f"Rank {rank}: found NaN in loss"))
    noted = {each.failure for each in read_attempts(met.site.node_dir)}
    assert noted == {"iteration 8: a rejected result"}


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        (UnrecoverableError("tensor 3 is missing"), [True]),
        (CorruptStateError("tensor 3 does not match its checksum"), [True]),
        (ValueError("bad"), [False]),
        (OSError("disk"), []),
    ],
)
def test_failure_of_a_replay_for_its_logs_is_noted_against_the_local_recovery_alone(
    met: Met, plan: Plan, error: Exception, noted: list[bool]
) -> None:
    note_failure(met, dataclasses.replace(plan, scopes=()), "iteration 8", error)
    assert [each.is_local for each in read_attempts(met.site.node_dir)] == noted


# The end


class Job:
    """A job of one rank that has recovered a state and persists."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def meet(config: Any, facts: Any, built: Any, hook: Any, opened: ExitStack) -> Met:
            return met_alone(config, facts, opened, hook)

        monkeypatch.setattr(phases, "meet", meet)
        config = config_of(folder, persists=True)
        leave_window(config)
        built: Any = None
        self.running: Checkpointing = phases.start(
            config, facts_of(), built, lambda phase, iteration: None
        )
        self.node_dir = self.running.met.site.node_dir
        self.lock_path = folder / "storage" / LOCK_NAME

    @property
    def has_state(self) -> bool:
        """True if there is a committed region."""
        return any(self.node_dir.rglob("region_*.json"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with initialized():
        yield Job(tmp_path, monkeypatch)


def test_end_with_removal_leaves_neither_memory_nor_the_lock_of_storage(job: Job) -> None:
    job.running.close(removes_memory=True)
    assert not job.node_dir.exists()
    assert not job.lock_path.exists()


class _Absent(Agreement):
    """Agreement in which another rank does not come to the barrier."""

    def barrier(self) -> None:
        raise RuntimeError("rank 1 did not come")


def test_rank_learns_whether_all_others_have_ended_cleanly(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.running.have_all_ended()
    met = job.running.met
    ranks = Ranks(everyone=_Absent(1.0), stage=met.ranks.stage)
    assert not replace(job.running, met=replace(met, ranks=ranks)).have_all_ended()
    job.running.close()
    said = capsys.readouterr().err
    assert "rank 0 keeps its memory: another rank did not end cleanly: rank 1 did not come" in said
