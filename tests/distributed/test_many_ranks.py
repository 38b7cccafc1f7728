"""Requests of many ranks of the real control plane to the job's store: none grow with their square."""

import pytest

from tests.many_ranks import RANKS_PER_NODE, measure
from tests.shares import share_of

# Of a rank in a repair: it joins, is ready and has finished; it learns that the round has begun, on two
# connections, who takes part, and that all are ready.
WRITES, ANSWERS, MOST_BYTES = 3, 4, 1400
REPLACEMENTS = (
    16 * RANKS_PER_NODE
)  # requests more of those whose node was lost, and of their neighbours


@pytest.mark.parametrize("num_ranks", share_of((512, 2048), 512))
def test_rank_asks_the_store_as_often_in_a_repair_however_many_others_there_are(
    num_ranks: int,
) -> None:
    start, repair = measure(num_ranks)
    assert start.writes + start.answers <= RANKS_PER_NODE, "rank 0 tells that they train"
    assert repair.writes <= WRITES * num_ranks + REPLACEMENTS
    assert repair.answers <= ANSWERS * num_ranks + REPLACEMENTS
    assert repair.num_bytes <= MOST_BYTES * num_ranks
