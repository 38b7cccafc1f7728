"""Causes of a failure, as its exception shows them: the training state, or the machines that compute it."""

import re

import torch
import torch.distributed as dist

from moe_ft.errors import ConfigError, CorruptStateError, UnrecoverableError

# Messages of Megatron's rerun state machine, which checks losses and gradients, and of its optimizer.
_NOT_FINITE = ("found nan", "found inf", "unexpected result nan", "unexpected result inf")

_ELSEWHERE = re.compile(r"gloo|nccl|connection|timed out|socket|\bstore\b|cuda error")


def is_timeout(error: BaseException) -> bool:
    """Return whether a rank has waited for another one for too long."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def is_not_finite(error: BaseException) -> bool:
    """Return whether training has computed NaN or infinity."""
    text = str(error).lower()
    return any(each in text for each in _NOT_FINITE)


def speaks_against_logs(error: BaseException) -> bool:
    """Return whether a replay has failed for the boundary logs that it was given.

    They are the same the next time; a connection over which one did not come may be better then.
    """
    cause = error.__cause__
    is_of_logs = isinstance(error, CorruptStateError | UnrecoverableError)
    # A refusal by the other node is an OSError without a number.
    has_number = isinstance(cause, OSError) and cause.errno is not None
    is_of_network = has_number or isinstance(cause, ConnectionError | TimeoutError)
    return is_of_logs and not is_of_network


def speaks_against_state(error: BaseException) -> bool:
    """Return whether the state may be the cause, rather than the machine, the network or another rank."""
    is_elsewhere = isinstance(
        error,
        OSError
        | MemoryError
        | torch.OutOfMemoryError
        | dist.DistError
        | ConfigError
        | UnrecoverableError,
    )
    says_elsewhere = _ELSEWHERE.search(str(error).lower()) is not None
    return is_not_finite(error) or not (is_elsewhere or says_elsewhere)
