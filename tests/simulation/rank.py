"""The main thread of a simulated rank: it starts checkpointing, trains, and ends as a program of a user does.

It stands for the program and for megatron/fault_tolerance, whose seams call the same functions of moe_ft at
the same moments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.background import Report
from moe_ft.engine.breakpoints import Moment
from moe_ft.faults import Phase
from moe_ft.planning.couplings import SharedWeights, report_couplings
from moe_ft.planning.experts import ExpertFacts
from moe_ft.recovery import meet
from moe_ft.recovery.checkpointing import Checkpointing, Outcome
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.failures import is_not_finite
from moe_ft.recovery.start import start
from moe_ft.state import record as records
from moe_ft.state.record import IterationFacts, LoopCounters, capture_numbers
from moe_ft.strategies import registry
from tests.simulation.active import Patches, World
from tests.simulation.leaving import Leaving
from tests.simulation.links import Links, traffic_of
from tests.simulation.model import (
    NUM_MICROBATCHES,
    SAMPLES_PER_ITERATION,
    TOKENS_PER_SAMPLE,
    Model,
)
from tests.simulation.replaying import Replaying, put_draws
from tests.simulation.shape import Shape

COLLECTIVE_TIMEOUT_S = 60.0
ITERATION_S = 0.05
STEP_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training that the ranks of a job do."""

    shape: Shape
    iterations: int
    config: MoeFtConfig
    stop_interval: int = 0
    first: str = "seed"


@dataclass(kw_only=True)
class Life:
    """Life of one rank in one start, as an observer sees it.

    Attributes:
        outcome: of the recovery, once it is over.
        replayed: iterations that were replayed.
        digests: of the state after each iteration, the recovered state included.
        tokens: ``[layer, expert]`` of this rank by the iteration that they led to, unless it was skipped.
        units: checksums of the rank's experts, by iteration and unit; for a lossy strategy alone, as `rests`.
        rests: checksums of everything else, by iteration.
        reports: what the engine has reported, with the iteration at which that was seen.
        complete: iterations that this rank has known all ranks to have in memory, 0 included.
        replicated: iterations that all peers of this rank have.
        confirmed: newest iteration that this rank knows to be a checkpoint on storage.
        error: what has ended the rank.
        is_saved: whether training has ended and its last state is where it should be; None before.
        may_break: whether it can leave a breakpoint now, if it is asked to.
        may_lose_memory: whether all ranks have ended so that nothing in memory is needed any more.
        on_recovery: called when the recovery is over.
    """

    rank: int
    outcome: Outcome | None = None
    replayed: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, np.ndarray] = field(default_factory=dict)
    units: dict[int, dict[str, str]] = field(default_factory=dict)
    rests: dict[int, str] = field(default_factory=dict)
    reports: list[tuple[int, Report]] = field(default_factory=list)
    complete: set[int] = field(default_factory=lambda: {0})
    replicated: set[int] = field(default_factory=set)
    confirmed: int = 0
    error: BaseException | None = None
    is_saved: bool | None = None
    may_lose_memory: bool = False
    may_break: bool = False
    on_recovery: Callable[[], None] = lambda: None


