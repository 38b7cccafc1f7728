"""Rank of a job in nvidia-resiliency-ext's in-process wrapper; benchmarks/inprocess.py starts all of them.

The function that the wrapper calls is pretrain_gpt_moe.py: loop and checkpoints are those of the other kinds.
Its second call in a process needs what the wrapper leaves to its user, here without a GPU:

- Its abort ends groups of NCCL. Those of gloo end with their connections, as in a repair in place.
- Megatron's globals are forgotten. Megatron's own list of them is not complete.
- moe_ft's report of a failure, which ends the process, is left out.
"""

import argparse
import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch.distributed as dist
from megatron.training import training

import pretrain_gpt_moe
from benchmarks.inprocess import note_call
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.replay import clear_metrics
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.loop.failure_report import FailureReport

_LEAVING_S = 20.0  # from the end of the connections until the function has ended

_patches = Patches()  # for as long as the process runs


class Calls:
    """Calls of the training function in this process."""

    def __init__(self, flags: list[str], ports: list[int], notes: Path) -> None:
        self._flags, self._ports, self._notes = flags, ports, notes
        self._member = Member(Assignment(rank=0, local_rank=0, world_size=1, node=""))
        self._links = Links(self._member, (Gloo(),))
        self._has_left = threading.Event()
        self._has_left.set()
        for name in ("init_process_group", "new_group"):
            _patches.wrap(dist, name, self._record)
        _patches.set(FailureReport, "failed", lambda report, error: None)

    def train(self, number: int) -> None:
        """Train. RANK and WORLD_SIZE are set.

        Args:
            number: of the call, over all processes, from 0.
        """
        rank = os.environ["RANK"]
        # No store of an earlier call is used again: it has the addresses of dead processes.
        os.environ["MASTER_PORT"] = str(self._ports[number])
        os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        self._member.round = number
        self._links.begin()
        self._has_left.clear()
        note_call(self._notes, number, int(rank))
        try:
            pretrain_gpt_moe.main(self._flags)
        finally:
            self._has_left.set()

    def abort(self) -> None:
        """Have the function end with an exception, and wait until it has. Not on its thread."""
        self._links.end(self._member.round)
        self._has_left.wait(_LEAVING_S)  # the wrapper's own exception would tear up what it closes

    def _record(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._links.recording():
            return original(*args, **kwargs)


def forget() -> None:
    """Leave Megatron as it is in a new process; a rank in reserve has not used it."""
    clear_metrics()
    training.destroy_global_state()
    # Once set, they cost the first iteration a collective that a new process does not make.
    training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
    megatron_random._CUDA_RNG_STATE_TRACKER = None
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def run_wrapped(calls: Calls, num_ranks: int, interval_s: float, silence_s: float) -> None:
    """Run the training function in the wrapper, until it has ended everywhere."""
    inprocess = importlib.import_module("nvidia_resiliency_ext.inprocess")
    abort_module = importlib.import_module("nvidia_resiliency_ext.inprocess.abort")

    class Abort(abort_module.Abort):  # type: ignore[misc, name-defined]
        def __call__(self, state: Any) -> Any:
            calls.abort()
            return state

    class Finalize(inprocess.finalize.Finalize):  # type: ignore[misc, name-defined]
        def __call__(self, state: Any) -> Any:
            forget()
            return state

    # The wrapper passes itself by the type of the argument.
    def train(wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[name-defined]
        calls.train(wrapper.iteration)

    layer = inprocess.rank_assignment.Layer(
        min_ranks=num_ranks,
        max_ranks=num_ranks,
        flag=inprocess.rank_assignment.LayerFlag.RESERVE,
    )
    interval = timedelta(seconds=interval_s)
    wrapper = inprocess.Wrapper(
        store_kwargs={"timeout": timedelta(minutes=5), "port": int(os.environ["MASTER_PORT"])},
        rank_assignment=inprocess.rank_assignment.Tree(layers=[layer]),
        abort=Abort(),
        finalize=Finalize(),
        monitor_thread_interval=interval,
        monitor_process_interval=interval,
        last_call_wait=interval,
        # Imports on few cores hold threads up for long.
        soft_timeout=timedelta(minutes=3),
        hard_timeout=timedelta(minutes=4),
        heartbeat_timeout=timedelta(seconds=silence_s),
        barrier_timeout=timedelta(minutes=5),
        completion_timeout=timedelta(minutes=5),
    )
    wrapper(train)()


def main() -> None:
    """Train on this rank, or wait in reserve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nvrx", required=True, metavar="DIR")
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--interval-s", type=float, required=True)
    parser.add_argument("--silence-s", type=float, required=True)
    parser.add_argument("--notes", type=Path, required=True, metavar="DIR")
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    # Megatron, which does not import where this version can be imported, is there already.
    sys.path.append(options.nvrx)
    sys.argv[0] = pretrain_gpt_moe.__file__  # as if Python had started it
    logging.basicConfig()  # without a handler the wrapper says nothing
    calls = Calls(options.flags, options.ports, options.notes)
    run_wrapped(calls, options.num_ranks, options.interval_s, options.silence_s)


if __name__ == "__main__":
    main()
