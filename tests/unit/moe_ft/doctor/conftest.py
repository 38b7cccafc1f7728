"""Fixtures of the tests of the doctor: a server of objects, and a node that answers."""

from collections.abc import Iterator

import pytest

from moe_ft.doctor.network import serve
from moe_ft.engine.links.listener import PeerListener
from tests.object_store import ObjectStore, object_store
from tests.unit.moe_ft.peer import HOST, TOKEN


@pytest.fixture(scope="package")
def s3() -> Iterator[ObjectStore]:
    """Return a server of objects."""
    with object_store() as store:
        yield store


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Return where a node of an examination listens."""
    listener = PeerListener(HOST, serve, lambda reason: None)
    port = listener.start()
    listener.admit(TOKEN)
    yield HOST, port
    listener.close()
