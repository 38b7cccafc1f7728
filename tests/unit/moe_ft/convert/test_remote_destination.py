"""A destination in an object store: a whole checkpoint or none, and an interruption is continued."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load

from moe_ft.convert import destination as destinations
from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.convert.destination import RemoteDestination
from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.storage_lock import LOCK_NAME
from moe_ft.errors import ConfigError, CorruptStateError, LockLostError
from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore

MARKERS = {
    "safetensors": "model.safetensors.index.json",
    "torch_dist": "latest_checkpointed_iteration.txt",
}


def files(url: str) -> dict[str, bytes]:
    """Return the objects below a URL by name."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return {
        path.removeprefix(f"{root}/"): system.cat_file(path)
        for path in (system.find(root) if system.exists(root) else [])
    }


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_lock, "_SETTLE_S", 0.0)
    monkeypatch.setattr(storage_lock, "_LOOK_POLL_S", 0.02)


@pytest.fixture
def request_(checkpoints: Path, s3: ObjectStore) -> ConversionRequest:
    """Return a conversion into a new place of the store, in several shards."""
    url = f"{s3.bucket()}/some/dst"
    return ConversionRequest(
        source=str(checkpoints), destination=url, to="safetensors", shard_bytes=1000
    )


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int, kind: type[BaseException]) -> None:
    """Have a conversion end with an error at the upload of a number."""
    upload, left = RemoteDestination._upload, iter(range(number))

    def fail(self: RemoteDestination, path: Path) -> Any:
        if next(left, None) is None:
            raise kind("on purpose")
        return upload(self, path)

    monkeypatch.setattr(RemoteDestination, "_upload", fail)


@pytest.mark.parametrize("to", MARKERS)
def test_store_gets_the_same_files_as_a_folder(
    to: str, request_: ConversionRequest, tmp_path: Path
) -> None:
    request = replace(request_, to=to)
    assert f"{request.destination}: iteration 4 as {to}" in convert(request)
    folder = tmp_path / "folder"
    convert(replace(request, destination=str(folder)))
    local = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    found = files(request.destination)
    assert found.keys() == local.keys()
    assert {name: found[name] for name in found if "safetensors" in name} == {
        name: local[name] for name in local if "safetensors" in name
    }


@pytest.mark.parametrize(
    ("to", "number"), [("safetensors", 0), ("safetensors", 2), ("torch_dist", -1)]
)
def test_interrupted_conversion_is_no_checkpoint_and_continues(
    to: str,
    number: int,
    request_: ConversionRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    request = replace(request_, to=to)
    expected = request.destination + "_expected"
    convert(replace(request, destination=expected))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, number if number >= 0 else len(files(expected)) - 1, KeyboardInterrupt)
        convert(request)
    before = files(request.destination)
    assert "conversion.json" in before
    assert MARKERS[to] not in before
    uploaded: list[str] = []
    upload = RemoteDestination._upload
    monkeypatch.setattr(
        RemoteDestination,
        "_upload",
        lambda self, path: uploaded.append(path.name) or upload(self, path),  # type: ignore[func-returns-value]
    )
    convert(request)
    assert files(request.destination).keys() == files(expected).keys()
    noted = json.loads(before["conversion.json"])["shards"].values()
    assert not {Path(each["path"]).name for each in noted} & set(uploaded)
    assert bool(noted) == (number != 0)
    assert uploaded[-1] == MARKERS[to]


@pytest.mark.parametrize("is_gone", [True, False])
def test_shard_that_is_gone_or_written_again_is_uploaded_again(
    is_gone: bool, request_: ConversionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 2, KeyboardInterrupt)
        convert(request_)
    (name, _) = sorted(name for name in files(request_.destination) if "model-" in name)
    url = f"{request_.destination}/{name}"
    if is_gone:
        fsspec.core.url_to_fs(url)[0].rm(url)
    else:
        spoil(url)
    convert(request_)
    assert load(files(request_.destination)[name])


def test_error_of_the_store_leaves_what_the_same_command_continues(
    request_: ConversionRequest, s3: ObjectStore
) -> None:
    with (
        s3.failing("AccessDenied", "PUT", part="model-00003"),
        pytest.raises(
            ConfigError, match=r"DST=s3://.*could not be written .*the same command continues it"
        ),
    ):
        convert(request_)
    assert {"conversion.json", "model-00001-of-00005.safetensors"} <= files(
        request_.destination
    ).keys()
    assert "verified" in convert(request_)


