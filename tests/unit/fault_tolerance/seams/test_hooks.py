"""Seams call the listeners as Megatron's loop runs, and are removed at the end."""

import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer import cuda_graphs
from megatron.training import training

from megatron.fault_tolerance.seams import hooks
from moe_ft.faults import Phase, Section
from moe_ft.files.progress import excused_until_s, progress_s
from moe_ft.loop.listeners import Built, Listeners, LoopListener, LoopState
from moe_ft.loop.training_loop import LoopParts

SEAMS = (
    *("setup_model_and_optimizer", "train_step", "dummy_train_step", "train"),
    *("evaluate", "save_checkpoint"),
)


class _Recorder(LoopListener):
    """A listener that notes the seams it passes."""

    def __init__(self, loop: LoopState) -> None:
        self.loop, self.seams = loop, list[str]()
        self.waits_in: Phase | None = None

    def after_setup(self, built: Built) -> None:
        self.seams.append(f"setup {self.loop.iteration}")

    def begin_training(self, parts: LoopParts) -> None:
        self.seams.append(f"train {parts.data_iterator}")

    def before_batch(self) -> None:
        self.seams.append("batch")

    def begin_iteration(self) -> None:
        self.seams.append(f"iteration {self.loop.iteration}")

    def begin_attempt(self) -> None:
        self.seams.append("attempt")

    def waits_for(self, iteration: int, phase: Phase) -> bool:
        return phase is self.waits_in

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        self.seams.append(f"{phase}{' torn' * self.loop.is_torn}")

    def before_capture(self) -> None:
        self.seams.append("in a capture" if cuda_graphs.is_graph_capturing() else "before one")

    def begin_update(self) -> None:
        self.seams.append("update")

    def end_update(self) -> None:
        self.seams.append("end of update")

    def end_training(self) -> None:
        self.seams.append("end of training")

    def end(self, reason: str, exit_code: int) -> None:
        self.seams.append(f"{reason}, {exit_code}")

    def failed(self, error: Exception) -> None:
        self.seams.append(type(error).__name__)


class Program:
    """A model of one weight that Megatron's wrapped functions train, as its loop calls them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = LoopState()
        self.recorder = _Recorder(self.loop)
        self.listeners = Listeners(self.loop, [self.recorder])
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = _Optimizer(self.weight)
        self.config = Namespace(calculate_per_token_loss=True, finalize_model_grads_func=_finalize)
        self.num_attempts, self.should_exit = 1, False
        built: Built = ([], self.optimizer, None)
        monkeypatch.setattr(training, "setup_model_and_optimizer", lambda: built)
        monkeypatch.setattr(training, "train_step", self._train_step)
        monkeypatch.setattr(training, "dummy_train_step", lambda *args: None)
        monkeypatch.setattr(training, "train", self._train)

    def forward_step(self, *_: Any) -> tuple[torch.Tensor, None]:
        """Return an output that needs gradients."""
        return self.weight * 2, None

    def _train_step(self, forward_step: Any, *args: Any, iteration: int) -> tuple[Any, ...]:
        for _ in range(self.num_attempts):
            self.optimizer.zero_grad()
            output, _ = forward_step(None, None)
            output.sum().backward()
        args[4].finalize_model_grads_func([], torch.tensor(11))
        if not self.should_exit:
            self.optimizer.get_grad_norm()
            self.optimizer.step_with_ready_grads()
        exit_code = 17 if self.should_exit else 0
        return {"lm loss": torch.zeros(1)}, 0, False, self.should_exit, exit_code

    def _train(self, *args: Any) -> str:
        training.dummy_train_step(None)
        self.run_iteration(3)
        return "trained"

    def run_iteration(self, iteration: int) -> None:
        """Call the wrapped train_step as Megatron's loop does."""
        parts: tuple[Any, ...] = (None, [], self.optimizer, None, self.config, None)
        training.train_step(self.forward_step, *parts, iteration=iteration)

    def train(self) -> Any:
        """Call the wrapped train."""
        data, config = "data", self.config
        return training.train(self.forward_step, [], self.optimizer, None, data, None, None, config)

    def setup(self) -> None:
        """Call the wrapped function that builds the optimizer."""
        training.setup_model_and_optimizer()


