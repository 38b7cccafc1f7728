"""Transport of NCCL. Nothing here has run on a GPU: docs/first_day_on_a_gpu.md says how to try it.

`ProcessGroupNCCL.abort` has the kernels of a group leave, which frees the device, and with it a thread that
waits for it. That is no exception: the device runs on with what it had not received, and the thread learns of
it in its next call of a collective, or where links.py is asked.
"""

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron.fault_tolerance.repair.lost_device import end_process
from megatron.fault_tolerance.repair.transport import Maker, Place

_ABORT_S = 15.0
_DRAIN_S = 20.0
_ANY_GPU = torch.device("cuda")


class Nccl:
    """Backends of NCCL: an operation has only been given to the device when its call returns."""

    name = "nccl"
    fails_silently = True

    def maker(self) -> Maker:
        """Return what makes backends. They connect in their first operation, as at the start."""
        return _make

    def mark(self) -> None:
        """Return nothing: `made_since` lists all that exist, and the backends before a round are gone."""

    def made_since(self, mark: None) -> dict[str, Any]:
        """Return all backends of NCCL by the name of their group."""
        found = {name: _backend(group) for group, name in _world.pg_names.items()}
        return {name: backend for name, backend in found.items() if backend is not None}

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

    def begin(self) -> None:
        """Let go of nothing: backends end with their groups' next ones."""

    def failure(self, made: Mapping[str, Any]) -> str:
        """Return the error that a thread of torch has found: a timeout, or a connection that is gone."""
        for name, backend in made.items():
            error = backend.get_error().name
            if error != "SUCCESS":
                return f"NCCL reports {error} in group {name}"
        return ""

    def settle(self) -> None:
        """Wait until the device has done the iteration, of which little is left: clipping has waited too."""
        torch.cuda.current_stream().synchronize()

    def leave(self) -> None:
        """End batches that are open, and wait until the device has nothing to do.

        Raises:
            RuntimeError: with the error of the device.
        """
        _close_batches()
        errors: list[RuntimeError] = []
        device = torch.cuda.current_device()
        thread = threading.Thread(target=_synchronize, args=(device, errors), daemon=True)
        thread.start()
        thread.join(_DRAIN_S)
        if thread.is_alive():
            end_process(f"it has not come to an end within {_DRAIN_S:.0f} s of the aborts")
        if errors:
            raise errors[0]


def _backend(group: Any) -> Any:
    """Return the backend of NCCL of a group; None if it has none."""
    if _ANY_GPU not in group._device_types:
        return None
    backend = group._get_backend(_ANY_GPU)
    return backend if backend.name() == Nccl.name else None


def _make(place: Place, given: Any, timeout: timedelta) -> Any:
    options = options_for(place, given, timeout)
    backend = dist.ProcessGroupNCCL(place.store, place.rank, len(place.ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def options_for(place: Place, given: Any, timeout: timedelta) -> Any:
    """Return the options of a new backend.

    Args:
        place: of the rank in the group.
        given: options that the group was made with, which keep their priority and their communicator's
            configuration; None if it had none.
        timeout: of its operations.
    """
    options = given
    if options is None:  # as torch does
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
    options._timeout, options.group_name = timeout, place.name
    options.global_ranks_in_group = list(place.ranks)
    return options


def _abort(name: str, backend: Any) -> None:
    backend._set_default_timeout(
        timedelta(seconds=_ABORT_S)
    )  # for which it waits for its own thread
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
            except (
                RuntimeError
            ) as error:  # nobody can tell what the thread's next operation would do
                end_process(f"a batch of sends could not be ended: {error}")


def _synchronize(device: int, errors: list[RuntimeError]) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        errors.append(error)
