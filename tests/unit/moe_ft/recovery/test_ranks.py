"""Groups of ranks: a check that fails on one rank fails on all of them."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.errors import ConfigError, StorageAwayError
from moe_ft.recovery.meet import Ranks, join_ranks
from tests.unit.moe_ft.recovery.meetings import facts_of
from tests.unit.moe_ft.together import run_together

NUM_RANKS = 3
Gather = Callable[[Any], list[Any]]


class _Threads(Agreement):
    """Agreement among ranks that are threads."""

    def __init__(self, gather: Gather) -> None:
        super().__init__(1.0)
        self._gather = gather

    def gather(self, value: Any) -> list[Any]:
        return self._gather(value)


def check_on_all(check: Callable[[int], str]) -> list[str]:
    """Return what each rank gets of a check: its answer, or the message of a refusal."""

    def run(rank: int, gather: Gather) -> str:
        ranks = Ranks(everyone=_Threads(gather), stage=StageSum(1.0))
        try:
            return ranks.check_together(lambda: check(rank))
        except ConfigError as error:
            return f"refused: {error}"

    return run_together(NUM_RANKS, run)


def test_each_rank_gets_its_own_answer_of_a_check_that_all_pass() -> None:
    assert check_on_all(lambda rank: f"answer {rank}") == ["answer 0", "answer 1", "answer 2"]


def test_check_that_fails_on_one_rank_is_refused_by_all_with_its_message() -> None:
    def check(rank: int) -> str:
        if rank == 1:
            raise ConfigError("--flag=1 is wrong")
        return "answer"

    assert check_on_all(check) == ["refused: --flag=1 is wrong"] * NUM_RANKS


def test_check_that_fails_for_storage_on_one_rank_is_refused_as_such_by_all() -> None:
    def run(rank: int, gather: Gather) -> None:
        def check() -> None:
            if rank == 2:
                raise StorageAwayError("full")

        with pytest.raises(StorageAwayError, match="full"):
            Ranks(everyone=_Threads(gather), stage=StageSum(1.0)).check_together(check)

    run_together(NUM_RANKS, run)


def test_of_several_messages_all_ranks_raise_that_of_the_lowest_rank() -> None:
    def check(rank: int) -> str:
        if rank > 0:
            raise ConfigError(f"node {rank} is full")
        return "answer"

    assert check_on_all(check) == ["refused: node 1 is full"] * NUM_RANKS


def test_only_rank_of_a_job_exchanges_values_with_itself_until_the_groups_are_closed() -> None:
    with ExitStack() as opened:
        ranks = join_ranks(facts_of(), opened)
        assert ranks.everyone.gather("value") == ["value"]
        assert ranks.stage.gather("value") == ["value"]
        assert ranks.check_together(lambda: 7) == 7
    for group in (ranks.everyone, ranks.stage):
        with pytest.raises(AssertionError):
            group.gather("value")
