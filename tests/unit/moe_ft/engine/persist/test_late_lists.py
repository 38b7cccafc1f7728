"""Stores that list objects late: what was written is read by its name, and nothing of it is deleted."""

import pytest

from moe_ft.engine.persist.manifests import find_manifests
from moe_ft.engine.persist.retention import Retention
from moe_ft.engine.persist.soundness import Listings, check_checkpoint
from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint
from tests.unit.moe_ft.engine.persist.checkpoints import manifest_path

RUN, OTHER = make_identity(world_size=2), make_identity("run-b", world_size=2)


@pytest.fixture
def objects(s3: ObjectStore) -> Storage:
    return Storage(f"{s3.bucket()}/persist")


def test_manifest_that_is_not_listed_is_found_by_its_name(
    objects: Storage, s3: ObjectStore
) -> None:
    persist_checkpoint(objects, 5, RUN)
    with s3.listing_late("iter_0000005"):
        assert find_manifests(objects, 5) == [manifest_path(5)]
        assert find_manifests(objects, 4) == []


def test_files_of_an_older_checkpoint_whose_manifest_is_not_listed_stay(
    objects: Storage, s3: ObjectStore
) -> None:
    older, newest = persist_checkpoint(objects, 4, RUN), persist_checkpoint(objects, 5, RUN)
    with s3.listing_late("iter_0000004/manifest"):
        Retention(objects, 2).retain(newest)
    for each in (older, newest):
        check_checkpoint(objects, each, Listings(objects))


def test_files_of_the_newest_checkpoint_stay_whatever_name_its_manifest_has(
    objects: Storage, s3: ObjectStore
) -> None:
    persist_checkpoint(objects, 5, RUN)
    newest = persist_checkpoint(objects, 5, OTHER)
    with s3.listing_late("manifest_run-b"):
        Retention(objects, 1).retain(newest)
    check_checkpoint(objects, newest, Listings(objects))
