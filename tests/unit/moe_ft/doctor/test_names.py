"""Names of nodes must be unique and stable, nodes must run as many ranks as planned, a job needs a name."""

import pytest

from moe_ft.config.config import MemoryConfig
from moe_ft.doctor.ranks import check_job, check_names, check_ranks
from moe_ft.doctor.rows import Result
from tests.unit.moe_ft.doctor.everyone import facts_of


def test_nodes_with_names_of_their_own_pass() -> None:
    (row,) = check_names([facts_of(0), facts_of(1), facts_of(2, node="n1", boot="boot1")], {})
    assert (row.result, row.where) == (Result.PASS, "n0, n1")


def test_name_that_two_machines_have_fails() -> None:
    (row,) = check_names([facts_of(0, node="gpu"), facts_of(1, node="gpu")], {})
    assert (row.result, row.where) == (Result.FAIL, "gpu")
    assert "2 machines have this name" in row.found


def test_two_names_of_one_machine_are_warned_of() -> None:
    (row,) = check_names([facts_of(0), facts_of(1, boot="boot0")], {})
    assert (row.result, row.where) == (Result.WARN, "n0, n1")


def test_name_that_cannot_be_used_fails() -> None:
    rows = check_names([facts_of(0, node_problem="a/b must be a name")], {})
    assert (rows[0].result, rows[0].where) == (Result.FAIL, "rank 0")


@pytest.mark.parametrize(
    ("host", "environment"),
    [("0123456789ab", {}), ("pod-7", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})],
)
def test_host_name_of_a_container_is_warned_of(host: str, environment: dict[str, str]) -> None:
    facts = facts_of(0, host=host, node_source="the host name")
    (row,) = check_names([facts], environment)
    assert row.result is Result.WARN
    assert "MOE_FT_NODE_ID" in row.remedy
    assert check_names([facts_of(0, host=host)], environment)[0].result is Result.PASS


@pytest.mark.parametrize(
    ("planned", "result"), [(None, Result.PASS), ((16, 8), Result.PASS), ((24, 8), Result.FAIL)]
)
def test_nodes_are_as_many_as_training_needs(
    planned: tuple[int, int] | None, result: Result
) -> None:
    (row,) = check_ranks([facts_of(0), facts_of(1)], planned)
    assert row.result is result


def test_node_with_fewer_ranks_is_named() -> None:
    (row,) = check_ranks([facts_of(0), facts_of(1, node="n0"), facts_of(2)], None)
    assert (row.result, row.where) == (Result.WARN, "n2")


def test_job_without_a_name_fails_if_its_flags_are_known() -> None:
    assert check_job(MemoryConfig(job_id="a"), {}, is_planned=True).result is Result.PASS
    assert check_job(MemoryConfig(), {"SLURM_JOB_ID": "7"}, is_planned=True).found == "7"
    assert check_job(MemoryConfig(), {}, is_planned=True).result is Result.FAIL
    assert check_job(MemoryConfig(), {}, is_planned=False).result is Result.WARN
