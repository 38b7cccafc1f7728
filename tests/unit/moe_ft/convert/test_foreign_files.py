"""Files of others stay inside of their folder, are opened without waiting, and are read within limits."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from moe_ft.convert.foreign_files import place_in, read_json, read_range, read_whole
from moe_ft.errors import ConfigError, CorruptStateError


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/b", "..", ".", "", "a\0", 5, ["a"]])
def test_name_that_leads_out_of_the_folder_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index names the file .* must name files of its own"):
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
    with pytest.raises(ConfigError, match=r"model/out is a link to .*mine, and must stay"):
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
    with pytest.raises(CorruptStateError, match=f"file must be a regular file, and is {kind}"):
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
        (b"[]", "must hold a JSON object, and holds a list"),
        (b" " * (1 << 20) + b"{}", f"must have at most {1 << 20} bytes"),
    ],
)
def test_json_that_is_no_object_within_limits_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CorruptStateError, match=f"x.json {message}"):
        read_json(tmp_path / "x.json", 1 << 20)
