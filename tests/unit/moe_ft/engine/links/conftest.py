"""Connections of tests: both sides are patient, as a machine may be busy with other things."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.moe_ft.peer import Peer

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up later than training does; tests of deadlines set their own."""
    for name in ("transport", "peers", "server"):
        monkeypatch.setattr(f"moe_ft.engine.links.{name}.PROGRESS_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("moe_ft.engine.links.listener.STRANGER_S", PATIENCE_S)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()