def _finalize(model: Any, num_tokens: torch.Tensor) -> None:
    num_tokens += 100  # of the other ranks, in place


class _Optimizer:
    """As much of Megatron's outermost optimizer as the seams use, around one of torch's."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.optimizer = torch.optim.SGD([weight], lr=0.5)
        self.chained_optimizers = [self]
        self.gather: Callable[[], None] = lambda: None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def get_grad_norm(self) -> float:
        return 1.25

    def step_with_ready_grads(self) -> bool:
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        self.gather()
        return True

    def _copy_main_params_to_model_params(self) -> None: ...


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, loop_args: Namespace) -> Iterator[Program]:
    loop_args.iteration = 2
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 1)
    yield Program(monkeypatch)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_originals_are_back_after_an_error(error: type[BaseException], program: Program) -> None:
    originals = [getattr(training, name) for name in SEAMS]
    told: list[Any] = []
    with (
        pytest.raises(error),
        hooks.installed(program.listeners, lambda *values: told.append(values)),
    ):
        wrapped = [getattr(training, name) for name in SEAMS]
        program.setup()
        raise error
    assert told == [(([], program.optimizer, None), 2)], "the setup was left to somebody else"
    ends = {ZeroDivisionError: ["ZeroDivisionError"], SystemExit: ["exit flag, 0"]}
    assert program.recorder.seams == ends.get(error, [])
    assert not {*wrapped} & {*originals}
    assert [getattr(training, name) for name in SEAMS] == originals
    assert (
        not {"zero_grad", "get_grad_norm", "step_with_ready_grads"} & vars(program.optimizer).keys()
    )


def test_seams_of_a_run_are_passed_in_their_order(program: Program) -> None:
    with hooks.installed(program.listeners):
        program.setup()
        assert program.train() == "trained"
    assert program.recorder.seams == [
        *("setup 2", "train data"),
        *("batch", "batch", "iteration 3"),
        *("attempt", "forward", "backward", "before-step", "update", "end of update"),
        *("after-step", "between"),
        *("end of training", "finished, 0"),
    ]


class _Sections(LoopListener):
    """A listener that notes the sections of the loop."""

    def __init__(self) -> None:
        self.entered: list[Section] = []

    def enter_section(self, section: Section) -> None:
        self.entered.append(section)


def test_sections_of_the_loop_are_told_and_an_evaluation_gets_further_with_each_forward_pass(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, thread = _Sections(), threading.get_ident()
    program.listeners = Listeners(program.loop, [sections])
    seen_s: list[float] = []

    def evaluate(forward_step: Any, *given: Any) -> None:
        assert program.loop.section is Section.EVALUATION
        for _ in range(2):
            seen_s.append(progress_s(thread))
            forward_step(None, None)

    monkeypatch.setattr(training, "evaluate", evaluate)
    monkeypatch.setattr(training, "save_checkpoint", lambda: None)
    monkeypatch.setattr(training, "dummy_train_step", lambda *_: training.save_checkpoint())
    with hooks.installed(program.listeners):
        program.setup()
        assert program.loop.is_first
        program.run_iteration(1)
        training.evaluate(program.forward_step, None)
        assert program.train() == "trained"
        assert not program.loop.is_first
        program.listeners.suspend(4)
        assert program.loop.is_first
    assert sections.entered == [
        *(Section.ITERATION, Section.BETWEEN, Section.EVALUATION, Section.BETWEEN),
        *(Section.CHECKPOINT, Section.BETWEEN, Section.ITERATION, Section.BETWEEN),
        *(Section.EXIT, Section.SETUP),
    ]
    assert program.loop.num_passes == {
        Section.ITERATION: 2,
        Section.BETWEEN: 1,
        Section.EVALUATION: 1,
        Section.CHECKPOINT: 1,
    }
    assert seen_s[1] > seen_s[0]


def test_read_of_a_batch_excuses_the_thread_for_less_than_the_groups_wait(
    program: Program, loop_args: Namespace
) -> None:
    loop_args.distributed_timeout_seconds_after_init = 70

    def look() -> Iterator[float]:
        yield excused_until_s(threading.get_ident()) - time.monotonic()

    original = RerunDataIterator.__next__
    with hooks.installed(program.listeners):
        assert 60 < next(RerunDataIterator(look())) <= 70
    assert RerunDataIterator.__next__ is original


def test_every_attempt_at_an_iteration_is_told_and_its_phases_only_once(program: Program) -> None:
    program.num_attempts = 2
    with hooks.installed(program.listeners):
        program.setup()
        program.run_iteration(0)
    assert program.recorder.seams.count("attempt") == 2
    assert program.recorder.seams.count("forward") == 1
    assert program.recorder.seams.count("backward") == 1


def test_inner_step_is_noticed_only_where_something_waits_there(program: Program) -> None:
    with hooks.installed(program.listeners):
        program.setup()
        program.recorder.waits_in = Phase.IN_STEP
        program.run_iteration(0)
        program.recorder.waits_in = None
        program.run_iteration(1)
    noticed = [each for each in program.recorder.seams if each.startswith("in-step")]
    assert noticed == ["in-step torn"]
    assert not program.loop.is_torn


def test_update_has_ended_before_the_gather_of_weights_in_which_the_rank_may_hang(
    program: Program,
) -> None:
    at_gather: list[str] = []
    program.optimizer.gather = lambda: at_gather.extend(program.recorder.seams[-2:])
    with hooks.installed(program.listeners):
        program.setup()
        program.optimizer._copy_main_params_to_model_params()  # outside of a step
        assert "end of update" not in program.recorder.seams
        program.run_iteration(0)
    assert at_gather == ["update", "end of update"]
    assert program.recorder.seams.count("end of update") == 1


def test_listeners_are_told_before_layers_are_captured(program: Program) -> None:
    with hooks.installed(program.listeners):
        cuda_graphs._set_capture_start()
    is_capturing = cuda_graphs.is_graph_capturing()
    cuda_graphs._set_capture_end()
    assert is_capturing and program.recorder.seams[0] == "before one"


def test_tokens_and_norm_of_the_iteration_are_noted_as_megatron_uses_them(program: Program) -> None:
    with hooks.installed(program.listeners):
        program.setup()
        program.run_iteration(0)
    assert program.loop.num_tokens == torch.tensor(111)
    assert program.loop.grad_norm == 1.25
    assert program.config.finalize_model_grads_func is _finalize


def test_replayed_step_enters_no_phase(program: Program) -> None:
    with hooks.installed(program.listeners):
        program.setup()
        program.loop.is_replaying = True
        program.recorder.seams.clear()
        program.optimizer.step_with_ready_grads()
        assert program.recorder.seams == []
        assert not program.loop.is_torn


def test_exit_in_the_middle_of_an_iteration_does_not_end_it(program: Program) -> None:
    program.should_exit = True
    with hooks.installed(program.listeners):
        program.setup()
        program.run_iteration(0)
    assert program.loop.is_in_iteration
    assert "between" not in program.recorder.seams


@pytest.mark.parametrize(
    ("code", "end"), [(None, "exit flag, 0"), (0, "exit flag, 0"), (3, "exit code 3, 3")]
)
def test_exit_ends_training_and_the_run_with_its_code(
    code: int | None, end: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*args: Any) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(training, "dummy_train_step", leave)
    with pytest.raises(SystemExit), hooks.installed(program.listeners):
        program.train()
    assert program.recorder.seams[-2:] == ["end of training", end]
