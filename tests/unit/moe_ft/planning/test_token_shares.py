"""No token is lost or made, and no replica gets one more than its share."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.slot_tables import Numbers, share_of


def shares(tokens: Numbers, replicas: Numbers) -> Numbers:
    """Return ``[expert, source, destination]`` of all ranks, which agree on what each gets."""
    found = [share_of(tokens, replicas, source) for source in range(len(tokens))]
    sent = np.stack([own for own, _ in found], axis=1)
    for _, received in found:
        assert (received == sent.sum(axis=(0, 1))).all()
    return sent


@st.composite
def dispatches(draw: st.DrawFn) -> tuple[Numbers, Numbers]:
    """Tokens [source, expert] and replicas [expert, rank], each expert with one at least."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    most = draw(st.sampled_from([1, 3, 100, 10**6]))
    tokens = generator.integers(0, most, (num_ranks, num_experts), endpoint=True)
    replicas = generator.integers(0, 3, (num_experts, num_ranks), endpoint=True)
    replicas[np.arange(num_experts), generator.integers(0, num_ranks, num_experts)] += 1
    return tokens, replicas


@given(dispatches())
def test_every_token_goes_to_one_replica_and_none_gets_one_more_than_its_share(
    dispatch: tuple[Numbers, Numbers],
) -> None:
    tokens, replicas = dispatch
    found = shares(tokens, replicas)
    assert (found >= 0).all()
    assert (found.sum(axis=2) == tokens.T).all()
    for expert, received in enumerate(found.sum(axis=1)):
        for rank, number in enumerate(received):
            weight = Fraction(int(replicas[expert, rank]), int(replicas[expert].sum()))
            assert abs(int(number) - int(tokens[:, expert].sum()) * weight) < 1


@given(dispatches())
def test_tokens_stay_on_their_rank_as_far_as_its_share_goes(
    dispatch: tuple[Numbers, Numbers],
) -> None:
    tokens, replicas = dispatch
    found = shares(tokens, replicas)
    received = found.sum(axis=1)
    for rank in range(len(tokens)):
        assert (found[:, rank, rank] == np.minimum(tokens[rank], received[:, rank])).all()


def test_shares_of_a_case_by_hand() -> None:
    # An expert on rank 0, and twice on rank 2: 9 tokens are 3 and 6. Rank 1 fills what they leave.
    tokens = np.array([[2], [5], [2]])
    replicas = np.array([[1, 0, 2]])
    assert shares(tokens, replicas).tolist() == [[[2, 0, 0], [1, 0, 4], [0, 0, 2]]]


def test_an_expert_without_a_replica_is_refused() -> None:
    with pytest.raises(PlanError, match="experts 1 "):
        shares(np.array([[1, 1]]), np.array([[1], [0]]))
