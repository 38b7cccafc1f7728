"""The parts of the transport of NCCL that need no GPU. tests/gpu/test_gpu_repair.py has the others."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from megatron.fault_tolerance.repair import nccl as module
from megatron.fault_tolerance.repair.nccl import Nccl, options_for
from megatron.fault_tolerance.repair.transport import Place

TIMEOUT = timedelta(seconds=30)
PLACE = Place(store=None, rank=1, ranks=(4, 6), name="17")


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


def test_group_without_options_gets_those_of_torch() -> None:
    options = options_for(PLACE, None, TIMEOUT)
    assert not options.is_high_priority_stream
    assert options._timeout == TIMEOUT


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
