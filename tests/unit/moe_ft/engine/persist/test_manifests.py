"""Manifests on storage: what makes files a checkpoint, and of which run."""

from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.persist.manifests import (
    find_manifests,
    manifests,
    missing_indexes,
    read_manifest,
    write_manifest,
)
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, file_tag, iteration_directory
from moe_ft.format.identity import Identity
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint, persist_rank
from tests.unit.moe_ft.engine.persist.checkpoints import LOCAL

RUN, OTHER = make_identity(world_size=2), make_identity("run-b", world_size=2)
DIRECTORY = iteration_directory(5)


@pytest.fixture(autouse=True)
def root(storage: Storage) -> None:
    storage.make_root()


def test_manifest_needs_the_index_of_every_rank(storage: Storage) -> None:
    persist_rank(storage, 0, 5, RUN)
    with pytest.raises(OSError):
        write_manifest(storage, 5, file_tag(RUN), 2)
    assert find_manifests(storage, 5) == []


def test_manifest_of_another_run_is_beside_that_of_the_first(storage: Storage) -> None:
    first, second = (persist_checkpoint(storage, 5, each) for each in (RUN, OTHER))
    paths = find_manifests(storage, 5)
    assert paths == [f"{DIRECTORY}/manifest.json", f"{DIRECTORY}/manifest_run-b.json"]
    assert [read_manifest(storage, path) for path in paths] == [first, second]


@pytest.mark.parametrize("identity", [RUN, OTHER], ids=["first", "second"])
def test_manifest_of_a_run_replaces_only_its_own(storage: Storage, identity: Identity) -> None:
    for each in (RUN, OTHER, identity):
        persist_checkpoint(storage, 5, each)
    assert len(find_manifests(storage, 5)) == 2


@LOCAL
def test_manifests_are_found_newest_first_and_corrupt_ones_as_errors(storage: Storage) -> None:
    for iteration in (5, 11, 8):
        persist_checkpoint(storage, iteration, RUN)
    (Path(storage.url) / iteration_directory(8) / "manifest.json").write_bytes(b"{")
    found = list(manifests(storage))
    assert [iteration for iteration, _, _ in found] == [11, 8, 5]
    assert [isinstance(each, CorruptStateError) for _, _, each in found] == [False, True, False]


@LOCAL
def test_index_of_another_rank_does_not_belong_to_the_checkpoint(storage: Storage) -> None:
    for rank in (0, 1):
        persist_rank(storage, rank, 5, RUN)
    first, second = sorted((Path(storage.url) / DIRECTORY).glob("rank_*.json"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptStateError, match="does not belong to this checkpoint"):
        write_manifest(storage, 5, file_tag(RUN), 2)


def test_indexes_of_many_ranks_are_looked_for_in_one_listing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks, tag, looks = 40, file_tag(RUN), list[str]()

    def counted(name: str) -> None:
        original = getattr(Storage, name)

        def act(*given: Any) -> Any:
            looks.append(name)
            return original(*given)

        monkeypatch.setattr(Storage, name, act)

    counted("names_in")
    counted("exists")
    assert missing_indexes(storage, 5, tag, range(num_ranks)) == set(range(num_ranks))
    for rank in range(20):
        persist_rank(storage, rank, 5, RUN)
    looks.clear()
    assert missing_indexes(storage, 5, tag, range(num_ranks)) == set(range(20, num_ranks))
    assert looks == ["names_in"]


def test_index_that_a_store_lists_late_is_there(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    persist_rank(storage, 0, 5, RUN)
    monkeypatch.setattr(Storage, "names_in", lambda *_: [])
    assert missing_indexes(storage, 5, file_tag(RUN), [0, 1]) == {1}
