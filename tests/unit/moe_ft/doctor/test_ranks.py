"""Facts of ranks, and the rows on what differs between them or was never tested."""

import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.config.config import MemoryConfig
from moe_ft.doctor.meeting import MeetingPlace
from moe_ft.doctor.ranks import (
    TESTED,
    TESTED_PYTHON,
    VARIABLE,
    ProcessFacts,
    check_gpus,
    check_job,
    check_names,
    check_ranks,
    check_store,
    check_variables,
    check_versions,
    count_gpus,
    find_facts,
    find_versions,
)
from moe_ft.doctor.rows import Result

ROOT = Path(__file__).parents[4]
SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
VERSIONS = {"moe_ft": "0.1.0", "python": "3.12.1", **TESTED}


def facts_of(rank: int, **others: Any) -> ProcessFacts:
    """Return the facts of a rank that is alone on its node."""
    usual = {
        "rank": rank,
        "node": f"n{rank}",
        "node_problem": "",
        "node_source": "SLURMD_NODENAME",
        "host": f"host{rank}",
        "boot": f"boot{rank}",
        "local_world_size": 1,
        "versions": VERSIONS,
        "variables": {},
        "num_gpus": 8,
    }
    return ProcessFacts(**{**usual, **others})


def test_name_of_the_node_comes_with_its_source() -> None:
    facts = find_facts(MeetingPlace(rank=2, world_size=4), MemoryConfig(), {"MOE_FT_NODE_ID": "a"})
    assert (facts.rank, facts.node, facts.node_source) == (2, "a", "MOE_FT_NODE_ID")
    assert (
        find_facts(MeetingPlace(), MemoryConfig(node_id="b"), {}).node_source == "--moe-ft-node-id"
    )
    assert find_facts(MeetingPlace(), MemoryConfig(), {}).node_source == "the host name"


def test_name_that_cannot_be_a_directory_is_a_problem() -> None:
    facts = find_facts(MeetingPlace(), MemoryConfig(), {"MOE_FT_NODE_ID": "a/b"})
    assert facts.node == ""
    assert "a/b" in facts.node_problem


def test_variables_of_one_node_alone_are_left_out() -> None:
    given = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "x", "HOME": "/"}
    assert find_facts(MeetingPlace(), MemoryConfig(), given).variables == {"NCCL_DEBUG": "INFO"}


def test_versions_are_those_of_the_packages() -> None:
    versions = find_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 3)]
)
def test_gpus_are_the_devices_that_the_process_may_use(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, tmp_path) == count


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


def test_tested_versions_are_those_that_are_installed_for_tests() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: pins[name] for name in TESTED} == TESTED


def test_tested_versions_of_python_are_those_of_the_readme() -> None:
    assert f"Python {' or '.join(TESTED_PYTHON)}" in (ROOT / "README.md").read_text()


def test_the_same_tested_versions_pass() -> None:
    (row,) = check_versions([facts_of(0), facts_of(1)])
    assert row.result is Result.PASS
    assert f"torch {TESTED['torch']}" in row.found


def test_rank_with_another_version_fails_and_is_named() -> None:
    other = facts_of(5, versions={**VERSIONS, "moe_ft": "0.0.9"})
    (row,) = check_versions([facts_of(0), facts_of(1), other])
    assert row.result is Result.FAIL
    assert "0.1.0 on n0, n1 (rank 0, ...)" in row.found
    assert "0.0.9 on n5 (rank 5)" in row.found


@pytest.mark.parametrize("name", [*TESTED, "python"])
def test_version_that_was_not_tested_is_warned_of(name: str) -> None:
    (row,) = check_versions([facts_of(0, versions={**VERSIONS, name: "1.0.0"})])
    assert row.result is Result.WARN
    assert f"{name} 1.0.0; tested with" in row.found


def test_build_of_a_tested_version_passes() -> None:
    versions = {**VERSIONS, "torch": f"{TESTED['torch']}+cu130"}
    assert check_versions([facts_of(0, versions=versions)])[0].result is Result.PASS


def test_missing_package_fails() -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != "megatron-core"}
    (row,) = check_versions([facts_of(0, versions=versions)])
    assert (row.result, row.found) == (Result.FAIL, "no megatron-core")


@pytest.mark.parametrize(
    ("facts", "result", "found"),
    [
        ({}, Result.PASS, "8 GPUs"),
        ({"num_gpus": 0}, Result.WARN, "no GPU: training runs on the CPU"),
        ({"num_gpus": 4}, Result.FAIL, "4 GPUs for 8 ranks of a node"),
        ({"versions": {"torch": "2.13.0+cpu"}}, Result.FAIL, "torch 2.13.0+cpu, which uses none"),
    ],
)
def test_gpus_of_a_node(facts: dict[str, Any], result: Result, found: str) -> None:
    (row,) = check_gpus([facts_of(0, **facts)], 8)
    assert row.result is result
    assert found in row.found


def test_node_with_fewer_gpus_than_others_fails() -> None:
    rows = check_gpus([facts_of(0), facts_of(1, num_gpus=7)], None)
    assert [(row.where, row.result) for row in rows] == [("n0", Result.PASS), ("n1", Result.FAIL)]


@pytest.mark.parametrize(
    ("environment", "launch", "result"),
    [
        ({}, {}, Result.PASS),
        (SHARED, {}, Result.PASS),
        ({**SHARED, "TORCHELASTIC_MAX_RESTARTS": "3"}, {}, Result.FAIL),
        (SHARED, {"restarts": True, "backend": "c10d"}, Result.FAIL),
        (SHARED, {"restarts": True, "backend": "c10d", "is_alone": True}, Result.PASS),
        ({**SHARED, VARIABLE: "1"}, {"restarts": True, "backend": "c10d"}, Result.PASS),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, {}, Result.PASS),
        ({}, {"restarts": True, "backend": "c10d"}, Result.FAIL),
        ({VARIABLE: "1"}, {"restarts": True, "backend": ""}, Result.FAIL),
        ({VARIABLE: "1"}, {"restarts": True, "backend": "c10d"}, Result.PASS),
        ({}, {"restarts": False, "backend": ""}, Result.PASS),
    ],
)
def test_store_that_restarted_ranks_would_share_fails(
    environment: dict[str, str], launch: dict[str, Any], result: Result
) -> None:
    assert check_store(environment, **launch).result is result


def test_variable_that_differs_is_warned_of() -> None:
    everyone = [facts_of(0, variables={"NCCL_ALGO": "Ring"}), facts_of(1), facts_of(2)]
    (row,) = check_variables(everyone)
    assert (row.result, row.where) == (Result.WARN, "n1, n2")
    assert row.found == "NCCL_ALGO is Ring on n0 and not set here"


def test_variables_that_are_the_same_pass() -> None:
    same = {"variables": {"NCCL_ALGO": "Ring"}}
    (row,) = check_variables([facts_of(0, **same), facts_of(1, **same)])
    assert (row.result, row.found) == (Result.PASS, "the same: NCCL_ALGO")


def test_hangs_that_never_end_are_warned_of() -> None:
    (row,) = check_variables([facts_of(0, variables={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})])
    assert (row.check, row.result) == ("hangs", Result.WARN)
