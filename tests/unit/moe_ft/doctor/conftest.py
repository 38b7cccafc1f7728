"""Fixtures of the tests of the doctor: a node that answers."""

from collections.abc import Iterator

import pytest

from moe_ft.doctor.network import serve
from moe_ft.engine.links.listener import PeerListener
from tests.unit.moe_ft.peer import HOST, TOKEN


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Return where a node of an examination listens."""
    listener = PeerListener(HOST, serve, lambda reason: None)
    port = listener.start()
    listener.admit(TOKEN)
    yield HOST, port
    listener.close()
