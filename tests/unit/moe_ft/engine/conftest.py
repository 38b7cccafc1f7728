"""Storage for tests: a directory, and one in which operations fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ft.engine.persist.storage import Storage
from tests.unit.moe_ft.faulty_storage import Injector, install


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Return a persist directory that does not exist yet."""
    return Storage(str(tmp_path / "persist"))


@pytest.fixture
def injector() -> Iterator[Injector]:
    """Return what makes operations of `faulty_urls` fail."""
    with install() as injector:
        yield injector
