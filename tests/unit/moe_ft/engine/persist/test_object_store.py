"""Storage on a real S3 server: what its failures leave, and that they count as failures of storage."""

import random

import fsspec
import pytest

from moe_ft.engine.persist.manifests import find_manifests
from moe_ft.files.storage import Storage
from tests.object_store import CODES, CUT, ObjectStore
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations, save

TWO_RANKS = make_identity(world_size=2)


@pytest.fixture
def stored(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Return a persist directory with checkpoints 1 and 2, in which failed requests are tried again once."""
    monkeypatch.setattr("moe_ft.files.object_store.TRIES_S", 1.0)
    storage = Storage(f"{s3.bucket()}/persist")
    for iteration in (1, 2):
        save(storage, iteration, TWO_RANKS, 2)
    return storage


@pytest.mark.parametrize("code", [*CODES, CUT])
def test_failed_upload_is_an_error_of_storage_and_leaves_no_checkpoint(
    stored: Storage, s3: ObjectStore, code: str
) -> None:
    with s3.failing(code, "PUT", "POST") as fault, pytest.raises(OSError):
        persist_checkpoint(stored, 3, TWO_RANKS)
    assert fault.struck
    assert complete_iterations(stored) == [2, 1]
    save(stored, 3, TWO_RANKS, 2)
    assert complete_iterations(stored) == [3, 2]


@pytest.mark.parametrize("code", [*CODES, CUT])
def test_storage_that_cannot_be_read_never_seems_empty(
    stored: Storage, s3: ObjectStore, code: str
) -> None:
    for look in (
        stored.iterations,
        lambda: find_manifests(stored, 2),
        lambda: stored.exists("iter_0000002/manifest.json"),
        lambda: stored.sizes_in("iter_0000002"),
    ):
        with s3.failing(code, "GET", "HEAD") as fault, pytest.raises(OSError):
            look()
        assert fault.struck
    assert complete_iterations(stored) == [2, 1]


@pytest.mark.parametrize("code", ["SlowDown", CUT])
def test_request_that_fails_now_and_then_is_made_again(
    stored: Storage, s3: ObjectStore, code: str
) -> None:
    with s3.failing(code, "PUT", times=1) as fault:
        persist_checkpoint(stored, 3, TWO_RANKS)
    assert fault.struck == 1
    assert complete_iterations(stored) == [3, 2, 1]


def test_large_file_goes_up_in_parts_and_comes_back(s3: ObjectStore) -> None:
    storage = Storage(f"{s3.bucket()}/persist")
    content = bytes(range(256)) * (60 << 12)  # 60 MiB: more than one part of an upload
    storage.write("iter_0000001/file", [memoryview(content)])
    assert storage.size("iter_0000001/file") == len(content)
    assert storage.read("iter_0000001/file", 5, 1000) == content[5:1005]
    assert storage.with_patience(60.0).read("iter_0000001/file") == content


def test_upload_in_parts_that_fails_leaves_nothing_to_see(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.files.object_store.TRIES_S", 1.0)
    storage = Storage(f"{s3.bucket()}/persist")
    content = memoryview(bytes(60 << 20))
    with s3.failing("InternalError", "PUT", part="partNumber=") as fault, pytest.raises(OSError):
        storage.write("iter_0000001/file", [content])
    assert fault.struck
    assert not storage.exists("iter_0000001/file")
    assert storage.iterations() == []


def test_requests_and_their_repetition_draw_no_random_number_of_training(s3: ObjectStore) -> None:
    before = random.getstate()
    storage = Storage(f"{s3.bucket()}/persist")
    with s3.failing("SlowDown", times=3) as fault:
        persist_checkpoint(storage, 1, TWO_RANKS)
    assert fault.struck == 3
    assert complete_iterations(storage) == [1]
    assert random.getstate() == before


def test_finalizer_on_the_thread_that_serves_a_store_does_not_wait_for_itself(
    stored: Storage,
) -> None:
    patient, errors = stored.with_patience(30.0), list[OSError]()

    async def finalize() -> None:
        try:
            patient.exists("moe_ft.lock")
        except OSError as error:
            errors.append(error)

    fsspec.asyn.sync(fsspec.asyn.get_loop(), finalize)
    assert [str(each).partition(" is ")[2] for each in errors] == [
        "asked for by the thread that is to serve it"
    ]
    assert not patient.exists("moe_ft.lock")
