"""Look for state: what the flags ask for, what exists, and what has failed before."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.memory.job_directory import LAUNCHER_NAME
from moe_ft.launches import Launch
from moe_ft.planning.recovery import Plan
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.claim import Claimed, claim
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import (
    Found,
    look,
    note_start,
    read_note,
)
from moe_ft.recovery.meet import Met
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, leave_window, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of, wish

FAILURE = "recovery: ValueError: bad"
WRITER = start(0, 0, "writer")


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
    rank: Rank, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    leave_window(config)
    met, claimed = rank.claim(config)
    first = look(met, claimed)
    assert not first.wish.is_restart
    note_start(met, first, has_begun=True)
    (met.site.node_dir / "region_0.json").unlink(missing_ok=True)
    for requeues in (1, 2):
        launch = Launch(requeues=requeues)
        met = replace(met, site=replace(met.site, launch=launch))
        asked = look(met, claimed).wish
        assert (asked.is_restart, asked.known_before) == (True, frozenset({"run-a-0-0"}))
        assert asked.has_last_memory
        note_start(met, look(met, claimed), has_begun=True)
        note = read_note(met.site.node_dir)
        assert note is not None and (note.launch, note.known) == (launch, ("run-a-0-0",))


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


@pytest.mark.parametrize("content", [b"4711 12.5", b'{"launch":"\xff"}'])
def test_note_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    assert read_note(tmp_path) is None
    (tmp_path / LAUNCHER_NAME).write_bytes(content)
    assert read_note(tmp_path) is None
