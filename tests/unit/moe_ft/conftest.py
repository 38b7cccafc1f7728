"""Fixtures that tests of several folders use: a server of objects, and a persist directory of either kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore, object_store
from tests.unit.moe_ft.faulty_storage import Injector, install


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectStore]:
    """Return a server of objects."""
    with object_store() as store:
        yield store


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return a persist directory that does not exist yet."""
    if request.param == "local":
        return Storage(str(tmp_path / "persist"))
    store: ObjectStore = request.getfixturevalue("s3")
    return Storage(f"{store.bucket()}/persist")


@pytest.fixture
def injector() -> Iterator[Injector]:
    """Return what makes operations of `faulty_urls` fail."""
    with install() as injector:
        yield injector
