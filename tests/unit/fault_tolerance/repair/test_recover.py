"""Training data after a repair begin after the samples that are counted, in the same iterator."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, override

import pytest
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.training import training

from megatron.fault_tolerance.repair import recover
from megatron.fault_tolerance.repair.meet import Done
from megatron.fault_tolerance.repair.recover import (
    Batches,
    most_iteration,
    training_batches,
    validation_batches,
)
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.config.flag_table import flag_classes
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.errors import ConfigError, RepairError, UnrecoverableError
from moe_ft.loop.listeners import Built, Listeners, LoopListener, LoopState
from moe_ft.loop.training_loop import LoopParts
from tests.unit.fault_tolerance.repair.members import position_at


@pytest.fixture
def loop(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Yield the arguments of a loop whose loaders are the rest of their data sets."""
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(
        training, "build_pretraining_data_loader", lambda data_set, consumed: data_set[consumed:]
    )
    loop_args.dataloader_type = "single"
    yield loop_args
    destroy_rerun_state_machine()


def noted(monkeypatch: pytest.MonkeyPatch, batches: Batches, built: Sequence[Any]) -> Batches:
    """Have these loaders be built, once for each virtual stage."""
    loaders = iter(built)
    monkeypatch.setattr(training, "build_train_valid_test_data_loaders", lambda: next(loaders))
    with Patches() as patches:
        batches.install(patches)
        for _ in built:
            training.build_train_valid_test_data_loaders()
    return batches


def of_training(data_set: list[int] | None) -> Any:
    return (data_set and Namespace(dataset=data_set), None, None)


@pytest.mark.parametrize(("kind", "following"), [("single", [6, 7]), ("cyclic", [6, 7, 6])])
def test_iterator_of_the_loop_continues_with_the_counted_samples(
    kind: str, following: list[int], loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.dataloader_type = kind
    batches = noted(monkeypatch, training_batches(), [of_training(list(range(8)))])
    iterator = RerunDataIterator(iter(range(8)))
    assert [next(iterator), next(iterator)] == [0, 1]
    loop.consumed_train_samples = 6
    batches.renew(iterator)
    assert [next(iterator) for _ in following] == following
    assert iterator.saved_microbatches == following, "nothing of the broken iteration is left"


def test_each_virtual_stage_continues_with_its_own_data_if_it_reads_any(
    loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.consumed_train_samples = 2
    built = [of_training([0, 1, 2]), of_training(None), of_training([10, 11, 12])]
    iterators = [RerunDataIterator(iter([])), None, RerunDataIterator(iter([]))]
    noted(monkeypatch, training_batches(), built).renew(iterators)
    assert [next(each) for each in iterators if each is not None] == [2, 12]


@pytest.mark.parametrize("loaders", [None, [None]])
def test_validation_continues_with_its_own_count_on_ranks_that_read_it(
    loaders: list[None] | None, loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.consumed_train_samples, loop.consumed_valid_samples = 2, 3
    built = [(None, each, None) for each in (loaders, [Namespace(dataset=[0, 1, 2, 3])])]
    iterator = RerunDataIterator(iter([]))
    noted(monkeypatch, validation_batches(), built).renew([None, iterator])
    assert next(iterator) == 3


def test_flags_that_ask_for_more_exist() -> None:
    ours = {f"moe_ft_{each.name}" for each in fields(ObservabilityConfig)}
    assert set(recover._NEEDING_MORE) <= {*flag_classes(), *ours}


def test_state_after_the_broken_iteration_is_recovered_only_where_all_can_have_its_result() -> None:
    def most(*iterations: int, done: Done = Done.NOTHING, **flags: bool) -> int:
        positions = [position_at(each, done=done) for each in iterations]
        return most_iteration(positions, Namespace(**flags))

    assert most(4, 4) == 5
    assert most(4, 5) == 4
    assert most(4, 4, log_num_zeros_in_grad=True) == 4
    assert most(4, 4, done=Done.STEP) == 4, "its result was returned before"


class _Failing(LoopListener):
    """Cannot recover."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @override
    def after_setup(self, built: Built) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UnrecoverableError("all is lost"), "found no state to continue from: all is lost"),
        (ConfigError("node n2 has no room"), "cannot take up the state: node n2 has no room"),
    ],
)
def test_repair_that_cannot_recover_is_no_refusal_of_the_job_and_says_what_is_true(
    error: Exception, words: str, loop: Namespace
) -> None:
    listeners, position = Listeners(LoopState(), [_Failing(error)]), position_at(4)
    parts = LoopParts(model=[], optimizer=None, config=None, forward_backward=print)
    with pytest.raises(RepairError, match=words):
        recover.recover(listeners, training_batches(), ([], None, None), parts, [position])
    assert listeners.loop.most_iteration == 5, "all know the result of the broken iteration"
