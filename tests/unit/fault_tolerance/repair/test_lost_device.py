"""Errors that a process keeps for good are told from those after which its device can still be used."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.repair.lost_device import end_process, why_lost
from moe_ft.errors import SnapshotError

ADVICE = (
    "\nSearch for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported "
    "at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
    "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.29.7\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{ADVICE}"),
            "an illegal memory access was encountered",
        ),
        (
            RuntimeError(f"CUDA error: uncorrectable ECC error encountered{ADVICE}"),
            "uncorrectable ECC error encountered",
        ),
        (
            RuntimeError(f"CUDA error: device-side assert triggered{ADVICE}"),
            "device-side assert triggered",
        ),
        (
            torch.AcceleratorError(f"CUDA error: unspecified launch failure{ADVICE}"),
            "unspecified launch failure",
        ),
        (RuntimeError(f"CUDA error: unknown error{ADVICE}"), "unknown error"),
        (
            dist.DistBackendError(
                f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                "Cuda failure 700 'an illegal memory access was encountered'"
            ),
            "an illegal memory access was encountered",
        ),
    ],
)
def test_error_that_stays_with_the_process_is_named(error: Exception, reason: str) -> None:
    assert why_lost(error) == reason


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
        ),
        RuntimeError(f"CUDA error: out of memory{ADVICE}"),
        RuntimeError(f"CUDA error: invalid argument{ADVICE}"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("misaligned address of a file"),
        RuntimeError("Connection closed by peer [127.0.0.1]:4242"),
        dist.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, "
            "NCCL version 2.29.7\nncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely."
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
