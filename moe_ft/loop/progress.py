"""Reports of a run: events, the times of its iterations, and digests of its state.

The events are its start, its iterations and its end; a record that is overwritten has the phases between.
"""

import os
import socket
import time
from contextlib import closing, suppress
from typing import NoReturn, override

import psutil
import torch
import torch.distributed as dist

import moe_ft
from moe_ft.cluster import job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import own_assignment, own_member
from moe_ft.cluster.rounds import RoundMark, Rounds
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.errors import JobStoreError, RepairError
from moe_ft.events import EventLog, last_incarnation, read_progress
from moe_ft.faults import Phase
from moe_ft.loop.corruption import Finding, accuse
from moe_ft.loop.listeners import (
    Built,
    EndedIteration,
    LoopListener,
    LoopState,
    Repair,
)
from moe_ft.loop.metrics import job_name
from moe_ft.loop.training_loop import TrainingLoop
from moe_ft.planning.time_shares import Spent, TimeShares, TimeSpent
from moe_ft.saying import warn
from moe_ft.state.digest import digest_state

_REACH_S = 5.0  # for the job's store
# Parts of an iteration that its event tells, each by the phases with which it begins and ends.
_PARTS = {
    "forward": (Phase.FORWARD, Phase.BACKWARD),
    "backward": (Phase.BACKWARD, Phase.BEFORE_STEP),
    "step": (Phase.BEFORE_STEP, Phase.AFTER_STEP),
}


