"""The newest state of one iteration stays besides the newest checkpoints, where that is wanted."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_ft.engine.persist.retention import Retention
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.builders import (
    make_identity,
    manifest_of,
    persist_checkpoint,
    persist_window,
)
from tests.unit.moe_ft.engine.persist.checkpoints import LOCAL, complete_iterations

RUN = make_identity()


def kept(
    storage: Storage,
    whole: Sequence[int],
    last: int,
    *,
    keep: int = 2,
    keeps_whole: bool = True,
) -> list[int]:
    """Return what stays of a run with windows that end at 3, 6, ..., and states of one iteration."""
    retention = Retention(storage, keep, keeps_whole=keeps_whole)
    for iteration in range(1, last + 1):
        if iteration in whole:
            retention.retain(persist_window(storage, iteration, RUN, length=1))
        elif iteration % 3 == 0:
            retention.retain(persist_window(storage, iteration, RUN))
    return complete_iterations(storage)


@pytest.mark.parametrize(
    ("last", "expected"), [(7, [7, 6]), (9, [9, 7]), (12, [12, 9, 7]), (21, [21, 18, 14])]
)
def test_newest_whole_state_stays_until_there_is_a_newer_one(
    storage: Storage, last: int, expected: list[int]
) -> None:
    assert kept(storage, [2, 7, 14], last) == expected


def test_whole_states_go_like_others_unless_they_are_wanted(storage: Storage) -> None:
    assert kept(storage, [2, 7], 12, keeps_whole=False) == [12, 9]


@LOCAL
def test_damaged_whole_state_does_not_stay(storage: Storage) -> None:
    assert kept(storage, [2, 4], 6) == [6, 4]
    manifest = manifest_of(storage, 4)
    (Path(storage.url) / manifest.files[0].data).write_bytes(b"")
    Retention(storage, 1, keeps_whole=True).retain(persist_window(storage, 9, RUN))
    assert complete_iterations(storage) == [9]


def test_state_that_lacks_units_is_not_whole(storage: Storage) -> None:
    retention = Retention(storage, 1, keeps_whole=True)
    for manifest in (persist_checkpoint(storage, 1, RUN), persist_window(storage, 6, RUN)):
        retention.retain(manifest)  # as of `partial`, which has not saved all experts at first
    assert complete_iterations(storage) == [6]
