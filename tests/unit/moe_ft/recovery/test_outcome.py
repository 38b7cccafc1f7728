"""Outcome of a start that has recovered nothing; test_restore.py has that of a recovery."""

from contextlib import ExitStack
from pathlib import Path

from moe_ft.recovery.checkpointing import Outcome, make_outcome
from tests.unit.moe_ft.builders import make_identity
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, met_alone


def test_start_without_a_recovery_begins_where_load_has_put_it(tmp_path: Path) -> None:
    with ExitStack() as opened:
        met = met_alone(config_of(tmp_path), facts_of(iteration=3), opened)
        identity = make_identity(history=[(2, 3)])
        outcome = make_outcome(met, None, identity, {"plan": 0.5}, ["a problem"])
    assert outcome == Outcome(
        iteration=3,
        start=2,
        is_deterministic=True,
        phases_s={"plan": 0.5},
        problems=["a problem"],
        sources={},
        lossy={},
    )
