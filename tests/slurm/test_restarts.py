"""Jobs of the batch script that meet failures end in the state of a run that nothing disturbs."""

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.references import Digests
from tests.slurm.cluster import Cluster
from tests.slurm.job import NUM_ITERATIONS, SlurmJob

Mount = Callable[[str], Path]


def test_killed_rank_restarts_in_the_allocation_and_a_signal_requeues_the_job_with_nothing_lost(
    job: SlurmJob, expected: Digests
) -> None:
    job.submit("--moe-ft-inject-fault", "kill:1@12")
    job.wait_for_iteration(18, start=2)
    job.signal_ranks(signal.SIGSTOP)  # they shall not end before the signal comes
    job.cancel("--batch", "--signal=USR1")
    job.wait_for_line("SIGUSR1: the ranks save the newest state")
    job.signal_ranks(signal.SIGCONT)
    job.release()
    assert job.wait_for_end() == "COMPLETED 0:0"
    killed, requeued = job.targets()
    assert 5 <= killed <= 12 and 18 <= requeued < NUM_ITERATIONS
    assert job.tiers(0) == [{"memory"}] * 2
    assert job.tiers(1) == [{"storage"}] * 2
    assert job.stored() == [requeued, NUM_ITERATIONS]
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_spare_replaces_a_lost_node_and_the_loss_of_the_first_node_requeues_the_job(
    cluster: Cluster, job: SlurmJob, expected: Digests
) -> None:
    job.submit(nodes=3, WAIT_SECONDS="15")  # the ranks start again before SLURM misses the node
    job.wait_for_iteration(8, start=1)
    job.lose_node("node2")
    job.wait_for_iteration(18, start=2)
    assert job.said("node3 replaces node2")
    job.lose_node("node1")  # the batch script ran there
    # As monitoring of nodes reports it: SLURM itself needed 60 to more than 400 s.
    cluster.call("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
    cluster.start_node("node1")
    cluster.start_node("node2")
    job.release()
    assert job.wait_for_end() == "COMPLETED 0:0"
    spare, requeued = job.targets()
    assert 5 <= spare < requeued and 15 <= requeued < NUM_ITERATIONS
    assert job.tiers(0) == [{"memory"}, {"peer"}]
    assert job.tiers(1) == [{"peer"}, {"memory"}]
    assert job.stored() == [NUM_ITERATIONS]
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_spare_takes_over_a_lost_node_in_place_and_the_rank_of_the_other_keeps_its_process(
    job: SlurmJob, expected: Digests
) -> None:
    job.submit(nodes=3, REPAIR="auto", SPARES="1")
    job.wait_for_iteration(8, start=1)
    job.lose_node("node2")
    assert job.wait_for_end() == "COMPLETED 0:0"
    for rank in range(2):
        (repair,) = job.events("repair", rank)
        assert repair["taken_over"] == {"node2": "node3"}
        assert repair["dead_ranks"] == [1]
    assert len({line["pid"] for line in job.events("start", 0)}) == 1
    assert "peer" in job.tiers(0)[1]
    assert not job.said("start 1 on")
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_time_limit_while_storage_is_full_saves_and_requeues_the_job_when_there_is_room(
    cluster: Cluster, job: SlurmJob, expected: Digests, mount_small: Mount
) -> None:
    storage = mount_small("24m")
    (storage / "of_others").write_bytes(bytes(2**24 + 2**22))
    job.submit(PERSIST_DIR=str(storage / "states"))
    job.wait_for_iteration(15, start=1)
    job.signal_ranks(signal.SIGSTOP)
    limit = ["scontrol", "update", f"JobId={job.job_id}"]
    cluster.call(*limit, "TimeLimit=10")  # minutes: as --signal of the script says
    job.wait_for_line("SIGUSR1: the ranks save the newest state")
    job.signal_ranks(signal.SIGCONT)
    job.wait_for_line("exit code 3 (storage lacks the newest state")
    (storage / "of_others").unlink()
    job.wait_for_line("the job goes back to the queue")
    cluster.call(*limit, "TimeLimit=60")
    job.release()
    assert job.wait_for_end() == "COMPLETED 0:0"
    # Where storage is slow they try again more than once, the last time without another iteration.
    *again, requeued = targets = job.targets()
    assert again and targets == sorted(targets) and targets[0] >= 15
    assert [job.tiers(number) for number in range(len(again))] == [[{"memory"}] * 2] * len(again)
    assert job.tiers(-1) == [{"storage"}] * 2
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_next_job_of_a_chain_continues_a_cancelled_one_from_memory_next_to_another_job(
    job: SlurmJob, dataset_flags: list[str], expected: Digests
) -> None:
    options = ["--dependency=singleton", "--job-name=chain", "--nodelist=node1,node2"]
    other = SlurmJob(job.cluster, dataset_flags, job.folder.parent / "other", job.memory_dir)
    job.submit(options=options, RUN_NAME="chain")
    other.submit("--moe-ft-inject-fault", "kill:0@12", options=["--nodelist=node1,node2"])
    first = job.job_id
    job.submit(options=options, RUN_NAME="chain")
    job.wait_for_iteration(8, start=1)
    job.cluster.call("scancel", first)
    assert [other.wait_for_end(), job.wait_for_end()] == ["COMPLETED 0:0"] * 2
    assert job.said("SIGTERM: SLURM ends the job now")
    for each, earliest in ((job, 5), (other, 9)):
        (target,) = each.targets()
        assert target >= earliest
        assert each.tiers(0) == [{"memory"}] * 2
        assert each.digests() == expected
    assert not list(job.memory_dir.glob("*"))


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_job_on_a_full_tmpfs_is_refused_and_runs_when_the_memory_of_a_dead_job_is_gone(
    job: SlurmJob, expected: Digests, mount_small: Mount
) -> None:
    job.memory_dir = mount_small("64m")
    ballast = job.memory_dir / "of_others"
    ballast.write_bytes(bytes(50 * 2**20))
    job.submit(MAX_RESTARTS="1", MAX_REQUEUES="0", PAUSE_SECONDS="1")
    assert job.wait_for_end() == "FAILED 1:0"
    assert job.said("exit code 4 (storage or memory that the start needs cannot be had now)")
    assert job.said("snapshots with their indexes and replicas take")
    ballast.unlink()
    job.submit()
    assert job.wait_for_end() == "COMPLETED 0:0"
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_job_that_failed_while_storage_was_full_is_continued_from_memory_by_the_next_of_its_name(
    job: SlurmJob, expected: Digests, mount_small: Mount
) -> None:
    storage = mount_small("24m")
    (storage / "of_others").write_bytes(bytes(2**24 + 2**22))
    given: dict[str, Any] = {
        "RUN_NAME": "named",
        "PERSIST_DIR": str(storage / "states"),
        "PAUSE_SECONDS": "1",
    }
    options = ["--job-name=named", "--nodelist=node1,node2"]
    job.submit(options=options, MAX_RESTARTS="1", MAX_REQUEUES="0", **given)
    assert job.wait_for_end() == "FAILED 1:0"
    assert job.said("(storage lacks the newest state, memory has it): the ranks start again in 1 s")
    job.cluster.call("sbatch", "--wait", "--nodes=2", "--output=/dev/null", "--wrap=true")
    assert (job.memory_dir / "named").exists()
    (storage / "of_others").unlink()
    job.submit(options=options, **given)
    assert job.wait_for_end() == "COMPLETED 0:0"
    assert job.targets() == [NUM_ITERATIONS] * 2
    assert job.tiers(1) == [{"memory"}] * 2
    assert job.digests() == expected
    assert not (job.memory_dir / "named").exists()


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_memory_of_a_job_that_ends_for_good_is_rescued_for_the_next_one_on_other_nodes(
    job: SlurmJob, expected: Digests
) -> None:
    job.submit("--moe-ft-inject-fault", "kill:1@12", MAX_RESTARTS="0")
    assert job.wait_for_end().startswith("FAILED")
    (rescued,) = job.stored()
    assert 5 <= rescued <= 12
    shutil.rmtree(job.memory_dir / job.job_id)
    job.submit()
    assert job.wait_for_end() == "COMPLETED 0:0"
    assert job.targets() == [rescued]
    assert job.tiers(0) == [{"storage"}] * 2
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_refusal_on_a_node_of_several_ranks_ends_the_job_at_its_first_start(job: SlurmJob) -> None:
    options = ["--ntasks-per-node=2", "--job-name=named"]
    job.submit(
        *("--moe-ft-strategy", "none_such"),
        nodes=1,
        options=options,
        TRAIN_NODES="1",
        RANKS_PER_NODE="2",
        RUN_NAME="named",
    )
    assert job.wait_for_end() == "FAILED 2:0"
    assert not job.said("start again")


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_doctor_examines_the_nodes_of_an_allocation_with_the_flags_of_the_job(
    job: SlurmJob,
) -> None:
    job.submit(CHECK="1")
    job.wait_for_end()
    assert job.said("2 processes of doctor on 2")
    assert re.search(r"^storage read +node2 +PASS ", job.log.read_text(), re.MULTILINE)
    assert not job.said("silent ranks")
