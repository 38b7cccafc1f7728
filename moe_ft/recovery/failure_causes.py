"""Causes of a failure, as its exception shows them: the training state, or the machines that compute it."""

import re

import torch
import torch.distributed as dist

from moe_ft.errors import ConfigError, UnrecoverableError

# Of Megatron's checks of losses and gradients (rerun state machine), and of its optimizer.
_NOT_FINITE = ("found nan", "found inf", "unexpected result nan", "unexpected result inf")
# Plain RuntimeErrors of a rank whose partner has died, and of a broken device.
_ELSEWHERE = re.compile(r"gloo|nccl|connection|timed out|socket|\bstore\b|cuda error")


def is_not_finite(error: BaseException) -> bool:
    """Return whether training has computed something that is NaN or infinite."""
    text = str(error).lower()
    return any(each in text for each in _NOT_FINITE)


def speaks_against_state(error: BaseException) -> bool:
    """Return whether a failure may be the state's fault: not of the machine, the network or another rank."""
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
