"""The room that a job needs follows from its plan, and bandwidth is measured to those who keep replicas."""

from pathlib import Path

import pytest

from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig, StorageConfig
from moe_ft.doctor.job import ExaminedJob, place_on_nodes
from moe_ft.doctor.rows import Result
from moe_ft.planning.host_memory import Footprint, MemoryShare

PLANNED = Footprint(share=MemoryShare(region_bytes=10), checkpoint_bytes=100)


def test_room_of_a_planned_job() -> None:
    config = MoeFtConfig(storage=StorageConfig(persist_dir="/x", keep=2))
    job = ExaminedJob(config=config, ranks=(16, 8), footprint=PLANNED)
    assert job.num_nodes == 2
    assert job.node_bytes == 8 * (3 * 10 + 2 * 10)  # three regions, and two of one replica
    assert job.sent_bytes == 8 * 10
    assert job.checkpoint_bytes == 50
    assert (job.num_stored, job.stored_bytes) == (4, 400)


def test_job_that_is_not_planned_needs_an_unknown_room() -> None:
    job = ExaminedJob(ranks=(16, 8))
    rooms = (job.node_bytes, job.sent_bytes, job.checkpoint_bytes, job.stored_bytes)
    assert rooms == (None, None, None, None)


@pytest.mark.parametrize(
    ("repair", "num_nodes", "result", "found"),
    [
        (
            "off",
            3,
            Result.PASS,
            "1, 2 nodes train: without --moe-ft-repair auto the loss of a node restarts",
        ),
        ("auto", 2, Result.WARN, "none, 2 nodes train: the loss of a node ends the job"),
        (
            "auto",
            4,
            Result.PASS,
            "2, 2 nodes train: of all but the first, 2 can be lost in turn, 1 at once",
        ),
    ],
)
def test_spares_are_the_nodes_beyond_those_that_train(
    repair: str, num_nodes: int, result: Result, found: str
) -> None:
    config = MoeFtConfig(recovery=RecoveryConfig(repair=repair))
    row = ExaminedJob(config=config, ranks=(16, 8)).spare_row(num_nodes)
    assert (row.result, row.found[: len(found)]) == (result, found)


def test_peers_are_the_nodes_that_replicas_go_to() -> None:
    nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert place_on_nodes(ExaminedJob(), nodes)[0]["a"] == ["b", "c"]
    assert place_on_nodes(ExaminedJob(num_stages=2), nodes)[0]["a"] == ["b", "c"]
    config = MoeFtConfig(memory=MemoryConfig(replication_factor="1"))
    two_stages = ExaminedJob(config=config, num_stages=2)
    expected = {"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]}
    assert place_on_nodes(two_stages, nodes)[0] == expected


def test_node_that_is_alone_has_no_peers() -> None:
    assert place_on_nodes(ExaminedJob(), ["a", "a"])[0] == {"a": []}


@pytest.mark.parametrize(
    ("nodes", "factor", "remedy"),
    [(["a", "a"], "auto", "several nodes"), (["a", "b"], "0", "--moe-ft-replication-factor 1")],
)
def test_memory_that_survives_no_lost_node_is_a_warning(
    nodes: list[str], factor: str, remedy: str
) -> None:
    config = MoeFtConfig(memory=MemoryConfig(replication_factor=factor))
    _, row = place_on_nodes(ExaminedJob(config=config), nodes)
    assert row.result is Result.WARN
    assert "the loss of no node" in row.found
    assert row.remedy == f"Use {remedy}: copies go to other nodes."


@pytest.mark.parametrize(
    ("racks", "peers", "result", "found"),
    [
        ("", ["b"], Result.PASS, "any one node; failure domains are not known"),
        ("a x\nb x\nc y\nd y\n", ["c"], Result.PASS, "any one node; any one failure domain"),
        ("a x\nb x\nc x\nd x\n", ["b"], Result.WARN, "any one node; no failure domain"),
        ("a x\nb x\nc\n", ["b"], Result.FAIL, "line 3 is 'c'"),
        ("a x\nb x\nc y\n", ["b"], Result.FAIL, "does not know d (1 of 4)"),
    ],
)
def test_row_says_which_failures_memory_survives(
    racks: str, peers: list[str], result: Result, found: str, tmp_path: Path
) -> None:
    (tmp_path / "racks").write_text(racks)
    given = str(tmp_path / "racks") if racks else None
    memory = MemoryConfig(replication_factor="1", failure_domain=given)
    sent_to, row = place_on_nodes(
        ExaminedJob(config=MoeFtConfig(memory=memory)), ["a", "b", "c", "d"]
    )
    assert sent_to["a"] == peers
    assert row.result is result
    assert found in row.found
    assert bool(row.remedy) == (result is not Result.PASS)


@pytest.mark.parametrize(
    ("nodes", "ranks", "result", "found"),
    [
        (
            "abcd",
            (4, 1),
            Result.PASS,
            "groups of 4 nodes keep parity; memory survives the loss of one",
        ),
        ("a", (4, 1), Result.WARN, "--moe-ft-replicas=parity:4: "),
        ("aabcd", (4, 1), Result.FAIL, "parity needs as many ranks on each node"),
    ],
)
def test_job_with_parity_is_told_what_parity_covers_and_nothing_of_replicas(
    nodes: str, ranks: tuple[int, int], result: Result, found: str
) -> None:
    config = MoeFtConfig(memory=MemoryConfig(replicas="parity:4"))
    job = ExaminedJob(config=config, ranks=ranks)
    sent_to, row = place_on_nodes(job, list(nodes))
    assert (row.result, job.kept_by_peers) == (result, "stripes of parity")
    assert found in row.found
    assert "copies go" not in row.remedy
    assert sent_to["a"] == (["b", "c", "d"] if result is Result.PASS else [])
