"""Restarts need a store of their own, and variables are the same on all nodes."""

import pytest

from moe_ft.doctor.ranks import VARIABLE, check_store, check_variables
from moe_ft.doctor.rows import Result
from tests.unit.moe_ft.doctor.everyone import facts_of

SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("environment", "launch", "result"),
    [
        ({}, {}, Result.PASS),
        (SHARED, {}, Result.PASS),
        ({**SHARED, "TORCHELASTIC_MAX_RESTARTS": "3"}, {}, Result.FAIL),
        (SHARED, {"restarts": True, "backend": "c10d"}, Result.FAIL),
        ({**SHARED, VARIABLE: "1"}, {"restarts": True, "backend": "c10d"}, Result.PASS),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, {}, Result.PASS),
        ({}, {"restarts": True, "backend": "c10d"}, Result.FAIL),
        ({VARIABLE: "1"}, {"restarts": True, "backend": ""}, Result.FAIL),
        ({VARIABLE: "1"}, {"restarts": True, "backend": "c10d"}, Result.PASS),
        ({}, {"restarts": False, "backend": ""}, Result.PASS),
    ],
)
def test_store_that_restarted_ranks_would_share_fails(
    environment: dict[str, str], launch: dict, result: Result
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
