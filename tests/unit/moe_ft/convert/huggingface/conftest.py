"""Fixtures of the tests of Hugging Face's models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import MixtralConfig

from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL, random_model


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Mixtral in two files; nobody may change it."""
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
