"""The majority names the rank whose weights differ; what several groups have in common decides the rest."""

import random
from collections.abc import Mapping

import pytest

from moe_ft.loop.weight_check import accused, suspects_of


@pytest.mark.parametrize(
    ("sums", "suspects", "is_decided"),
    [
        ({3: 7}, set(), True),
        ({0: 7, 1: 7}, set(), True),
        ({0: 7, 1: 8}, {0, 1}, False),
        ({0: 7, 1: 8, 2: 7}, {1}, True),
        ({0: 7, 1: 8, 2: 9}, {0, 1, 2}, False),
        ({0: 7, 1: 8, 2: 7, 3: 8}, {0, 1, 2, 3}, False),
        ({0: 7, 1: 8, 2: 7, 3: 9, 4: 7}, {1, 3}, True),
    ],
)
def test_majority_names_those_that_differ(
    sums: Mapping[int, int], suspects: set[int], is_decided: bool
) -> None:
    assert suspects_of(sums) == (suspects, is_decided)


@pytest.mark.parametrize(
    ("groups", "ranks", "is_decided"),
    [
        ([{0: 1, 1: 1}], [], True),
        ([{0: 1, 1: 2}], [0, 1], False),
        ([{0: 1, 1: 2}, {1: 5, 3: 6}], [1], True),  # the only rank that both groups have
        ([{0: 1, 1: 2}, {2: 5, 3: 6}], [0, 1, 2, 3], False),  # no single one explains them
        ([{0: 1, 1: 2}, {0: 1, 1: 2}], [0, 1], False),
        ([{0: 1, 1: 2}, {1: 5, 2: 6, 3: 6}], [1], True),
        ([{0: 1, 1: 2, 2: 1}, {3: 5, 4: 6, 5: 6}], [1, 3], True),
    ],
)
def test_groups_together_name_the_ranks(
    groups: list[dict[int, int]], ranks: list[int], is_decided: bool
) -> None:
    assert accused(groups) == (ranks, is_decided)


@pytest.mark.parametrize("seed", range(200))
def test_one_corrupt_rank_of_a_grid_is_never_missed_and_others_never_decided_on(seed: int) -> None:
    draw = random.Random(seed)
    num_rows, num_columns = draw.randint(1, 4), draw.randint(1, 4)
    corrupt = draw.randrange(num_rows * num_columns)
    groups = []
    for row in range(num_rows):  # data-parallel copies
        groups.append([row * num_columns + column for column in range(num_columns)])
    for column in range(num_columns):  # tensor-parallel ranks
        groups.append([row * num_columns + column for row in range(num_rows)])
    sums = [{rank: int(rank == corrupt) for rank in group} for group in groups]
    ranks, is_decided = accused(sums)
    if num_rows * num_columns == 1:
        assert ranks == []
    elif is_decided:
        assert ranks == [corrupt]
    else:
        assert corrupt in ranks and len(ranks) == 2, "two copies, and no further group"
