"""Two nodes that fail together: their state is in memory where replicas are in other failure domains."""

import shutil

import pytest

from tests.jobs import CheckpointJob

NODES = ("n0", "n1", "n2", "n3")
LOST = ("n0", "n1")
FLAGS = ("--moe-ft-replication-factor", "1")


def lose_rack(job: CheckpointJob, *flags: str) -> None:
    """Run a job of four nodes, lose two of them with their memory in iteration 4, and start it again."""
    job.set_model(4, {"ep": 2})

    def lose_the_other(start: int) -> None:
        shutil.rmtree(job.memory_dir / "test" / LOST[1])

    job.run_with_faults(
        f"lose-node:{NODES.index(LOST[0])}@4:backward",
        flags=(*FLAGS, *flags),
        nodes=lambda start: NODES,
        between=lose_the_other,
        max_restarts=1,
    )
    assert job.digests() == job.reference()


def test_loss_of_a_failure_domain_is_recovered_from_memory(job: CheckpointJob) -> None:
    racks = job.folder / "racks"
    racks.write_text("".join(f"{node} {'a' if node in LOST else 'b'}\n" for node in NODES))
    lose_rack(job, "--moe-ft-failure-domain", str(racks))
    assert job.recovered() in ([(3, 3)], [(4, 4)])
    for rank, node in enumerate(NODES):
        (line,) = job.events("recovery", rank)
        assert [*line["sources"]] == ["peer" if node in LOST else "memory"]


@pytest.mark.rest
def test_same_loss_without_domains_leaves_nothing(job: CheckpointJob) -> None:
    with pytest.raises(
        AssertionError, match=r"none of it can be used: .* no state of rank 0 in any"
    ):
        lose_rack(job)