class ProgressListener(LoopListener):
    """Opens the event log and writes what every run writes. Owned by the training thread."""

    def __init__(
        self,
        config: MoeFtConfig,
        training: TrainingLoop,
        loop: LoopState,
        event_log: EventLog,
    ) -> None:
        self._config = config
        self._training = training
        self._loop = loop
        self._log = event_log
        self._has_log = config.observability.event_log is not None
        self._spent = TimeSpent()
        self._is_on_gpu = False
        self._stage = 0
        self._entered_s: dict[
            Phase, float
        ] = {}  # when the running iteration has entered its phases
        self._process: psutil.Process | None = None  # opened once: each iteration asks it
        self._unlogged: int | None = None  # iteration after whose `train_step` the rank has ended

    def before_setup(self) -> None:
        """Read how far this rank has come in the start before."""
        before = read_progress(self._log.directory, self._log.rank)
        if before is None or not self._has_log:
            return
        self._spent = TimeSpent.continue_from(before.spent)
        self._log.spent = self._spent.numbers
        if before.phase is Phase.BETWEEN:
            self._unlogged = before.iteration + 1

    def after_setup(self, built: Built) -> None:
        """Open the log under the same incarnation on all ranks. Called by all ranks."""
        if not self._has_log:
            return
        log = self._log
        self._is_on_gpu = any(each.is_cuda for part in built[0] for each in part.parameters())
        # A rank may have died before it wrote a line: all ranks agree on the highest count.
        incarnation = torch.tensor(last_incarnation(log.directory, log.rank) + 1, device="cuda")
        dist.all_reduce(incarnation, op=dist.ReduceOp.MAX)
        if not log.is_open:  # it is after a repair
            log.start()
        log.incarnation = int(incarnation)

    def after_recovery(self) -> None:
        """Write the event "start", and what the loop will not do any more."""
        self._spent.start()
        if not self._has_log:
            return
        iteration, fields = self._loop.iteration, self._training.start_fields()
        self._stage = fields.get("stage", 0)
        self._log.write(
            "start",
            iteration,
            pid=os.getpid(),
            host=socket.gethostname(),
            job=job_name(self._config.memory),
            strategy=self._config.strategy.strategy,
            moe_ft=moe_ft.__version__,
            torch=str(torch.__version__),
            **fields,
            state_dtype=dict(self._config.precision.packings),
            lossy=dict(self._config.precision.lossy_parts),
        )
        # Nothing else is left out: see `StateSeam`.
        is_printer = self._log.rank == fields["world_size"] - 1  # of Megatron's log lines
        if is_printer and iteration == self._unlogged and self._training.is_logged(iteration):
            self._log.write("left_out", iteration, what="log line")
            line = f"the log line of iteration {iteration} may be missing: this rank ended where it was due"
            warn(line)
        self._unlogged = None  # a repair recovers what this process has trained

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        """Overwrite the progress record, which survives the process."""
        self._entered_s[phase] = time.perf_counter()
        self._log.progress(iteration, phase)

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write the event "iteration", and its times where the loop writes its own numbers."""
        times = {"iteration_s": ended.seconds, "stall_s": self._loop.stall_s}
        entered_s, self._entered_s = self._entered_s, {}
        idle_s = self._loop.idle_s
        if self._spent.is_first:
            self._spent.recover(self._loop.replay_s)
        self._spent.add(
            ended.iteration, time.time(), iteration_s=ended.seconds, stall_s=self._loop.stall_s
        )
        self._log.spent = self._spent.numbers
        shares = TimeShares.of(self._spent.seconds)
        known = {**times, **{f"time/{use}": shares[use] for use in Spent}}
        if idle_s is not None:
            known["idle_s"] = idle_s
        self._training.write_numbers(known, iteration=ended.iteration)
        if not self._has_log:
            return  # reading a loss waits for the GPU
        loss = ended.losses.get("lm loss")
        self._log.write(
            "iteration",
            ended.iteration,
            **times,
            idle_s=idle_s,
            exchange_s=self._loop.exchange_s,
            stage=self._stage,
            loss=None if loss is None else float(loss),
            num_tokens=ended.num_samples * self._training.sequence_length,
            resident_bytes=self._resident_bytes(),
            device_bytes=torch.cuda.memory_allocated() if self._is_on_gpu else None,
            phases_s={
                name: round(entered_s[end] - entered_s[begin], 6)
                for name, (begin, end) in _PARTS.items()
                if begin in entered_s and end in entered_s
            },
        )

    def after_repair(self, repair: Repair) -> None:
        """Write the event "repair"."""
        loop = self._loop
        self._log.write(
            "repair",
            loop.iteration,
            round=repair.number,
            dead_ranks=list(repair.dead_ranks),
            hung_s={str(rank): seconds for rank, seconds in repair.hung_s.items()},
            is_replacement=repair.is_replacement,
            taken_over=dict(repair.taken_over),
            shared=list(repair.shared),
            broken_iteration=repair.iteration,
            recovered_iteration=repair.recovered,
            scope="local" if loop.stages_alone else "global",
            stages=list(loop.stages_alone),
            repeated_iterations=loop.num_replayed + max(0, repair.iteration - repair.recovered),
            seconds=sum(repair.phases_s.values()),
            phases_s=dict(repair.phases_s),
        )
        if (failure := repair.left_out) is not None:
            self._log.write(
                "skipped_batch",
                failure.iteration + 1,
                failed_rank=failure.rank,
                kind=failure.kind.value,
                what=failure.what,
            )

    def accuse(self, finding: Finding) -> NoReturn:
        """Report corruption; raises CorruptionError. Called by all ranks."""
        accuse(self._log, self._loop, finding)

    def end_training(self) -> None:
        """Note that the loop has done all that was due with the last iteration."""
        self._log.progress(self._loop.iteration, Phase.BETWEEN)

    def end(self, reason: str, exit_code: int) -> None:
        """Write the event "end"."""
        # On a CPU this is the largest resident set, see cpu/device.py.
        peak_bytes = torch.cuda.max_memory_allocated()
        if not self._loop.is_saved:
            reason += ", the last state is not on storage"
        self._log.write(
            "end", self._loop.iteration, reason=reason, peak_device_memory_bytes=peak_bytes
        )

    def _resident_bytes(self) -> int | None:
        """Return the resident memory of this process; None where that cannot be read, which ends no run."""
        try:
            self._process = self._process or psutil.Process()
            return self._process.memory_info().rss
        except (OSError, psutil.Error):  # no descriptor is left
            return None

    def close(self) -> None:
        """Close the event log."""
        self._log.close()


class ReportsTraining(LoopListener):
    """Reports to the job's store that an iteration was finished, and that no rank is replaced in place.

    The law counts restarts in a row without one. Where ranks are replaced, they report it when that becomes
    possible: `Member.become_replaceable`. Once, on rank 0. Owned by the training thread.
    """

    def __init__(self, loop: LoopState, rank: int) -> None:
        self._loop = loop
        self._is_due = rank == 0

    @override
    def after_iteration(self, ended: EndedIteration) -> None:
        is_due, self._is_due = self._is_due, False
        assignment = own_assignment()
        if is_due and assignment is not None and (own_member() is None or self._loop.no_repair):
            # Without the store the job ends soon.
            with suppress(RepairError, JobStoreError, OSError):
                report_training(assignment)


def report_training(assignment: Assignment) -> None:
    """Report that the start trains, and that none of its ranks is replaced in place.

    Raises:
        RepairError, JobStoreError, OSError: if the job's store cannot be reached.
    """
    with closing(job_store.reach_own(assignment, _REACH_S)) as store:
        rounds = Rounds(store, assignment.rank, assignment.world_size)
        rounds.note(RoundMark.NOT_IN_PLACE)
        rounds.note(RoundMark.FINISHED)


class Digests(LoopListener):
    """Digests of the state, for --moe-ft-state-digest and its interval. Owned by the training thread."""

    def __init__(
        self,
        config: ObservabilityConfig,
        training: TrainingLoop,
        loop: LoopState,
        event_log: EventLog,
    ) -> None:
        self._config = config
        self._training = training
        self._loop = loop
        self._log = event_log
        self._built: Built | None = None

    def after_setup(self, built: Built) -> None:
        """Remember the objects that hold the state."""
        self._built = built

    def after_iteration(self, ended: EndedIteration) -> None:
        """Digest the new state, before it is evaluated, if its iteration is due."""
        interval = self._config.state_digest_interval
        if interval and ended.iteration % interval == 0:
            self._write(ended.num_samples)

    def after_training(self) -> None:
        """Digest the last state."""
        if self._config.state_digest:
            self._write(0)

    def _write(self, num_uncounted_samples: int) -> None:
        assert self._built is not None
        iteration = self._loop.iteration
        samples = self._training.sample_counters(num_uncounted_samples)
        counters = {"iteration": iteration, **samples}
        digest = digest_state(*self._built, counters)
        self._log.write(
            "state_digest", iteration, sha256=digest.sha256, sha256_all=digest.sha256_all
        )
