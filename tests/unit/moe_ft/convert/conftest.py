"""Fixtures of the tests of conversions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ft.convert.source import Source, open_source
from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore, object_store
from tests.unit.moe_ft.convert.models import persist_model


@pytest.fixture(scope="package")
def s3() -> Iterator[ObjectStore]:
    """Return a server of objects."""
    with object_store() as store:
        yield store


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Return a persist directory with a checkpoint of the known model."""
    folder = tmp_path / "checkpoints"
    persist_model(Storage(str(folder)))
    return folder


@pytest.fixture
def source(checkpoints: Path) -> Source:
    """Return the opened checkpoint."""
    return open_source(str(checkpoints))
