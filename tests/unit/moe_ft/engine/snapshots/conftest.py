"""Fixtures of the tests of snapshots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.moe_ft.engine.snapshots.packed_rank import MakeRank, Packings, Rank
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import DEADLINE_S


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[MakeRank]:
    """Return what makes ranks, each with a directory of its own."""
    ranks: list[Rank] = []

    def make(packings: Packings, **others: Any) -> Rank:
        ranks.append(Rank(tmp_path / str(len(ranks)), packings, **others))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.writer.close(DEADLINE_S)
