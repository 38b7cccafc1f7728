"""An agreed state becomes live: fetched, agreed on and restored by the only rank of a job."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_ft.planning.recovery import Plan, Tier
from moe_ft.recovery.agree import Agreed, agree
from moe_ft.recovery.checkpointing import make_outcome
from moe_ft.recovery.claim import claim
from moe_ft.recovery.fetch import fetch, open_readers
from moe_ft.recovery.look import look
from moe_ft.recovery.meet import Met
from moe_ft.recovery.plan import plan
from moe_ft.recovery.readers import Readers
from moe_ft.recovery.restore import Restored, restore
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_identity
from tests.unit.moe_ft.recovery.meetings import (
    config_of,
    facts_of,
    initialized,
    leave_window,
    met_alone,
)


@dataclass(kw_only=True)
class Recovery:
    """Recovery of a window by the only rank of a job, up to the agreement."""

    met: Met
    plan: Plan
    agreed: Agreed
    readers: Readers

    def restore(self) -> Restored:
        """Restore the state."""
        return restore(self.plan, self.agreed, self.met, self.readers, [self.plan])


@pytest.fixture(params=[1, 3])
def length(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def recovery(tmp_path: Path, length: int) -> Iterator[Recovery]:
    config = config_of(tmp_path)
    leave_window(config, length=length)
    with initialized(), ExitStack() as opened:
        met = met_alone(config, facts_of(), opened)
        claimed = claim(met, opened)
        candidates = plan(look(met, claimed), met)
        (candidate,) = candidates.choice.plans
        readers = opened.enter_context(open_readers(met, claimed))
        fetched = fetch(candidate, met, readers, {}, candidates.most_iteration)
        agreed, rejected = agree(candidate, fetched, met)
        assert agreed is not None, rejected
        yield Recovery(met=met, plan=candidate, agreed=agreed, readers=readers)


def test_reading_and_agreeing_change_nothing(recovery: Recovery) -> None:
    assert not any(local.parameter.any() for local in recovery.met.live.parameters)


def test_strategy_that_saves_everything_loses_nothing_and_looks_for_no_checkpoint(
    recovery: Recovery,
) -> None:
    restored = recovery.restore()
    assert (restored.loss, restored.persisted_index) == (None, "")


def test_outcome_tells_what_was_restored(recovery: Recovery, length: int) -> None:
    restored = recovery.restore()
    identity = make_identity(history=[(0, 0), (1, 5)])
    outcome = make_outcome(recovery.met, restored, identity, {"plan": 0.5}, ["a problem"])
    assert (outcome.iteration, outcome.start, outcome.writer) == (4 + length, 1, 0)
    assert outcome.sources == {Tier.MEMORY: len(WINDOW_UNITS)}
    assert outcome.record == restored.record
