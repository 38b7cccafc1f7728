"""Choosing the state to convert, and refusing what cannot be converted."""

import re
import threading
import time
from pathlib import Path

import pytest

from moe_ft.convert.source import open_source
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.recovery.job_memory import alive_lock
from tests.unit.moe_ft.builders import fill_region, fill_window, make_identity, persist_window
from tests.unit.moe_ft.convert.models import persist_model


def test_newest_checkpoint_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    for iteration in (4, 8):
        persist_model(Storage(str(tmp_path)), iteration)
    assert open_source(str(tmp_path)).iteration == 8
    assert open_source(str(tmp_path), 4).iteration == 4
    assert open_source(str(tmp_path / "iter_0000004")).iteration == 4


def test_iteration_that_is_not_there_is_refused(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=r"--iteration=5: .* It has iterations \[4\]"):
        open_source(str(checkpoints), 5)


def test_damaged_newest_checkpoint_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    for iteration in (4, 8):
        persist_model(Storage(str(tmp_path)), iteration)
    (tmp_path / "iter_0000008/manifest.json").write_text("{}")
    with pytest.raises(CorruptStateError, match="iter_0000008.*--iteration names another"):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path), 4).iteration == 4


def test_checkpoint_that_never_became_complete_is_named(checkpoints: Path) -> None:
    (checkpoints / "iter_0000004/manifest.json").unlink()
    with pytest.raises(
        ConfigError, match="iter_0000004 is incomplete: it has no manifest. The job"
    ):
        open_source(str(checkpoints))


@pytest.mark.parametrize(
    ("kind", "num_lost", "message"),
    [
        ("safetensors", 9, "has .*bytes, not"),
        ("json", 9, "is not the index that the manifest names"),
        ("json", None, "No such file"),
    ],
)
def test_file_that_is_damaged_or_gone_is_named_with_the_remedy(
    kind: str, num_lost: int | None, message: str, checkpoints: Path
) -> None:
    path = next((checkpoints / "iter_0000004").glob(f"rank_*.{kind}"))
    if num_lost is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-num_lost])
    with pytest.raises(CorruptStateError) as refusal:
        open_source(str(checkpoints))
    assert re.search(rf"{message}.*--iteration names", str(refusal.value))
    assert path.name in str(refusal.value)


def test_every_index_is_read_once_and_no_other_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (4, 8):
        persist_model(Storage(str(tmp_path)), iteration)
    read, paths = Storage.read, list[str]()

    def note(self: Storage, path: str, *args: int) -> bytes:
        paths.append(path)
        return read(self, path, *args)

    monkeypatch.setattr(Storage, "read", note)
    open_source(str(tmp_path))
    indexes = [path for path in paths if "rank_" in path and path.endswith(".json")]
    assert len(indexes) == len(set(indexes)) == 4
    assert all(path.startswith("iter_0000008/") for path in indexes)


def test_window_is_refused_with_the_reason(tmp_path: Path) -> None:
    persist_window(Storage(str(tmp_path)), 6, make_identity())
    with pytest.raises(
        ConfigError, match="window of 3 snapshots: its units are of iterations 4 to 6"
    ):
        open_source(str(tmp_path))
    region, _ = fill_window(tmp_path / "memory/job/node/rank_00000")
    region.close()
    with pytest.raises(ConfigError, match="window of 3 snapshots"):
        open_source(str(tmp_path / "memory"))


def test_directory_that_a_job_writes_to_is_refused(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = StorageLock(Storage(str(checkpoints)))
    assert lock.take("other", None)
    seen = lock.look()
    ended = threading.Event()

    def sleep(_: float) -> None:
        lock.renew()
        ended.set()

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(ConfigError, match="and job 'other' on .* writes there"):
        open_source(str(checkpoints))
    assert ended.is_set()
    assert seen != lock.look()


def test_memory_of_all_ranks_is_one_state(tmp_path: Path) -> None:
    who = make_identity(world_size=2)
    for rank, name in enumerate(("rank_00000", "replica_00001_at_00000")):
        region, _ = fill_region(tmp_path / "job/node" / name, rank=rank, identity=who)
        region.close()
    found = open_source(str(tmp_path))
    assert (found.iteration, [each.index.rank for each in found.ranks]) == (5, [0, 1])


def test_memory_without_some_rank_is_refused(tmp_path: Path) -> None:
    who = make_identity(world_size=2)
    region, _ = fill_region(tmp_path / "job/node/rank_00000", identity=who)
    region.close()
    with pytest.raises(ConfigError, match=r"lacks the state of ranks \[1\] at iteration 5"):
        open_source(str(tmp_path))


def test_memory_of_a_job_that_runs_is_refused(tmp_path: Path) -> None:
    node = tmp_path / "job/node"
    region, _ = fill_region(node / "rank_00000")
    region.close()
    with alive_lock(node, 0), pytest.raises(ConfigError, match="a process of job job runs"):
        open_source(str(tmp_path))
