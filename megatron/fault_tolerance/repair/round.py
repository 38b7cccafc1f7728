"""A round of repairs on this rank: phases from the broken iteration to its result.

    free       leave the iteration, and remove what it leaves
    build      instead, in a replacement: it has been set up alone (build.py)
    meet       meet all other ranks in the job's store (cluster/member.py)     -> Round
    swap       put new backends under the process groups (swap.py), and have what libraries made from them
               made again (renewals.py)
    recover    set up the listeners again, which recovers a state (catch_up.py) -> the next iteration
    catch_up   run iterations until the broken one is finished (catch_up.py)    -> its result

Each ends by itself or by a deadline. seam.py says when a round begins, and what follows if one fails.
"""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from megatron.training import get_args, get_timers

from megatron.fault_tolerance.repair.catch_up import Repaired, Step, catch_up, recover
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.own_errors import num_batches_left_out
from megatron.fault_tolerance.repair.renewals import renew
from megatron.fault_tolerance.repair.swap import swap
from megatron.fault_tolerance.repair.watcher import STUCK_S, ending_after
from megatron.fault_tolerance.seams.megatron_loop import timeout_of_groups_s
from megatron.fault_tolerance.seams.replay import clear_metrics
from megatron.fault_tolerance.seams.reruns import begin_reruns_again
from moe_ft.cluster.member import Round, Standing
from moe_ft.loop.listeners import Built, Listeners, Repair
from moe_ft.loop.training_loop import LoopParts
from moe_ft.saying import say, warn
from moe_ft.state.tensors import all_optimizers

_REPAIR_S = 600.0  # without progress, until training runs again
_LOOP_TIMER = "interval-time"


class Phases:
    """Seconds of a repair by phase: they follow each other without a gap, from the death of the rank."""

    def __init__(self, noticed_s: float, now: Callable[[], float] = time.time) -> None:
        """Begin at the time since 1970 when this rank learned of the death."""
        self._noticed_s = self._last_s = noticed_s
        self._now = now
        self.seconds: dict[str, float] = {"notice": 0.0}

    def begin_with(self, died_s: float) -> None:
        """Set when the rank died, on whatever machine; clocks may differ a little."""
        self.seconds["notice"] = max(0.0, self._noticed_s - died_s)

    def end(self, phase: str) -> None:
        """End a phase that began when the one before ended."""
        now_s = self._now()
        self.seconds[phase] = max(0.0, now_s - self._last_s)
        self._last_s = now_s


def free(links: Links, listeners: Listeners, parts: LoopParts, iteration: int) -> None:
    """Leave the broken iteration, which has ended with an exception. Not collective.

    Model, optimizer and Megatron's globals are then as before an iteration.
    """
    links.leave()
    listeners.suspend(iteration)
    begin_reruns_again(iteration)
    for name, timer in get_timers()._timers.items():
        if name != _LOOP_TIMER and getattr(timer, "_started", False):
            timer._started = False
    clear_metrics()
    for chunk in parts.model:
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, name, ()):
                _begin_again(group)
    for each in all_optimizers(parts.optimizer):
        # All ask again what costs a collective and is asked once: a replacement has to ask.
        each._has_grad_norm_group_cache = None


def _begin_again(group: Any) -> None:
    """Make a group of buckets as in a new process, which orders reductions otherwise at first."""
    for handle in (group.grad_reduce_handle, group.param_gather_handle):
        for work in getattr(handle, "works", (handle,)):
            if work is not None:
                with suppress(RuntimeError):  # its connections have ended
                    work.wait()  # until nothing writes into the buffers any more
    group.grad_reduce_handle = group.param_gather_handle = None
    group.param_gather_dispatched = False
    group.is_first_batch = True
    group.golden_per_param_grad_ready_counts, group.per_param_grad_ready_counts = {}, {}


def repair(rank: Repaired, built: Built, step: Step, iteration: int, phases: Phases) -> Any:
    """Repair, and return the result of the iteration that was broken off. Called by all ranks.

    Raises:
        Exception: anything, if another rank dies meanwhile.
        RepairError: if the job cannot be repaired.
    """
    # Others may wait in a collective, with its timeout, for the rank that reads most.
    limit_s = max(_REPAIR_S, 60 * get_args().distributed_timeout_minutes + STUCK_S)
    with ending_after(limit_s, rank.member.link):
        free(rank.links, rank.listeners, step.parts, iteration)
        if rank.joining is not None and rank.member.standing is Standing.JOINING:
            rank.joining.end()
            phases.end("build")
        else:
            gc.collect()  # the frames of the exception hold activations, and contexts that must end now
            rank.groups.drop_later()
            phases.end("free")
        met = rank.member.meet()
        phases.begin_with(met.died_s)
        rank.member.wait_until_ready()
        phases.end("meet")
        swap(rank.groups, rank.links, rank.store, met.number)
        renew(get_args())
        phases.end("swap")
        with (
            rank.watcher.inside()
        ):  # no abort reaches who makes a communicator with a rank that has died
            if rank.sharing is not None:
                rank.sharing.begin()
            # The result of an iteration that is left out is not there.
            may_keep = iteration not in rank.member.left_out
            first = recover(rank, built, step.parts, met.positions, may_keep=may_keep)
        phases.end("recover")
    result = catch_up(rank, step, first, iteration, met.survivors_position)
    rank.groups.set_timeout(timedelta(seconds=timeout_of_groups_s(get_args())))
    phases.end("catch_up")
    rank.member.finish()
    _report(rank, met, iteration, first, phases)
    return result


def _report(rank: Repaired, met: Round, iteration: int, recovered: int, phases: Phases) -> None:
    own = rank.member.rank
    done = Repair(
        number=met.number,
        iteration=iteration,
        recovered=recovered,
        dead_ranks=met.dead_ranks,
        hung_s=met.hung_s,
        is_replacement=own in met.dead_ranks,
        taken_over=met.taken_over,
        phases_s=phases.seconds,
        shared=rank.listeners.loop.shared,
        left_out=(left_out := rank.member.left_out.get(iteration)),
    )
    rank.listeners.after_repair(done)
    if own != met.entries[0].rank:
        return
    if left_out:
        given = get_args().moe_ft_skip_bad_batches
        number = num_batches_left_out(get_args(), iteration + 1)
        warn(
            f"iteration {iteration + 1} is left out: its batch has made rank {left_out.rank} fail twice with "
            f"{left_out.what}; {number} of {given}. A start that continues from a state before it finds that "
            f"out again; --iterations-to-skip {iteration + 1} spares it the way there"
        )
    seconds = f"{sum(phases.seconds.values()):.1f} s"
    # People count iterations from 1, as log lines do.
    end = f"and iteration {iteration + 1} finished: no other rank was restarted"
    if dead := met.dead_ranks:
        names = ("rank " if len(dead) == 1 else "ranks ") + ", ".join(map(str, dead))
        names += "".join(f" of node {lost} on {by}" for lost, by in met.taken_over.items())
        say(f"{names} replaced in {seconds}, {end}")
