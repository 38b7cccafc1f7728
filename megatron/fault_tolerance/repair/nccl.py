"""Transport of NCCL. Nothing here has run on a GPU: docs/gpu_day.md says how to try it.

`ProcessGroupNCCL.abort` has the kernels of a group leave, which frees the device, and with it a thread that
waits for it. That is no exception: the device runs on with what it had not received, and the thread learns of
it in its next call of a collective, or where links.py is asked.

Also here: variables with which torch leaves a rank alive when an operation has failed, and errors after which
only a new process helps. CUDA calls these sticky: every later call of the process returns the same error. The
rank then ends itself while it can be replaced, and its exception is not taken for that of a survivor.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn, override

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron.fault_tolerance.repair.links import BackendPlace, GroupTransport, Maker
from moe_ft.engine.background import device_of_this_thread
from moe_ft.errors import ConfigError
from moe_ft.saying import warn

_ABORT_S = 15.0
_DRAIN_S = 20.0
_ANY_GPU = torch.device("cuda")
_OFF = ("0", "n", "no", "f", "false", "off")
# All are to be off.
_VARIABLES: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch ends the process when another rank has died",
    "TORCH_NCCL_DESYNC_DEBUG": "torch turns the handling of errors on again, which ends the process",
    "TORCH_NCCL_BLOCKING_WAIT": "torch looks for no errors, and each operation waits for the device",
    "TORCH_NCCL_ENABLE_MONITORING": "torch ends the process when an operation has hung for some minutes",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "a rank that has written its flight recorder ends the process",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "each end of a group writes the flight recorder first",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "a group waits a minute after each failure before it can end",
}
_WITH_OLDER_NAMES = tuple(_VARIABLES)[
    :3
]  # without TORCH_, which torch reads if the other is missing
_REFUSED_VARIABLES: Mapping[str, str] = {
    "ENABLE_INTRA_NODE_COMM": "its buffers are shared with the process that has died",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "its backends are different, and renewing them is untested",
}
# Texts of cudaGetErrorString. NCCL prints no more: "Cuda failure 700 'an illegal memory access ...'".
_STICKY = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "tensor memory not completely freed",
    "CUDA-capable device(s) is/are busy or unavailable",
)
_IS_OF_CUDA = re.compile(r"cuda error|cuda failure|cudaerror", re.IGNORECASE)
_UNKNOWN_ERROR = re.compile(r"CUDA error: unknown error|Cuda failure (999 )?'unknown error'")


class Nccl(GroupTransport):
    """Backends of NCCL: an operation has only been given to the device when its call returns."""

    name = "nccl"

    @override
    def maker(self) -> Maker:
        return _make  # they connect in their first operation, as at the start

    @override
    def mark(self) -> None:
        return  # `made_since` lists all that exist, and the backends before a round are gone

    @override
    def made_since(self, mark: None) -> dict[str, Any]:
        found = {name: _backend(group) for group, name in _world.pg_names.items()}
        return {name: backend for name, backend in found.items() if backend is not None}

    @override
    def end(self, made: Mapping[str, Any]) -> int:
        """Abort all groups at the same time, each in a thread.

        An abort may wait for other ranks to abort the same group. One after the other, two ranks that have
        begun with different groups would wait for each other. (torch puts such aborts between `_group_start`
        and `_group_end`, which has no effect where `abort` works on a thread of its own.)
        """
        threads = [
            threading.Thread(target=_abort, args=each, name="moe_ft-abort", daemon=True)
            for each in made.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_ABORT_S)
        if any(thread.is_alive() for thread in threads):
            end_process(f"its groups of NCCL have not been aborted within {_ABORT_S:.0f} s")
        return len(threads)

    @override
    def failure(self, made: Mapping[str, Any]) -> str:
        # Found by a thread of torch: a timeout, or a connection that is gone.
        for name, backend in made.items():
            error = backend.get_error().name
            if error != "SUCCESS":
                return f"NCCL reports {error} in group {name}"
        return ""

    @override
    def settle(self) -> None:
        # Little is left of the iteration: clipping has waited for the device too.
        torch.cuda.current_stream().synchronize()

    @override
    def leave(self) -> None:
        """End batches that are open, and wait until the device has nothing to do.

        Raises:
            RuntimeError: with the error of the device.
        """
        _close_batches()
        pool = ThreadPoolExecutor(1, initializer=device_of_this_thread())
        try:
            pool.submit(torch.cuda.synchronize, torch.cuda.current_device()).result(_DRAIN_S)
        except TimeoutError:
            end_process(f"it has not come to an end within {_DRAIN_S:.0f} s of the aborts")
        finally:
            pool.shutdown(wait=False)


def _backend(group: Any) -> Any:
    if _ANY_GPU not in group._device_types:
        return None
    backend = group._get_backend(_ANY_GPU)
    return backend if backend.name() == Nccl.name else None


def _make(place: BackendPlace, given: Any, timeout: timedelta) -> Any:
    options = options_for(place, given, timeout)
    backend = dist.ProcessGroupNCCL(place.store, place.rank, len(place.ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def options_for(place: BackendPlace, given: Any, timeout: timedelta) -> Any:
    """Return the options of a new backend: those that the group was made with, if it was given any.

    They keep their priority and the configuration of their communicator.
    """
    options = given
    if options is None:  # as torch does
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
    options._timeout, options.group_name = timeout, place.name
    options.global_ranks_in_group = list(place.ranks)
    return options


def _abort(name: str, backend: Any) -> None:
    # For which it waits for its own thread.
    backend._set_default_timeout(timedelta(seconds=_ABORT_S))
    try:
        backend.abort()
    except RuntimeError as error:
        end_process(f"group {name} of NCCL could not be aborted: {error}")


def _close_batches() -> None:
    """End what `batch_isend_irecv` has begun on this thread when its exception came.

    torch does not: all further operations of the thread would be collected, and none begun.
    """
    for group, operations in _world.pg_coalesce_state.items():
        if not operations and _backend(group) is not None:
            try:
                group._end_coalescing(_ANY_GPU)
            except RuntimeError as error:
                # Nobody can tell what the thread's next operation would do.
                end_process(f"a batch of sends could not be ended: {error}")


def set_variables(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set what torch reads when it makes groups; return what this has added.

    Torch would otherwise end the process, from a thread of its own.

    Raises:
        ConfigError: if a variable has a value with which nothing can be repaired.
    """
    for name, reason in _REFUSED_VARIABLES.items():
        if (value := environment.get(name, "0")).lower() not in _OFF:
            raise _refusal(name, value, reason)
    if (value := environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF")).upper() == "DETAIL":
        reason = "groups have wrappers then, which are not renewed"
        raise _refusal("TORCH_DISTRIBUTED_DEBUG", value, reason)
    added: dict[str, str] = {}
    for name, reason in _VARIABLES.items():
        names = (name, name.removeprefix("TORCH_")) if name in _WITH_OLDER_NAMES else (name,)
        given = {each: environment[each] for each in names if each in environment}
        for each, value in given.items():
            if value.lower() not in _OFF:
                raise _refusal(each, value, reason)
        if not given:
            added[name] = "0"
    environment.update(added)
    return added


def _refusal(name: str, value: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name}={value} does not work with --moe-ft-repair=auto: {reason}. Remove it, or leave the flag out."
    )


def why_lost(error: BaseException) -> str:
    """Return the error of CUDA that an exception, or one that has led to it, is about; empty if none is.

    Errors after which the device can still be used do not count, such as one that is out of memory.
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        text = str(each)
        if _UNKNOWN_ERROR.search(text):
            return "unknown error"
        if _IS_OF_CUDA.search(text):
            found = next((known for known in _STICKY if known in text), "")
            if found:
                return found
        seen.append(each)
        each = each.__cause__ or each.__context__
    return ""


def end_process(reason: str) -> NoReturn:
    """End this process at once: its fork server replaces it if it is armed, or all ranks start again."""
    warn(f"process {os.getpid()} ends, because it cannot use its device any more: {reason}")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