def test_error_of_the_source_leaves_nothing(
    request_: ConversionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 2, CorruptStateError)
    with pytest.raises(CorruptStateError, match="on purpose"):
        convert(request_)
    assert files(request_.destination) == {}


def spoil(url: str) -> None:
    """Change what is in a store behind somebody's back."""
    system, path = fsspec.core.url_to_fs(url)
    content = system.cat_file(path)
    system.pipe_file(path, content[:-1] + bytes([content[-1] ^ 1]))


def test_object_that_is_not_what_was_uploaded_is_found(
    request_: ConversionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Storage.write

    def write_wrongly(self: Any, path: str, pieces: Any) -> None:
        write(self, path, pieces)
        spoil(f"{self.url}/{path}")

    monkeypatch.setattr(Storage, "write", write_wrongly)
    with pytest.raises(CorruptStateError, match=r"model-0000.* is not what was uploaded"):
        convert(request_)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"mine", "must be new, but something is there"),
        ("conversion.json", b"{", "holds that of something else"),
    ],
)
def test_place_of_others_is_left_alone(
    name: str, content: bytes, message: str, request_: ConversionRequest
) -> None:
    url = request_.destination
    fsspec.core.url_to_fs(url)[0].pipe_file(f"{url}/{name}", content)
    with pytest.raises(ConfigError, match=message):
        convert(request_)
    assert files(url) == {name: content}


def begin(request: ConversionRequest, plan: str = "plan") -> RemoteDestination:
    """Return the destination of a conversion, checked."""
    destination = RemoteDestination(request.destination, plan, plan, 1000)
    destination.check(1)
    return destination


@pytest.mark.parametrize("plan", ["plan", "other"])
def test_conversion_that_is_started_twice_is_refused_while_the_first_lives(
    plan: str, request_: ConversionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_lock, "LOCK_RENEWAL_S", 0.01)
    first, second = begin(request_), begin(request_, plan)
    with first.writing():
        with (
            pytest.raises(ConfigError, match=r"DST=s3://.* is being written by job 'convert' on"),
            second.writing(),
        ):
            pass
        assert "conversion.json" in files(request_.destination)
    assert files(request_.destination) == {}


def test_conversion_that_was_killed_is_continued_and_leaves_no_files_here(
    request_: ConversionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = begin(request_)
    writing = killed.writing()
    writing.__enter__()
    killed._lock.close()  # as the end of its process does
    (killed.work / "shard").write_text("left")
    monkeypatch.setattr(destinations, "LOCK_STALE_S", 0.1)
    again = begin(request_)
    with again.writing():
        assert again.work == killed.work
        assert not list(again.work.iterdir())
    assert not again.work.exists()
    with pytest.raises(LockLostError):  # it wakes up after all
        writing.__exit__(None, None, None)


def test_conversion_that_lost_its_place_ends_and_removes_nothing(
    request_: ConversionRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = begin(request_)
    with pytest.raises(LockLostError, match="another conversion has taken over"), stopped.writing():
        stopped._lock.close()
        monkeypatch.setattr(destinations, "LOCK_STALE_S", 0.1)
        other = begin(request_)
        writing = other.writing()
        writing.__enter__()
        stopped.note("0", {"file": "shard"})
    assert {"conversion.json", LOCK_NAME} == files(request_.destination).keys()
    writing.__exit__(None, None, None)
    assert not files(request_.destination)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket", "must be a new place in a bucket"),
        ("nosuch://user:secret@host/x", "URL=nosuch://... must hold no password"),
    ],
)
def test_url_that_names_no_place_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RemoteDestination(url, "plan", "it", 1000)


def test_too_little_room_for_files_on_their_way_is_found_first(request_: ConversionRequest) -> None:
    destination = RemoteDestination(request_.destination, "plan", "it", 1 << 60)
    with pytest.raises(ConfigError, match="bytes free, and files on their way to DST=s3://"):
        destination.check(1 << 60)


def test_url_of_a_folder_is_that_folder(checkpoints: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'out'}"
    convert(ConversionRequest(source=str(checkpoints), destination=url, to="safetensors"))
    assert (tmp_path / "out" / MARKERS["safetensors"]).exists()
