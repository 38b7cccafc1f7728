"""Variables of torch are set before groups are made, and values that would end a survivor are refused."""

import pytest

from megatron.fault_tolerance.repair.environment import set_variables
from moe_ft.errors import ConfigError

ALL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
}


def test_variables_that_nobody_has_set_are_set() -> None:
    environment = {"PATH": "/bin"}
    added = set_variables(environment)
    assert added == dict.fromkeys(ALL, "0")
    assert environment == {"PATH": "/bin", **added}
    assert set_variables(environment) == {}, "a replacement finds them"


def test_variables_that_are_off_already_are_left_alone() -> None:
    environment = {"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "False"}
    before = dict(environment)
    added = set_variables(environment)
    assert set(added) == ALL - {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"}
    assert environment == {**before, **added}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "torch ends the process when another rank has"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "torch ends the process when another rank has died"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "torch looks for no errors"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1", "torch turns the handling of errors on again"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1", "torch ends the process when an operation has hung"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a rank that has written its flight recorder ends"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000", "a group waits a minute"),
        ("ENABLE_INTRA_NODE_COMM", "1", "its buffers are shared"),
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "its backends are others"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "groups have wrappers then"),
    ],
)
def test_value_with_which_nothing_is_repaired_is_refused_and_nothing_is_set(
    name: str, value: str, reason: str
) -> None:
    environment = {name: value}
    message = f"{name}={value} does not work with --moe-ft-repair=auto: {reason}.*Remove it"
    with pytest.raises(ConfigError, match=message):
        set_variables(environment)
    assert environment == {name: value}


def test_debug_output_of_torch_is_no_reason_to_refuse() -> None:
    assert set_variables({"TORCH_DISTRIBUTED_DEBUG": "INFO"})
