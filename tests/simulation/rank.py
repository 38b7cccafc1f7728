"""The main thread of a simulated rank: it calls the listeners as a training loop does, and leaves as it does.

Simulated are the loop and the model (training.py). The listeners are the product's, but for those that only
write the event log and those that react to signals.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, override

import numpy as np
import torch

from megatron.fault_tolerance.seams.iteration_seams import IterationSeams
from megatron.fault_tolerance.seams.stack import Layers
from moe_ft.engine.background import EngineEvent
from moe_ft.events import EventLog
from moe_ft.faults import Phase
from moe_ft.format.records import RandomStates
from moe_ft.loop import resumption
from moe_ft.loop.checkpoints import Checkpoints, PipelineLog
from moe_ft.loop.faults import Faults
from moe_ft.loop.leaving import BreakpointWriter
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.routers import Routers
from moe_ft.loop.training_loop import LoopParts
from moe_ft.planning.lost_tokens import Debts
from moe_ft.recovery import meet, new_record
from moe_ft.recovery.checkpointing import Checkpointing, RecoveryOutcome
from moe_ft.state import record as records
from moe_ft.state.packed_values import from_json
from moe_ft.state.random_states import encode_rng
from moe_ft.strategies import registry
from tests.simulation.active import Patches, World
from tests.simulation.model import SAMPLES_PER_ITERATION, Export
from tests.simulation.training import CapacityBoost, RouterLoad, SimulatedLoop, Training
from tests.simulation.whole import draws_of

WRITER = "writer"  # local state of a process
ITERATION_S = 0.05
STEP_S = 0.02


@dataclass(kw_only=True)
class Life:
    """Life of one rank in one start, as an observer sees it.

    Attributes:
        outcome: of the recovery, once it is over.
        replayed: iterations that were replayed.
        digests: of the state after each iteration, the recovered state included.
        tokens: ``[layer, expert]`` of this rank by the iteration that they led to, unless it was skipped.
        debts: what its stage owes before the iteration that follows one; None without a boost.
        made_up: ``[expert]`` tokens of this rank above capacities, as `tokens`, by layer name.
        states: of the rank, by iteration; for a lossy strategy alone, as `rests`.
        rests: checksums of everything but its experts, by iteration.
        reports: what the engine has reported, with the iteration at which that was seen.
        complete: iterations that this rank has known all ranks to have in memory, 0 included.
        sent: peers of this rank by the iteration that they have got.
        replicated: iterations that peers of this rank have, so many that one lost node does not matter.
        is_at_rest: whether all peers have what was complete last, and nothing is on its way to them.
        counted: iterations of the versions that this rank counts as at its peers, by unit; none if peers get
            whatever they lack.
        confirmed: newest iteration that this rank knows to be a checkpoint on storage.
        error: what has ended the rank.
        is_saved: whether training has ended and its last state is where it should be; None before.
        may_break: whether it can leave a breakpoint now, if it is asked to.
        may_lose_memory: whether all ranks have ended so that nothing in memory is needed any more.
        on_recovery: called when the recovery is over.
    """

    rank: int
    outcome: RecoveryOutcome | None = None
    replayed: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, np.ndarray] = field(default_factory=dict)
    debts: dict[int, Debts | None] = field(default_factory=dict)
    made_up: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    states: dict[int, Export] = field(default_factory=dict)
    rests: dict[int, str] = field(default_factory=dict)
    reports: list[tuple[int, EngineEvent]] = field(default_factory=list)
    complete: set[int] = field(default_factory=lambda: {0})
    sent: dict[int, set[int]] = field(default_factory=dict)
    replicated: set[int] = field(default_factory=set)
    is_at_rest: Callable[[], bool] = lambda: False
    counted: Mapping[str, int] = field(default_factory=dict)
    confirmed: int = 0
    error: BaseException | None = None
    is_saved: bool | None = None
    may_lose_memory: bool = False
    may_break: bool = False
    on_recovery: Callable[[], None] = lambda: None


class PhaseEvents(Faults):
    """Phases of recoveries and of background parts as events of the simulation, where a rank may die."""

    def __init__(self, world: World, event_log: EventLog) -> None:
        super().__init__((), event_log)
        self._world = world

    @override
    def enter_phase(self, iteration: int, phase: Phase) -> None:
        self._world.kernel.event(f"phase {phase} of {iteration}")


class ObservedCheckpoints(Checkpoints):
    """Checkpoints that tell what they do."""

    life: Life

    @property
    def running(self) -> Checkpointing:
        assert self._running is not None
        return self._running

    def restore_rng(self) -> None:
        """Restore the random numbers, where nothing is left to train."""
        if self._resumption is not None:
            self._resumption.restore_rng()

    @override
    def _note_replayed(self, iteration: int) -> None:
        self.life.replayed += 1
        super()._note_replayed(iteration)

    @override
    def _write_report(self, report: EngineEvent) -> None:
        super()._write_report(report)
        self.life.reports.append((self._loop.iteration, report))
        peers = self.running.met.peers[self.life.rank]
        if report.event == "replicate":
            sent = self.life.sent.setdefault(report.iteration, set())
            sent.update(report.fields["peers"])
            is_halved = self.running.engine._context.halves_peers
            if len(sent) > (len(peers) - 1) // 2 if is_halved else sent == set(peers):
                self.life.replicated.add(report.iteration)


class Rank:
    """One rank in one start."""

    def __init__(self, world: World, training: Training, life: Life) -> None:
        self._world, self._training, self._life = world, training, life
        self._is_exact = registry.chosen(training.config).is_exact
        self._loop: SimulatedLoop
        self._listeners: Listeners
        self._checkpoints: ObservedCheckpoints

    def run(self) -> None:
        """Train until the end; the process then ends by itself."""
        state, log = LoopState(), EventLog(Path(os.devnull), self._life.rank)
        writer = self._world.process.local[WRITER] = BreakpointWriter(state, log)
        code = 1
        try:
            self._loop = SimulatedLoop(self._world, self._training, self._life.rank)
            self._world.process.local["model"] = self._loop.model
            self._listeners = self._make_listeners(state, log, writer)
            with self._listeners, Layers() as layers:
                self._run(layers)
            code = 0
        except Exception as error:
            self._life.error = self._life.error or error
        self._world.kernel.end(self._world.process, code)

    def _make_listeners(
        self, state: LoopState, log: EventLog, writer: BreakpointWriter
    ) -> Listeners:
        config, loop = self._training.config, self._loop
        routers = Routers(config, log)
        routers._load = RouterLoad(loop.model)  # type: ignore[assignment]
        routers._boost = self._boost = CapacityBoost(loop.model)  # type: ignore[assignment]
        faults = PhaseEvents(self._world, log)
        self._checkpoints = ObservedCheckpoints(config, loop, state, log, faults, routers, writer)
        self._checkpoints.life = self._life
        pipeline_log = PipelineLog(self._checkpoints, loop, state)
        return Listeners(state, [routers, pipeline_log, self._checkpoints])

    def _run(self, layers: Layers) -> None:
        listeners = self._listeners
        try:
            self._set_up(layers)
            self._train()
            listeners.end_training()
            self._note_promises()
            self._life.is_saved = listeners.loop.is_saved
            self._life.may_break = False  # from here on breakpoints are closed
            listeners.end("finished")
            self._life.may_lose_memory = self._checkpoints._is_over
        except Exception as error:
            self._life.error = error
            listeners.failed(error)
            raise

    def _set_up(self, layers: Layers) -> None:
        listeners, loop, model = self._listeners, self._loop, self._loop.model
        listeners.before_setup()
        self._seams = IterationSeams(listeners, listeners.before_step)
        self._seams.install(model.optimizer, layers)
        listeners.after_setup(model.built, 0)
        model.position = loop.consumed  # the data iterators are built
        built, optimizer, _ = model.built
        listeners.begin_training(
            LoopParts(
                model=built, optimizer=optimizer, config=None, forward_backward=loop.links.run
            )
        )
        listeners.replay_if_due()

    def _train(self) -> None:
        outcome = self._checkpoints.running.outcome
        end = self._training.end_after(outcome.iteration)
        if outcome.iteration >= end:
            self._checkpoints.restore_rng()
            self._note_recovery(outcome)
        for iteration in range(outcome.iteration, end):
            self._listeners.begin_iteration(iteration)
            self._life.debts[iteration] = self._checkpoints.running.engine.debts
            if iteration == outcome.iteration:
                self._note_recovery(outcome)
            self._iterate()

    def _note_recovery(self, outcome: RecoveryOutcome) -> None:
        """Note that the state and the loop are what they were when the recovered state was made."""
        self._life.outcome = outcome
        self._life.is_at_rest = self._is_at_rest
        self._life.on_recovery()
        self._note(outcome.iteration)

    def _is_at_rest(self) -> bool:
        running = self._checkpoints.running
        windows, peers = running.engine._windows, running.met.peers[self._life.rank]
        is_sent = self._life.sent.get(windows.complete_iteration or 0) == set(peers)
        return not running.engine._context.halves_peers or (windows.open is None and is_sent)

    def _note(self, iteration: int) -> None:
        model = self._loop.model
        self._life.digests[iteration] = model.digest()
        self._note_parts(iteration)

    def _note_parts(self, iteration: int) -> None:
        """Note what a lossy recovery may put together with parts of other iterations."""
        if not self._is_exact:
            self._life.states[iteration] = self._loop.model.export()
            self._life.rests[iteration] = self._loop.model.digest(leaves_out_experts=True)

    def _iterate(self) -> None:
        listeners, loop, model = self._listeners, self._loop, self._loop.model
        kernel, state = self._world.kernel, listeners.loop
        kernel.sleep(ITERATION_S * kernel.random.uniform(0.5, 1.5))
        listeners.begin_attempt()
        self._seams.begin_forward()
        signal, grad_norm = loop.run_forward_backward()
        listeners.note_reduced_gradients()
        kernel.event("before step")
        iteration = state.iteration + 1
        if grad_norm is not None:
            state.grad_norm = grad_norm
            model.set_gradients(signal, grad_norm)
            made_up = self._boost.made_up()
            self._life.made_up[iteration] = {name: each.tolist() for name, each in made_up.items()}
            model.ready = partial(model.step, signal, grad_norm)
            model.in_step = (self._pause_in_step, partial(self._leave_step, iteration))
            model.optimizer.step_with_ready_grads()
            model.scheduler.step(SAMPLES_PER_ITERATION)
            self._life.tokens[iteration] = model.tokens.numpy()
        self._note(iteration)
        listeners.end_iteration({}, is_skipped=grad_norm is None, num_samples=SAMPLES_PER_ITERATION)
        loop.consumed += SAMPLES_PER_ITERATION
        self._note_promises()

    def _pause_in_step(self) -> None:
        kernel = self._world.kernel
        kernel.event("in step")
        if self._checkpoints.running.engine.breakpoints is not None:  # a writer may have to wait
            kernel.sleep(STEP_S * kernel.random.random())

    def _leave_step(self, iteration: int) -> None:
        self._note_parts(iteration)  # a rank that is told to end now leaves all of its part
        self._world.kernel.event("after step")

    def _note_promises(self) -> None:
        engine, life = self._checkpoints.running.engine, self._life
        life.complete.add(engine._windows.complete_iteration or 0)
        if self._has_parity_of_what_was_recovered():
            life.replicated.add(engine._windows.complete_iteration or 0)
        sent = getattr(engine._strategy, "_sent", None)
        if sent is not None:
            first = self._training.shape.stage_of(life.rank) * self._training.shape.layers
            life.counted = {
                str(unit): int(sent.iterations[unit.layer - first, unit.expert])
                for unit in engine._strategy.rotation.units
            }
        confirmed = engine._storage._confirmed
        life.may_break = engine.breakpoints is not None and not engine.breakpoints.is_in_use
        life.confirmed = 0 if confirmed is None else confirmed.iteration

    def _has_parity_of_what_was_recovered(self) -> bool:
        """Return whether the first window has begun, which waits until groups have parity of that before."""
        running, windows = self._checkpoints.running, self._checkpoints.running.engine._windows
        if (
            not running.met.groups or self._training.config.storage.persists
        ):  # else storage may have it
            return False
        is_first = windows.open is not None and windows.complete is None
        return is_first and not any(
            report.event in ("degraded", "skipped") and report.fields["part"] == "replicate"
            for _, report in self._life.reports
        )


def _capture_rng(world: World) -> dict[str, Any]:
    """Return the random numbers of a rank in the form of those of a real one."""
    return _random_numbers(world.process.local["model"].draws)


def _random_numbers(draws: int) -> dict[str, Any]:
    content = torch.frombuffer(bytearray(draws.to_bytes(8, "little")), dtype=torch.uint8)
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


def _apply_rng(world: World, rng: RandomStates) -> None:
    content: torch.Tensor = from_json(rng["torch"])
    world.process.local["model"].draws = int.from_bytes(content.numpy().tobytes(), "little")


def _seeded_states(world: World, seed: int) -> RandomStates:
    return encode_rng(_random_numbers(draws_of(seed)))


def install(patches: Patches) -> None:
    """Have a start read the state of simulated models."""
    patches.divert(meet, "local_parameters", _local_parameters)
    patches.divert(records, "capture_rng", _capture_rng)
    patches.divert(resumption, "current_rng", lambda world: encode_rng(_capture_rng(world)))
    patches.divert(resumption, "apply_rng", _apply_rng)
    patches.divert(new_record, "seeded_states", _seeded_states)
