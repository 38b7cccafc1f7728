"""Failures that the state may cause, and failures of the machine, the network or another rank."""

import errno

import pytest
import torch
import torch.distributed as dist

from moe_ft.errors import ConfigError, CorruptStateError, UnrecoverableError
from moe_ft.recovery.failures import (
    is_not_finite,
    is_timeout,
    speaks_against_logs,
    speaks_against_state,
)

TIMED_OUT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms"
MEGATRONS_NAN = RuntimeError(
    "Rank 3, node store-7, device 3, iteration 12: Unexpected result nan "
    "(message='found NaN in local forward loss calculation')"
)
MEGATRONS_INF = RuntimeError("Unexpected result inf (message='found Inf in local grad norm')")


@pytest.mark.parametrize("error", [MEGATRONS_NAN, MEGATRONS_INF])
def test_result_of_megatrons_checks_that_is_not_finite_speaks_against_the_state(
    error: Exception,
) -> None:
    assert is_not_finite(error)
    assert speaks_against_state(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TIMED_OUT, True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer", False),
    ],
)
def test_wait_that_was_given_up_is_told_from_a_connection_that_has_ended(
    text: str, expected: bool
) -> None:
    assert is_timeout(RuntimeError(text)) is expected


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the shapes do not match"),
        KeyError("layer.0"),
        RuntimeError("the moments cannot be restored"),
        RuntimeError("size mismatch, got input (4) and mat (5)"),
    ],
)
def test_error_of_what_a_start_computes_with_a_state_speaks_against_it(error: Exception) -> None:
    assert speaks_against_state(error)
    assert not is_not_finite(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer"),
        RuntimeError(TIMED_OUT),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: it has timed out"),
        RuntimeError("retrieving an id from the key-value store by store->get('0') failed"),
        dist.DistNetworkError("the server is gone"),
    ],
)
def test_failure_of_communication_says_nothing_of_a_state(error: Exception) -> None:
    assert not speaks_against_state(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError("Input/output error"),
        CorruptStateError("the checksum does not match"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    ],
)
def test_failure_of_the_machine_says_nothing_of_a_state(error: Exception) -> None:
    assert not speaks_against_state(error)


@pytest.mark.parametrize("error", [ConfigError("bad flag"), UnrecoverableError("nothing there")])
def test_refusal_of_a_start_says_nothing_of_a_state(error: Exception) -> None:
    assert not speaks_against_state(error)


def caused_by(cause: Exception) -> UnrecoverableError:
    """Return the failure to fetch a log."""
    error = UnrecoverableError("the boundary log of rank 0 cannot be fetched")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        CorruptStateError("tensor 3 does not match its checksum"),
        UnrecoverableError("tensor 3 is missing"),
        caused_by(OSError("boundary_1.safetensors is gone")),
    ],
)
def test_replay_that_fails_for_its_logs_speaks_against_them(error: Exception) -> None:
    assert speaks_against_logs(error)
    assert not speaks_against_state(error)


@pytest.mark.parametrize(
    "error",
    [
        caused_by(ConnectionResetError("the other rank has died")),
        caused_by(TimeoutError("not done within 30 s")),
        caused_by(OSError(errno.EHOSTUNREACH, "No route to host")),
        ValueError("bad"),
        OSError("disk"),
    ],
)
def test_replay_that_fails_otherwise_says_nothing_of_its_logs(error: Exception) -> None:
    assert not speaks_against_logs(error)
