"""Members of a round that know where their loop is."""

from megatron.fault_tolerance.repair.meet import Position
from moe_ft.keeper.rounds import Member


def position_at(iteration: int, *, is_evaluated: bool = False) -> Position:
    """Return the position of a loop in an iteration of 8 samples."""
    return Position(
        iteration=iteration,
        consumed_train_samples=iteration * 8,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_floating_point_operations_so_far=0.0,
        num_groups=9,
        do_train=True,
        do_valid=False,
        do_test=False,
        gathers_weights=False,
        evaluations_draw=False,
        is_evaluated=is_evaluated,
    )


def survivor(rank: int, iteration: int, *, is_evaluated: bool = False) -> Member:
    """Return a rank that has left an iteration, or the evaluation after it."""
    return Member(rank=rank, facts=position_at(iteration, is_evaluated=is_evaluated).facts())