class Rank:
    """One rank in one start."""

    def __init__(self, world: World, training: Training, life: Life) -> None:
        self._world, self._training, self._life = world, training, life
        self._shape, self._rank = training.shape, life.rank
        self._running: Checkpointing | None = None
        self._replaying: Replaying | None = None
        self._last_facts: IterationFacts | None = None
        self._is_exact = registry.chosen(training.config).is_exact
        self._may_lose_memory, self._is_kept = False, True
        self._leaving: Leaving
        self._model: Model
        self._links: Links
        self._everyone: Any

    def run(self) -> None:
        """Train until the end; the process then ends by itself."""
        code = 1
        self._leaving = Leaving(self._world, self._rank)
        try:
            self._setup()
            self._train()
            code = 0
        except Exception as error:
            self._life.error = error
            self._leaving.fail(error)
            is_replaying = self._replaying is not None
            if self._running is not None and (is_replaying or is_not_finite(error)):
                self._running.note_failure("recovery", error)
        try:
            if self._running is not None:
                is_over = code == 0 and self._may_lose_memory and self._running.have_all_ended()
                if not is_over and not self._is_kept:
                    self._leaving.end()
                self._life.may_lose_memory = is_over
                self._running.close(removes_memory=is_over)
        except Exception as error:
            code, self._life.error = 1, self._life.error or error
        self._world.kernel.end(self._world.process, code)

    def _setup(self) -> None:
        shape, groups = self._shape, self._world.collectives
        stage, process = shape.stage_of(self._rank), self._world.process
        self._everyone = groups.new_group(process, None, COLLECTIVE_TIMEOUT_S)
        dp_cp = groups.new_group(process, shape.ranks_of(stage), COLLECTIVE_TIMEOUT_S)
        peers = shape.expert_peers(self._rank)
        expt_dp = groups.new_group(process, peers, COLLECTIVE_TIMEOUT_S)
        gather = partial(groups.exchange, dp_cp, timeout_s=COLLECTIVE_TIMEOUT_S)
        self._links = Links(self._world, shape, self._rank, COLLECTIVE_TIMEOUT_S)
        self._model = Model(shape, self._rank, gather, self._training.first)
        self._world.process.local["model"] = self._model
        facts = self._facts(dp_cp, expt_dp)
        self._running = start(self._training.config, facts, self._model.built, self._pass_phase)
        self._leaving.use(self._running)
        self._recover(self._running, gather)
        self._links.log = self._running.engine.boundary

    def _recover(self, running: Checkpointing, gather: Callable[[Any], list[Any]]) -> None:
        """Run iterations again, and set the loop to where training continues."""
        outcome = running.outcome
        if outcome.record is not None:
            self._model.consumed = outcome.record.consumed_train_samples
            window = running.take_replay()
            if window is None:
                put_draws(self._model, outcome.record)
            else:
                self._replaying = Replaying(
                    self._model, self._links, window, running.borders, gather
                )
                self._replaying.run(self._note_replayed, running.meet_before)
                self._replaying = None
            if running.is_local:
                running.wait_for_all()
        self._life.outcome = outcome
        self._life.on_recovery()
        self._note(outcome.iteration)

    def _note_replayed(self, iteration: int) -> None:
        self._life.replayed += 1
        self._pass_phase(Phase.REPLAY, iteration)

    def _facts(self, dp_cp: Any, expt_dp: Any) -> JobFacts:
        shape, training = self._shape, self._training
        has_log = training.config.memory.upstream_log
        shared = SharedWeights(num_stages=shape.stages, is_tied=False)
        return JobFacts(
            rank=self._rank,
            world_size=shape.num_ranks,
            stage=shape.stage_of(self._rank),
            places=shape.places(self._rank),
            groups=SimpleNamespace(dp_cp=dp_cp, expt_dp=expt_dp, pp=self._links.pipeline),
            fingerprint={"--seed": training.first, "--num-layers": shape.layers},
            replay_settings={},
            experts=ExpertFacts(
                num_experts=shape.experts,
                ep_rank=self._rank % shape.ep,
                ep_size=shape.ep,
                tokens_per_sample=TOKENS_PER_SAMPLE,
                planned_samples=training.iterations * SAMPLES_PER_ITERATION,
                samples_per_iteration=SAMPLES_PER_ITERATION,
            ),
            iteration=0,
            began_with="",
            is_deterministic=True,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            traffic=traffic_of(shape) if has_log else None,
            couplings=report_couplings(shared) if has_log else None,
        )

    def _pass_phase(self, phase: Phase, iteration: int) -> None:
        self._world.kernel.event(f"phase {phase} of {iteration}")

    def _note(self, iteration: int) -> None:
        model = self._model
        self._life.digests[iteration] = model.digest()
        if not self._is_exact:
            self._life.units[iteration] = {str(u): model.unit_digest(u) for u in model.experts}
            self._life.rests[iteration] = model.digest(leaves_out_experts=True)

    def _exchange(self, value: Any) -> list[Any]:
        found: list[Any] = self._world.collectives.exchange(
            self._everyone, value, timeout_s=COLLECTIVE_TIMEOUT_S
        )
        return found

    # Iterations

    def _train(self) -> None:
        running = self._running
        assert running is not None
        iteration, facts = running.outcome.iteration, None
        end = self._end_after(iteration)
        while iteration < end:
            self._leaving.loop.iteration = iteration
            began_s = self._world.kernel.now
            self._world.kernel.sleep(ITERATION_S * self._world.kernel.random.uniform(0.5, 1.5))
            grad_norm = self._iterate(running, iteration)
            iteration += 1
            facts = self._last_facts = self._iteration_facts(iteration, grad_norm)
            self._note(iteration)
            if grad_norm is not None:
                self._life.tokens[iteration] = self._model.tokens.numpy()
            capture = partial(running.capture, facts)
            if (breakpoints := running.engine.breakpoints) is not None:
                breakpoints.note(running.engine.moment(capture()))
            seconds = self._world.kernel.now - began_s
            running.engine.end_iteration(iteration, seconds, capture)
            running.engine.drain(partial(self._report, iteration))
            self._note_promises()
        facts = facts or self._iteration_facts(iteration, None)
        is_complete = iteration == self._training.iterations
        report = partial(self._report, iteration)
        ending = running.finish(iteration, facts, report, is_complete=is_complete)
        self._note_promises()
        self._life.is_saved = ending.is_saved
        self._may_lose_memory = ending.may_lose_memory(is_complete=is_complete)
        self._is_kept = ending.is_kept

    def _iterate(self, running: Checkpointing, iteration: int) -> float | None:
        """Run one iteration; return the norm of its gradients, None if they overflow."""
        model, kernel, log = self._model, self._world.kernel, running.engine.boundary
        if log is not None:
            facts = self._last_facts
            optimizer = model.optimizer
            log.begin(iteration, None if facts is None else capture_numbers(optimizer, facts))
        self._links.run(model)
        told = self._exchange((model.share(), model.norm_share()))
        shares = [each for each, _ in told]
        ranks = self._shape.ranks_of(self._shape.stage_of(self._rank))
        signal = model.reduce([shares[each] for each in ranks])
        grad_norm = None
        if not model.is_skipped(shares):
            grad_norm = model.total_norm([each for pair in told for each in pair])
        kernel.event("before step")
        if log is not None:
            log.end()
        if grad_norm is not None:
            self._step(running, iteration, signal, grad_norm)
        model.consumed += SAMPLES_PER_ITERATION
        return grad_norm

    def _step(self, running: Checkpointing, iteration: int, signal: int, grad_norm: float) -> None:
        model, kernel, breakpoints = self._model, self._world.kernel, running.engine.breakpoints
        counts = model.tokens if running.met.strategy.counted_layers else None
        running.engine.before_step(counts)
        if breakpoints is not None:
            breakpoints.begin_update()
        model.step(signal, grad_norm)
        kernel.event("in step")
        if breakpoints is not None:  # whoever wants to write one may have to wait
            kernel.sleep(STEP_S * kernel.random.random())
        model.refresh()
        for act in (lambda: kernel.event("after step"), model.sync):
            if breakpoints is not None:
                breakpoints.end_update(self._moment_ahead(running, iteration + 1, grad_norm))
            act()
        model.scheduler.step(SAMPLES_PER_ITERATION)

    def _moment_ahead(self, running: Checkpointing, iteration: int, grad_norm: float) -> Moment:
        """Return the live state as it will be when the iteration has ended."""
        facts = self._iteration_facts(iteration, grad_norm, SAMPLES_PER_ITERATION)
        return running.engine.moment(running.capture_ahead(facts, SAMPLES_PER_ITERATION))

    def _end_after(self, iteration: int) -> int:
        """Return the iteration at which a start ends that continues from one."""
        training = self._training
        if not training.stop_interval:
            return training.iterations
        return min(training.iterations, iteration + training.stop_interval)

    def _note_promises(self) -> None:
        assert self._running is not None
        engine = self._running.engine
        self._life.complete.add(engine._windows.complete_iteration or 0)
        confirmed = engine._storage._confirmed
        breakpoints = engine.breakpoints
        self._life.may_break = breakpoints is not None and not breakpoints._is_in_use
        self._life.confirmed = 0 if confirmed is None else confirmed.iteration

    def _report(self, iteration: int, report: Report) -> None:
        self._life.reports.append((iteration, report))
        assert self._running is not None
        peers = self._running.met.peers[self._rank]
        if report.event == "replicate" and set(report.fields["peers"]) == set(peers):
            self._life.replicated.add(report.iteration)

    def _iteration_facts(
        self, iteration: int, grad_norm: float | None, num_uncounted: int = 0
    ) -> IterationFacts:
        model = self._model
        names = [f"layer.{each}" for each in self._layers]
        return IterationFacts(
            iteration=iteration,
            grad_norm=grad_norm,
            num_tokens=None,
            num_floating_point_operations=0.0,
            tokens_per_expert=dict(zip(names, model.tokens, strict=True)),
            counters=LoopCounters(
                consumed_train_samples=model.consumed + num_uncounted,
                num_microbatches=NUM_MICROBATCHES,
            ),
        )

    @property
    def _layers(self) -> range:
        first = self._shape.stage_of(self._rank) * self._shape.layers
        return range(first, first + self._shape.layers)


def _capture_rng(world: World) -> dict[str, Any]:
    """Return the random numbers of a rank in the form of those of a real one."""
    draws = world.process.local["model"].draws.to_bytes(8, "little")
    content = torch.frombuffer(bytearray(draws), dtype=torch.uint8)
    return {
        "python": (3, (1, 2), None),
        "numpy": ("MT19937", np.zeros(1, dtype=np.uint32), 0, 0, 0.0),
        "torch": content,
        "device": content,
        "tracker": {},
    }


def _local_parameters(
    world: World, model: Any, optimizer: Any, places: Any, assign_slices: Callable[..., Any]
) -> Any:
    return world.process.local["model"].local_parameters(assign_slices)


def install(patches: Patches) -> None:
    """Have a start read the state of simulated models."""
    patches.divert(meet, "local_parameters", _local_parameters)
    patches.divert(records, "capture_rng", _capture_rng)
