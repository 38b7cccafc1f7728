"""Position of the loop goes from a survivor to a replacement, and on through iterations."""

from argparse import Namespace

import pytest
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import (
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.fault_tolerance.repair.position import (
    Position,
    begin_iteration,
    count_iteration,
    position_of,
    position_of_survivors,
)
from moe_ft.errors import RepairError
from moe_ft.keeper.rounds import Member
from tests.unit.fault_tolerance.repair.members import survivor


def test_replacement_begins_where_the_survivors_are(loop_args: Namespace) -> None:
    loop_args.consumed_train_samples, loop_args.consumed_valid_samples = 40, 16
    loop_args.num_floating_point_operations_so_far = 2.5
    loop_args.do_train, loop_args.do_valid, loop_args.do_test = True, 1, False
    facts = position_of(
        loop_args, 5, num_groups=12, model=[Namespace()], evaluations_draw=False
    ).facts()
    loop_args.consumed_train_samples = loop_args.consumed_valid_samples = 0
    del loop_args.do_train, loop_args.do_valid, loop_args.do_test  # they are set with the data
    position = Position(**facts)
    position.set_counters(loop_args)
    assert (loop_args.iteration, loop_args.curr_iteration) == (5, 5)
    assert (loop_args.consumed_train_samples, loop_args.consumed_valid_samples) == (40, 16)
    assert loop_args.num_floating_point_operations_so_far == 2.5
    assert (loop_args.do_train, loop_args.do_valid, loop_args.do_test) == (True, True, False)
    assert position.num_groups == 12


@pytest.mark.parametrize("hooks", [{}, {"module": "hook"}])
def test_replacement_learns_whether_modules_gather_their_weights(
    hooks: dict[str, str], loop_args: Namespace
) -> None:
    model = [Namespace(remove_forward_pre_hook_handles=hooks)]
    assert position_of(
        loop_args, 5, num_groups=12, model=model, evaluations_draw=False
    ).gathers_weights is bool(hooks)


def test_iterations_are_counted_as_the_loop_counts_them(loop_args: Namespace) -> None:
    initialize_rerun_state_machine()
    try:
        begin_iteration(loop_args, 7)
        assert get_rerun_state_machine().current_iteration == 7
    finally:
        destroy_rerun_state_machine()
    assert loop_args.curr_iteration == 7
    count_iteration(loop_args)
    assert loop_args.consumed_train_samples == loop_args.global_batch_size
    assert loop_args.skipped_train_samples == 0
    count_iteration(loop_args, is_skipped=True)
    assert loop_args.consumed_train_samples == 2 * loop_args.global_batch_size
    assert loop_args.skipped_train_samples == loop_args.global_batch_size
    assert get_num_microbatches() == 2


def test_replacement_begins_at_the_latest_iteration_of_the_survivors() -> None:
    dead = Member(rank=1, died_s=5.0)
    position = position_of_survivors([survivor(0, 4), dead, survivor(2, 5)])
    assert (position.iteration, position.consumed_train_samples) == (5, 40)


def test_members_that_do_not_fit_together_end_the_repair() -> None:
    dead = Member(rank=1, died_s=5.0)
    with pytest.raises(RepairError, match="all ranks have died"):
        position_of_survivors([dead])
    with pytest.raises(RepairError, match="some ranks were in an evaluation, and others were not"):
        position_of_survivors([survivor(0, 4), dead, survivor(2, 4, is_evaluated=True)])
