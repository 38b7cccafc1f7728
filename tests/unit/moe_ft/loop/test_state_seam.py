"""The engine acts on every state once, with the facts that its record needs."""

from argparse import Namespace

import pytest
import torch

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.loop.checkpoints import StateSeam
from moe_ft.loop.listeners import LoopState
from moe_ft.state.record import IterationFacts
from tests.unit.fault_tolerance.loops import ended

TOKENS = {"layer.0": torch.tensor([5, 3])}


class _Engine:
    """Keeps the states that it is asked to act on; training stands still for 0.25 seconds each."""

    def __init__(self) -> None:
        self.acted: list[IterationFacts] = []
        self.seconds: list[float] = []

    def act(self, facts: IterationFacts, iteration_s: float) -> float:
        self.acted.append(facts)
        self.seconds.append(iteration_s)
        return 0.25


class Run:
    """An engine at the seam of a loop that has made the state of iteration 6."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.engine = args, _Engine()
        self.loop = LoopState(iteration=6, grad_norm=1.5)
        self.seam = StateSeam(MegatronLoop(), self.loop, self.engine.act, lambda: TOKENS)


@pytest.fixture
def run(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(MegatronLoop, "num_operations_of", lambda loop, samples: 50.0 * samples)
    loop_args.num_floating_point_operations_so_far = 1000.0
    return Run(loop_args)


def test_state_is_passed_at_once_with_samples_that_the_loop_has_not_counted(run: Run) -> None:
    run.args.consumed_train_samples = 40
    run.seam.end_iteration(ended(6))
    (facts,) = run.engine.acted
    assert (facts.iteration, facts.counters.consumed_train_samples, facts.grad_norm) == (6, 48, 1.5)
    assert facts.counters.num_microbatches == 2
    assert facts.tokens_per_expert is TOKENS
    assert run.engine.seconds == [2.0]
    assert run.loop.stall_s == 0.25


def test_operations_are_added_to_the_count_of_earlier_starts(run: Run) -> None:
    for iteration in (6, 7):
        run.seam.end_iteration(ended(iteration))
    found = [facts.num_floating_point_operations for facts in run.engine.acted]
    assert found == [1400.0, 1800.0]


def test_state_that_is_evaluated_is_passed_when_the_loop_continues(run: Run) -> None:
    run.args.do_valid = True
    run.seam.end_iteration(ended(6))
    assert run.engine.acted == []
    assert run.loop.stall_s == 0.0
    run.args.consumed_train_samples, run.args.consumed_valid_samples = 48, 4  # by the loop
    for _ in range(2):  # once is enough
        run.seam.pass_postponed()
    (facts,) = run.engine.acted
    assert facts.iteration == 6
    counters = facts.counters
    assert (counters.consumed_train_samples, counters.consumed_valid_samples) == (48, 4)
    assert run.engine.seconds == [2.0]
    assert run.loop.stall_s == 0.25


@pytest.mark.parametrize("flags", [{"save": "folder", "save_interval": 3}, {"exit_interval": 6}])
def test_state_that_is_saved_or_the_last_is_passed_when_that_is_over(
    run: Run, flags: dict[str, object]
) -> None:
    vars(run.args).update(flags)
    assert run.seam.facts_ahead(8) is not None
    run.loop.iteration = 5
    assert run.seam.facts_ahead(8) is None
    run.loop.iteration = 6
    run.seam.end_iteration(ended(6))
    assert run.engine.acted == []
    run.seam.pass_postponed()
    assert [facts.iteration for facts in run.engine.acted] == [6]


def test_last_facts_do_not_include_a_batch_that_was_skipped_later(run: Run) -> None:
    run.args.consumed_train_samples = 40
    run.seam.end_iteration(ended(6))
    run.args.consumed_train_samples = 56  # 8 of the iteration, 8 of a skipped batch
    assert run.seam.last_facts() is run.engine.acted[0]
    assert run.seam.last_facts().counters.consumed_train_samples == 48


def test_last_facts_are_the_current_ones_if_nothing_was_trained(run: Run) -> None:
    run.args.consumed_train_samples = 40
    facts = run.seam.last_facts()
    assert (facts.iteration, facts.counters.consumed_train_samples) == (6, 40)
    assert facts.num_floating_point_operations == 1000.0
