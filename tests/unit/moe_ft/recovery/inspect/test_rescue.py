"""Rescue writes what is complete and nothing else, and says what is missing."""

from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.engine.memory.job_directory import job_lock, own_directory, replica_directory
from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.files.storage import Storage
from moe_ft.recovery.inspect import rescue as module
from moe_ft.recovery.inspect.holdings import StateInMemory
from moe_ft.recovery.job_memory import alive_lock
from tests.jobs import flip_byte
from tests.unit.moe_ft.builders import fill_region, make_identity, manifest_of
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.recovery.jobs import leave_job

RUN = make_identity(world_size=2)
BRANCH = make_identity(world_size=2, history=((0, 0), (1, 2)))  # continues iteration 2
DONE, INCOMPLETE, REFUSED = 0, 1, 2


class Job:
    """Memory of a dead job of two ranks, one a node."""

    def __init__(self, folder: Path) -> None:
        self.memory, self.storage = folder / "memory", Storage(str(folder / "storage"))
        self.directory = leave_job(self.memory, "job")
        (self.directory / "node0" / "rank_00000" / "region_0.safetensors").unlink()

    def own(self, rank: int, iteration: int, number: int = 0, identity: object = RUN) -> Path:
        """Leave a rank's own state."""
        where = own_directory(self.directory / f"node{rank}", rank)
        return self._fill(where, rank, iteration, number, identity)

    def replica(self, rank: int, iteration: int, number: int = 0) -> Path:
        """Leave the state of a rank at the other one."""
        where = replica_directory(self.directory / f"node{1 - rank}", rank, 1 - rank)
        return self._fill(where, rank, iteration, number, RUN)

    def _fill(self, where: Path, rank: int, iteration: int, number: int, identity: object) -> Path:
        where.mkdir(parents=True, exist_ok=True)
        region, _ = fill_region(where, number, rank=rank, iteration=iteration, identity=identity)  # type: ignore[arg-type]
        return region.data_path

    def rescue(self, *words: str) -> int:
        places = ("--memory-dir", str(self.memory), "--to", self.storage.url)
        return main(["rescue", "job", *places, *words])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_newest_state_that_all_ranks_have_is_written(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.own(0, 4), job.own(0, 5, 1), job.own(1, 4)
    assert job.rescue() == DONE
    assert complete_iterations(job.storage) == [4]
    said = capsys.readouterr().out
    assert "iteration 5 is not complete: of 2 ranks, the state of 1 is missing: 1" in said
    assert f"{job.storage.url}/iter_0000004 is a checkpoint of iteration 4" in said
    assert job.rescue() == DONE
    assert "has iteration 4 of this run already" in capsys.readouterr().out


def test_copy_of_a_peer_takes_the_place_of_what_is_lost_or_damaged(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_byte(job.own(0, 5), -1)
    job.replica(0, 5), job.replica(1, 5)
    assert job.rescue() == DONE
    said = capsys.readouterr().out
    assert "rank_00000/region_0.json: " in said and "does not match its checksum" in said
    assert said.count("from replica") == 2
    assert complete_iterations(job.storage) == [5]


def test_state_of_the_latest_start_comes_first(job: Job) -> None:
    job.own(0, 9), job.own(1, 9)
    job.own(0, 3, 1, BRANCH), job.own(1, 3, 1, BRANCH)
    assert job.rescue() == DONE
    assert complete_iterations(job.storage) == [3]
    assert manifest_of(job.storage, 3).identity == BRANCH


@pytest.mark.parametrize("has_replica", [False, True])
def test_without_a_part_nothing_becomes_a_checkpoint(
    has_replica: bool, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_byte(job.own(1, 5), -1)
    if has_replica:
        job.replica(0, 5)
    assert job.rescue() == INCOMPLETE
    assert complete_iterations(job.storage) == []
    said = capsys.readouterr().out
    assert f"is missing: {'1' if has_replica else '0, 1'}" in said
    assert "Run the same command on the other nodes" in said


def test_other_node_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.own(0, 5)
    looks: list[set[int]] = []
    missing = module._missing

    def look(state: StateInMemory, storage: Storage) -> set[int]:
        looks.append(missing(state, storage))
        if len(looks) == 3:
            job.own(1, 5)
            other = Storage(storage.url)
            worker = PersistWorker(job.directory, other, 1)
            (found,) = [each for each in module._states(job.directory)]
            module._write_rank(found, 1, worker)
        return looks[-1]

    monkeypatch.setattr(module, "_missing", look)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    assert job.rescue("--wait", "60") == DONE
    assert looks[0] == looks[2] == {1}
    assert complete_iterations(job.storage) == [5]


def refusal(job: Job, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert job.rescue(*words) == REFUSED
    assert not job.storage.names() or job.storage.names() == [storage_lock.LOCK_NAME]
    return capsys.readouterr().err


def test_job_that_lives_is_left_alone(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.own(0, 5)
    with alive_lock(job.directory / "node0", 0):
        assert "JOB=job runs on this machine" in refusal(job, capsys)
    with job_lock(job.directory).acquire():
        assert "or starts or ends" in refusal(job, capsys)


def test_place_that_another_job_writes_to_is_left_alone(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.own(0, 5), job.own(1, 5)
    monkeypatch.setattr(storage_lock, "LOCK_RENEWAL_S", 0.01)
    monkeypatch.setattr(storage_lock, "_LOOK_POLL_S", 0.05)
    job.storage.make_root()
    lock = StorageLock(job.storage)
    assert lock.take("other", None)
    lock.start(print)
    try:
        assert "is being written by job 'other' on" in refusal(job, capsys)
    finally:
        lock.close()
    monkeypatch.setattr(module, "LOCK_STALE_S", 0.1)
    assert job.rescue() == DONE, "of a job that has died"


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_time_that_is_none_is_refused(
    value: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--wait={float(value)} must be" in refusal(job, capsys, "--wait", value)


def test_job_without_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rescue", "other", "--memory-dir", str(tmp_path), "--to", str(tmp_path / "storage")]
    assert main(words) == REFUSED
    assert "JOB=other has no memory" in capsys.readouterr().err
    assert not (tmp_path / "storage").exists()


def test_url_with_a_password_is_refused_and_not_shown(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.own(0, 5), job.own(1, 5)
    words = ["rescue", "job", "--memory-dir", str(job.memory)]
    assert main([*words, "--to", "memory://user:secret@host/rescued"]) == REFUSED
    said = capsys.readouterr()
    assert "=memory://... must hold no password" in said.err
    assert "secret" not in said.out + said.err
