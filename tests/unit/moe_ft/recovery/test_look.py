"""Look for state: what the flags ask for, what exists, and what has failed before."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.planning.recovery import Plan
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.claim import Claimed, claim
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import (
    Found,
    is_counted_restart,
    look,
    note_launcher,
    note_start,
    recall_launcher,
)
from moe_ft.recovery.meet import Met
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, leave_window, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of, wish

FAILURE = "recovery: ValueError: bad"
WRITER = start(0, 0, "writer")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


class Rank:
    """The only rank of a job, which looks after it has claimed its place."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def claim(self, config: MoeFtConfig) -> tuple[Met, Claimed]:
        """Claim the place that the flags name."""
        met = met_alone(config, facts_of(iteration=2, began_with="--finetune"), self._opened)
        return met, claim(met, self._opened)

    def look(self, config: MoeFtConfig) -> Found:
        """Claim and look."""
        return look(*self.claim(config))

    def close(self) -> None:
        """Release everything."""
        self._opened.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def test_restart_by_a_launcher_knows_what_there_was_before_its_first_start(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    leave_window(config)
    met, claimed = rank.claim(config)
    first = look(met, claimed)
    assert not first.wish.is_restart
    note_start(met, first, has_begun=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    asked = look(met, claimed).wish
    assert (asked.is_restart, asked.known_before) == (True, frozenset({"run-a-0-0"}))
    assert asked.has_last_memory


def test_restart_does_not_overwrite_what_its_node_knows_of_the_launcher(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    config = config_of(tmp_path)
    leave_window(config)
    met, claimed = rank.claim(config)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    note_start(met, look(met, claimed), has_begun=True)
    (met.site.node_dir / "region_0.json").unlink(missing_ok=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    note_start(met, look(met, claimed), has_begun=True)
    known = recall_launcher(met.site.node_dir, {"SLURM_RESTART_COUNT": "1"})
    assert known is not None
    assert known.known == ("run-a-0-0",)


# Plans that are passed over


@pytest.fixture
def plan() -> Plan:
    (found,), _ = plans_of(versions_of((WRITER,), 7))
    return found


def found_with(asked: Wish, failed: dict[tuple[str, int], str]) -> Found:
    return Found(inventory=Inventory(), wish=asked, failed=failed)


@pytest.mark.parametrize("asked", [wish(), wish("iter_7", is_restart=True)])
def test_state_from_which_two_starts_have_failed_is_passed_over(plan: Plan, asked: Wish) -> None:
    rejection = found_with(asked, {("writer", 7): FAILURE}).failure_of(plan)
    assert rejection is not None
    assert (rejection.iteration, rejection.start) == (7, WRITER)
    assert "two starts failed" in rejection.reason
    assert FAILURE in rejection.reason


@pytest.mark.parametrize("asked", [wish(), wish("iter_7", is_restart=True)])
def test_local_recovery_that_has_failed_for_its_logs_is_passed_over(
    plan: Plan, asked: Wish
) -> None:
    found = replace(found_with(asked, {}), failed_locally={("writer", 7): FAILURE})
    assert found.local_failure_of(plan) == (
        f"iteration 7: a start failed to recover some stages alone ({FAILURE})"
    )
    assert found.failure_of(plan) is None, "the state itself may be used"


def test_local_recovery_that_has_not_failed_or_is_insisted_on_is_tried(plan: Plan) -> None:
    found = replace(found_with(wish("iter_7"), {}), failed_locally={("writer", 7): FAILURE})
    assert found.local_failure_of(plan) == ""
    assert found_with(wish(), {("writer", 7): FAILURE}).local_failure_of(plan) == ""


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_RESTART_COUNT": ""}, False),
        ({"SLURM_RESTART_COUNT": "-1"}, False),
    ],
)
def test_restart_is_what_torchrun_or_slurm_have_counted(
    environment: dict[str, str], expected: bool
) -> None:
    assert is_counted_restart(environment) == expected


def test_launcher_that_starts_a_node_again_is_known_with_what_there_was_before(
    tmp_path: Path,
) -> None:
    assert recall_launcher(tmp_path, TORCHRUN) is None
    note_launcher(tmp_path, TORCHRUN, ["a", "b"])
    launcher = recall_launcher(tmp_path, TORCHRUN)
    assert launcher is not None
    assert launcher.known == ("a", "b")


def test_launcher_after_another_one_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_launcher(tmp_path, TORCHRUN, [])
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert recall_launcher(tmp_path, TORCHRUN) is None


def test_what_torchrun_did_not_start_is_known_only_where_restarts_are_counted(
    tmp_path: Path,
) -> None:
    note_launcher(tmp_path, {"SLURM_JOB_ID": "7"}, ["a"])
    assert recall_launcher(tmp_path, {"SLURM_JOB_ID": "7"}) is None
    assert recall_launcher(tmp_path, {"SLURM_RESTART_COUNT": "1"}) is not None


@pytest.mark.parametrize("content", [b"4711 12.5", b'{"process":"\xff"}'])
def test_note_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    note_launcher(tmp_path, TORCHRUN, [])
    (tmp_path / "launcher").write_bytes(content)
    assert recall_launcher(tmp_path, TORCHRUN) is None
