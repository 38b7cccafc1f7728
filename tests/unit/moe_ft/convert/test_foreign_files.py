"""Files of others are read within limits and stay in their folder; those at URLs like those of folders."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from moe_ft.convert.conversion import ConversionRequest, convert, open_model
from moe_ft.convert.foreign_files import (
    path_of,
    place_in,
    read_json,
    read_range,
    read_whole,
    signature_of,
)
from moe_ft.convert.safetensors_set import content_of
from moe_ft.errors import ConfigError, CorruptStateError
from tests.object_store import ObjectStore
from tests.unit.moe_ft.convert.huggingface.round_trip import tensors_of
from tests.unit.moe_ft.convert.huggingface.test_release import change_tensors


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/b", "..", ".", "", "a\0", 5, ["a"]])
def test_name_that_leads_out_of_the_folder_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"index names the file .* may only name files of its own"
    ):
        place_in(tmp_path, name, "index")


def test_link_out_of_the_folder_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    (folder / "out").symlink_to(tmp_path / "mine")
    (folder / "b").write_text("b")
    (folder / "in").symlink_to("b")
    (folder / "circle").symlink_to("circle")
    assert read_whole(place_in(folder, "in", "index"), 9) == b"b"
    with pytest.raises(ConfigError, match=r"model/out is a link to .*mine, but must stay"):
        place_in(folder, "out", "index")
    with pytest.raises((ConfigError, OSError), match="circle"):
        read_whole(place_in(folder, "circle", "index"), 9)


def test_links_of_the_cache_of_hugging_face_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/x").write_text("x")
    folder = tmp_path / "snapshots/rev"
    folder.mkdir(parents=True)
    (folder / "model").symlink_to("../../blobs/x")
    (folder / "other").symlink_to("../../refs")
    assert read_whole(place_in(folder, "model", "index"), 9) == b"x"
    with pytest.raises(ConfigError, match=r"other is a link"):
        place_in(folder, "other", "index")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a named pipe"),
        (Path.mkdir, "a folder"),
        (make_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_what_is_no_regular_file_is_refused_without_waiting(
    make: Any, kind: str, tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(CorruptStateError, match=f"file must be a regular file, but is {kind}"):
        read_range(tmp_path / "file", 0, 8)


def test_range_ends_with_the_file_however_long_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    assert bytes(read_range(tmp_path / "file", 4, 1 << 62)) == b"456789"
    assert bytes(read_range(tmp_path / "file", 1 << 40, 4)) == b""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "is no JSON: maximum recursion"),
        (b"{", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b"[]", "must hold a JSON object, but holds a list"),
        (b" " * (1 << 20) + b"{}", f"must have at most {1 << 20} bytes"),
    ],
)
def test_json_that_is_no_object_within_limits_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CorruptStateError, match=f"x.json {message}"):
        read_json(tmp_path / "x.json", 1 << 20)


SOURCES = {"run": "safetensors", "hf": "torch_dist", "torch_dist": "hf"}


def upload(folder: Path, s3: ObjectStore) -> str:
    """Copy a folder to the store; return its URL."""
    url = f"{s3.bucket()}/here"
    fsspec.core.url_to_fs(url)[0].put(f"{folder}/", f"{url}/", recursive=True)
    return url


@pytest.fixture
def folder_of(saved_once: Path, checkpoints: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return what makes a source of a kind in a folder."""

    def make(kind: str) -> Path:
        if kind == "run":
            return checkpoints
        if kind == "hf":
            return saved_once
        folder = tmp_path / "torch_dist"
        convert(ConversionRequest(source=str(saved_once), destination=str(folder), to="torch_dist"))
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
    convert(ConversionRequest(source=str(folder), destination=str(places[0]), to=SOURCES[kind]))
    source = f"{url}/iter_0000004" if kind == "run" and is_late else url
    with s3.listing_late("here" if is_late else "nothing"):
        convert(ConversionRequest(source=source, destination=str(places[1]), to=SOURCES[kind]))
    found, expected = map(contents, places[::-1])
    assert found == expected
    assert found


def test_single_file_of_a_model_is_found_by_its_name(saved: Path, s3: ObjectStore) -> None:
    change_tensors(saved, lambda tensors: None)
    url = upload(saved, s3)
    with s3.listing_late("here"):
        assert len(open_model(url).tensors()) == len(open_model(str(saved)).tensors())


def test_nothing_at_a_url_is_refused(s3: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="holds no state of moe_ft"):
        open_model(f"{s3.bucket()}/nothing")


def test_object_that_is_written_again_has_another_version(s3: ObjectStore) -> None:
    url = f"{s3.bucket()}/here"
    system = fsspec.core.url_to_fs(url)[0]
    path = path_of(url) / "a"
    versions = []
    for content in (b"a", b"b", b"b and c"):
        system.pipe_file(f"{url}/a", content)
        assert signature_of([path]) == signature_of([path])
        versions.append(signature_of([path]))
    assert len(set(versions)) == 3


def test_paths_of_this_machine_are_pathlibs(tmp_path: Path) -> None:
    assert path_of(str(tmp_path)) == path_of(f"file://{tmp_path}") == tmp_path
