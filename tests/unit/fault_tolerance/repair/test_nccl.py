"""The parts of the transport of NCCL that need no GPU. tests/gpu/test_gpu_repair.py has the others."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from megatron.fault_tolerance.repair import nccl as module
from megatron.fault_tolerance.repair.links import BackendPlace
from megatron.fault_tolerance.repair.nccl import (
    Nccl,
    end_process,
    options_for,
    set_variables,
    why_lost,
)
from moe_ft.errors import ConfigError, SnapshotError

TIMEOUT = timedelta(seconds=30)
PLACE = BackendPlace(store=None, rank=1, ranks=(4, 6), name="17")


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_options_of_a_group_are_kept() -> None:
    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    given.config.cga_cluster_size, given.config.max_ctas = 2, 16
    options = options_for(PLACE, given, TIMEOUT)
    assert options.is_high_priority_stream
    assert (options.config.cga_cluster_size, options.config.max_ctas) == (2, 16)
    assert options._timeout == TIMEOUT
    assert options.group_name == "17"
    assert list(options.global_ranks_in_group) == [4, 6]
    assert options.split_from is None
    options = options_for(PLACE, None, TIMEOUT)
    assert (options.is_high_priority_stream, options._timeout) == (False, TIMEOUT), "those of torch"


@pytest.mark.usefixtures("world")
def test_groups_of_other_backends_have_nothing_to_abort() -> None:
    transport = Nccl()
    made = transport.made_since(transport.mark())
    assert made == {}
    assert transport.end(made) == 0
    assert transport.failure(made) == ""


class _Communicator:
    """A backend whose abort waits until another rank aborts the same one."""

    def __init__(self, waits_for: Callable[[], object], error: str = "") -> None:
        self.has_begun, self._waits_for, self._error = threading.Event(), waits_for, error
        self.timeout: timedelta | None = None
        self.answer: object = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        self.has_begun.set()
        self.answer = self._waits_for()
        if self._error:
            raise RuntimeError(self._error)

    def get_error(self) -> object:
        return ErrorType.TIMEOUT


def test_groups_are_aborted_at_the_same_time() -> None:
    waits_s = 10.0
    one = _Communicator(lambda: other.has_begun.wait(waits_s))
    other = _Communicator(lambda: one.has_begun.wait(waits_s))
    assert Nccl().end({"1": one, "2": other}) == 2
    assert one.answer and other.answer, "one has begun after the other had ended"
    assert one.timeout == other.timeout == timedelta(seconds=module._ABORT_S)


def end_of_abort(communicator: _Communicator) -> int:
    """Return how a process ends that aborts this."""
    pid = os.fork()
    if pid == 0:
        Nccl().end({"1": communicator})
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_process_whose_groups_cannot_be_aborted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ABORT_S", 0.05)
    assert end_of_abort(_Communicator(lambda: None)) == 7
    assert end_of_abort(_Communicator(lambda: threading.Event().wait())) == -signal.SIGKILL
    assert end_of_abort(_Communicator(lambda: None, "unhandled cuda error")) == -signal.SIGKILL


def test_failure_that_only_a_thread_of_torch_has_seen_is_named() -> None:
    communicator = _Communicator(lambda: None)
    assert Nccl().failure({"3": communicator}) == "NCCL reports TIMEOUT in group 3"


ALL = {
    f"TORCH_NCCL_{name}"
    for name in (
        *("ASYNC_ERROR_HANDLING", "DESYNC_DEBUG", "BLOCKING_WAIT", "ENABLE_MONITORING"),
        *("DUMP_ON_TIMEOUT", "EXTRA_DUMP_ON_EXEC", "WAIT_TIMEOUT_DUMP_MILSEC"),
    )
}


def test_variables_that_nobody_has_set_are_set() -> None:
    off = {"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "False"}
    before = {"PATH": "/bin", "TORCH_DISTRIBUTED_DEBUG": "INFO", **off}
    added = set_variables(environment := dict(before))
    assert added == dict.fromkeys(
        ALL - {f"TORCH_{name.removeprefix('TORCH_')}" for name in off}, "0"
    )
    assert environment == {**before, **added}
    assert set_variables(environment) == {}, "a replacement finds them"


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
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "its backends are different"),
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


ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
FAILURE = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.29.7\n"


@pytest.mark.parametrize(
    "reason",
    [
        "an illegal memory access was encountered",
        "uncorrectable ECC error encountered",
        "device-side assert triggered",
        "unknown error",
    ],
)
def test_error_that_stays_with_the_process_is_named(reason: str) -> None:
    assert why_lost(torch.AcceleratorError(f"CUDA error: {reason}{ADVICE}")) == reason
    text = f"{FAILURE}Last error:\nCuda failure 700 '{reason}'"
    assert why_lost(dist.DistBackendError(text)) == reason * (reason != "unknown error")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB"
        ),
        RuntimeError(f"CUDA error: out of memory{ADVICE}"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("misaligned address of a file"),
        RuntimeError("Connection closed by peer [127.0.0.1]:4242"),
        dist.DistBackendError(
            f"{FAILURE}ncclRemoteError: A call failed possibly due to a network error"
        ),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        ValueError("unknown error"),
    ],
)
def test_survivors_and_others_have_not_lost_their_device(error: Exception) -> None:
    assert why_lost(error) == ""


def test_error_that_has_led_to_another_one_is_found() -> None:
    def raise_it() -> None:
        try:
            raise torch.AcceleratorError(f"CUDA error: misaligned address{ADVICE}")
        except RuntimeError as error:
            raise SnapshotError("the copy has failed") from error

    with pytest.raises(SnapshotError) as caught:
        raise_it()
    assert why_lost(caught.value) == "misaligned address"


def test_errors_that_have_led_to_each_other_are_looked_at_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert why_lost(one) == ""


def test_process_ends_like_one_that_is_killed_and_says_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pid = os.fork()
    if pid == 0:
        end_process("misaligned address")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    said = capfd.readouterr().err
    assert "because it cannot use its device any more: misaligned address" in said
