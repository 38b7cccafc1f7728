"""A job whose checkpoints are objects on an S3 server: it recovers from them, and survives that they fail."""

import shutil

import pytest

from moe_ft.files.storage import Storage
from tests.jobs import NUM_ITERATIONS, NUM_RANKS, CheckpointJob
from tests.object_store import object_store
from tests.references import Digests


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_job_that_has_lost_its_memory_recovers_from_objects(
    job: CheckpointJob, expected: Digests
) -> None:
    with object_store() as store:
        url = f"{store.bucket()}/persist"
        flags = ("--moe-ft-persist-dir", url, "--moe-ft-persist-interval", "2")
        with store.failing("SlowDown", "PUT", times=2) as fault:
            job.run(*flags, "--moe-ft-inject-fault", f"kill:1@{NUM_ITERATIONS - 1}:backward")
        assert fault.struck == 2
        newest, *_ = Storage(url).iterations()
        shutil.rmtree(job.memory_dir / "test")
        job.run(*flags).check()
        assert job.recovered() == [(newest, newest)]
        for rank in range(NUM_RANKS):
            assert set(job.events("recovery", rank)[0]["sources"]) == {"storage"}
        assert job.digests() == expected
        assert Storage(url).iterations()[0] == NUM_ITERATIONS


@pytest.mark.rest
def test_job_whose_credentials_have_expired_once_says_so_in_a_line_and_loses_nothing(
    job: CheckpointJob, expected: Digests
) -> None:
    with object_store() as store:
        url = f"{store.bucket()}/persist"
        flags = ("--moe-ft-persist-dir", url, "--moe-ft-persist-interval", "2")
        with store.failing("ExpiredToken", "PUT", part="iter_0000002/rank_00001") as fault:
            result = job.run(*flags).check()
        assert fault.struck > 0
        reasons = [each["reason"] for each in job.events("degraded", 1)]
        (reason,) = [each for each in reasons if "ExpiredToken" in each]
        assert "\n" not in reason and "rank_00001" in reason
        assert sum("ExpiredToken" in line for line in result.output(1).splitlines()) == 1
        assert job.digests() == expected
        assert Storage(url).iterations()[0] == NUM_ITERATIONS
