"""Sources at URLs are read like folders, by the names of their files, whatever the store lists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from moe_ft.convert.conversion import Request, convert
from moe_ft.convert.opening import open_model
from moe_ft.convert.remote_path import RemotePath, path_of
from moe_ft.convert.safetensors_file import content_of
from moe_ft.errors import ConfigError, CorruptStateError
from tests.object_store import ObjectStore
from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL, random_model, tensors_of
from tests.unit.moe_ft.convert.huggingface.test_release import change_tensors

SOURCES = {"run": "safetensors", "hf": "torch_dist", "torch_dist": "hf"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of Hugging Face; nobody may change it."""
    from transformers import MixtralConfig

    folder = tmp_path_factory.mktemp("model") / "saved"
    random_model(MixtralConfig(**SMALL, num_local_experts=4)).save_pretrained(
        folder, max_shard_size="100KB"
    )
    return folder


def upload(folder: Path, s3: ObjectStore) -> str:
    """Copy a folder to the store; return its URL."""
    url = f"{s3.bucket()}/here"
    fsspec.core.url_to_fs(url)[0].put(f"{folder}/", f"{url}/", recursive=True)
    return url


@pytest.fixture
def folder_of(model: Path, checkpoints: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return what makes a source of a kind in a folder."""

    def make(kind: str) -> Path:
        if kind == "run":
            return checkpoints
        if kind == "hf":
            return model
        folder = tmp_path / "torch_dist"
        convert(Request(source=str(model), destination=str(folder), to="torch_dist"))
        return folder

    return make


def contents(folder: Path) -> Any:
    """Return what a conversion has written, by name."""
    if any(folder.glob("*.safetensors")):
        return {name: content_of(each).tobytes() for name, each in tensors_of(folder).items()}
    opened = open_model(str(folder))
    return {
        each.name: content_of(opened.read(each, "weight")).tobytes() for each in opened.tensors()
    }


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_source_at_a_url_is_converted_like_a_folder(
    kind: str, is_late: bool, folder_of: Callable[[str], Path], s3: ObjectStore, tmp_path: Path
) -> None:
    folder = folder_of(kind)
    url = upload(folder, s3)
    places = [tmp_path / "of_folder", tmp_path / "of_url"]
    convert(Request(source=str(folder), destination=str(places[0]), to=SOURCES[kind]))
    source = f"{url}/iter_0000004" if kind == "run" and is_late else url
    with s3.listing_late("here" if is_late else "nothing"):
        convert(Request(source=source, destination=str(places[1]), to=SOURCES[kind]))
    found, expected = map(contents, places[::-1])
    assert found == expected
    assert found


def test_single_file_of_a_model_is_found_by_its_name(
    model: Path, s3: ObjectStore, tmp_path: Path
) -> None:
    folder = tmp_path / "single"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change_tensors(folder, lambda tensors: None)
    url = upload(folder, s3)
    with s3.listing_late("here"):
        assert len(open_model(url).tensors()) == len(open_model(str(folder)).tensors())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-00001", r"model-00001.* cannot be read: it has \d+ bytes, and its header says"),
        ("config.json", "config.json is no JSON"),
    ],
)
def test_object_that_is_cut_short_is_refused(
    name: str, message: str, model: Path, s3: ObjectStore
) -> None:
    url = upload(model, s3)
    system = fsspec.core.url_to_fs(url)[0]
    (path,) = (each for each in system.find(url) if f"/{name}" in each)
    system.pipe_file(path, system.cat_file(path)[:-9])
    with pytest.raises(CorruptStateError, match=message):
        open_model(url)


def test_nothing_at_a_url_is_refused(s3: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="holds no state of moe_ft"):
        open_model(f"{s3.bucket()}/nothing")


def test_object_that_is_written_again_has_another_version(s3: ObjectStore) -> None:
    url = f"{s3.bucket()}/here"
    system = fsspec.core.url_to_fs(url)[0]
    path = path_of(url) / "a"
    assert isinstance(path, RemotePath)
    versions = []
    for content in (b"a", b"b", b"b and c"):
        system.pipe_file(f"{url}/a", content)
        assert path.version() == path.version()
        versions.append(path.version())
    assert len(set(versions)) == 3


def test_paths_of_this_machine_are_pathlibs(tmp_path: Path) -> None:
    assert path_of(str(tmp_path)) == path_of(f"file://{tmp_path}") == tmp_path
