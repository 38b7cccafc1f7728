"""The optimizer step of any loop is prepared, watched and marked; a replay passes unseen."""

from collections.abc import Iterator

import pytest
import torch

from megatron.fault_tolerance.seams.optimizer_seams import OptimizerSeams
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.faults import Phase
from moe_ft.loop.listeners import Listeners, LoopListener, LoopState


class Optimizer:
    """As much of Megatron's outermost optimizer as the seams use, around one of torch's."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.optimizer = torch.optim.SGD([weight], lr=0.5)
        self.chained_optimizers = [self]

    def get_grad_norm(self) -> float:
        """Return a norm."""
        return 1.25

    def step_with_ready_grads(self) -> bool:
        """Step, then copy the masters."""
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        return True

    def _copy_main_params_to_model_params(self) -> None: ...


class Recorder(LoopListener):
    """Notes the phases, and whether the state is torn there."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self.seen: list[tuple[str, bool]] = []
        self.awaited: Phase | None = None
        self.updates: list[str] = []

    def waits_for(self, iteration: int, phase: Phase) -> bool:
        """Return whether a test waits for the phase."""
        return phase is self.awaited

    def begin_update(self) -> None:
        """Note it."""
        self.updates.append("begin")

    def end_update(self) -> None:
        """Note it."""
        self.updates.append("end")

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        """Note it."""
        self.seen.append((phase.value, self._loop.is_torn))


class Step:
    """An optimizer whose step is watched."""

    def __init__(self) -> None:
        self.loop = LoopState()
        self.recorder = Recorder(self.loop)
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.weight.grad = torch.ones(1)
        self.optimizer = Optimizer(self.weight)
        self.patches = Patches()
        self.prepared: list[float] = []
        listeners = Listeners(self.loop, [self.recorder])
        seams = OptimizerSeams(listeners, lambda: self.prepared.append(float(self.weight.detach())))
        seams.install(self.optimizer, self.patches)


@pytest.fixture
def step() -> Iterator[Step]:
    watched = Step()
    yield watched
    watched.patches.__exit__()


def test_loop_is_asked_before_any_weight_changes(step: Step) -> None:
    assert step.optimizer.step_with_ready_grads()
    assert step.prepared == [1.0]
    assert float(step.weight.detach()) == 0.5
    assert step.recorder.seen == [("after-step", False)]


def test_loop_that_is_not_ready_keeps_the_weights(step: Step) -> None:
    def refuse() -> None:
        raise ValueError

    listeners = Listeners(step.loop, [])
    with pytest.raises(ValueError), Patches() as patches:
        OptimizerSeams(listeners, refuse).install(step.optimizer, patches)
        step.optimizer.step_with_ready_grads()
    assert float(step.weight.detach()) == 1.0


def test_state_is_torn_between_the_inner_step_and_the_copy(step: Step) -> None:
    step.recorder.awaited = Phase.IN_STEP
    step.optimizer.step_with_ready_grads()
    assert step.recorder.seen == [("in-step", True), ("after-step", False)]


def test_norm_is_noted_as_clipping_uses_it(step: Step) -> None:
    assert step.optimizer.get_grad_norm() == 1.25
    assert step.loop.grad_norm == 1.25


def test_replayed_step_asks_nobody(step: Step) -> None:
    step.loop.is_replaying = True
    step.optimizer.step_with_ready_grads()
    assert (step.prepared, step.recorder.seen) == ([], [])
    assert not step.loop.is_torn


def test_originals_are_put_back(step: Step) -> None:
    step.patches.__exit__()
    assert not {"get_grad_norm", "step_with_ready_grads"} & vars(step.optimizer).keys()


def test_update_begins_and_ends_once_and_before_what_follows_in_the_step(step: Step) -> None:
    original = step.optimizer.step_with_ready_grads
    at_end: list[list[str]] = []
    with Patches() as patches:
        copy = step.optimizer._copy_main_params_to_model_params

        def copy_and_gather() -> None:
            copy()
            at_end.append(list(step.recorder.updates))  # here the gather of weights may hang

        patches.set(step.optimizer, "_copy_main_params_to_model_params", copy_and_gather)
        original()
    assert at_end == [["begin", "end"]]
    assert step.recorder.updates == ["begin", "end"]


def test_update_in_a_replay_passes_unseen(step: Step) -> None:
    step.loop.is_replaying = True
    step.optimizer.step_with_ready_grads()
    assert step.recorder.updates == []
    assert not step.loop.is_torn


def test_copy_of_masters_outside_a_step_ends_no_update(step: Step) -> None:
    step.optimizer._copy_main_params_to_model_params()
    assert step.recorder.updates == []


def test_state_is_not_torn_while_the_update_waits_to_begin(step: Step) -> None:
    torn: list[bool] = []

    class Waiting(LoopListener):
        def begin_update(self) -> None:
            torn.append(step.loop.is_torn)

    Listeners(step.loop, [Waiting()]).begin_update()
    assert torn == [False]
    assert step.loop.is_torn
