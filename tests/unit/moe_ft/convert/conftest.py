"""Fixtures of the tests of conversions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ft.convert.source import RunState, open_source
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.convert.models import persist_model


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Return a persist directory with a checkpoint of the known model."""
    folder = tmp_path / "checkpoints"
    persist_model(Storage(str(folder)))
    return folder


@pytest.fixture
def source(checkpoints: Path) -> RunState:
    """Return the opened checkpoint."""
    return open_source(str(checkpoints))


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Mixtral in two files; nobody may change it."""
    from transformers import MixtralConfig

    from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL, random_model  # slow

    folder = tmp_path_factory.mktemp("mixtral") / "saved"
    model = random_model(MixtralConfig(**SMALL, num_local_experts=4))
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the folder."""
    folder = tmp_path / "saved"
    folder.mkdir()
    for path in saved_once.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    yield folder
