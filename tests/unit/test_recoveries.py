"""The rules by which tests of recoveries derive what they expect."""

from tests.recoveries import Expected, Held, newest


def held(rank: int, iteration: int, node: str | None, *, start: int = 0, window: int = 1) -> Held:
    return Held(
        rank=rank, iteration=iteration, window=window, start=start, node=node, strategy="dense"
    )


def test_newest_state_that_all_ranks_have_is_expected() -> None:
    found = [held(0, 3, "a"), held(0, 4, "a"), held(1, 3, "b"), held(0, 5, "a")]
    assert newest(found, 2, ["a", "b"]) == Expected(
        restored_iteration=3, target_iteration=3, tiers=("memory", "memory")
    )


def test_nearest_tier_is_expected_for_each_rank() -> None:
    found = [held(0, 4, "a"), held(1, 4, "a"), held(2, 4, None), held(0, 4, None)]
    expected = newest(found, 3, ["a", "b", "b"])
    assert expected is not None
    assert expected.tiers == ("memory", "peer", "storage")


def test_later_start_is_expected_although_an_earlier_one_got_further() -> None:
    found = [held(0, 9, "a"), held(0, 5, "a", start=1)]
    expected = newest(found, 1, None)
    assert expected is not None
    assert expected.target_iteration == 5


def test_windows_are_replayed_from_their_first_iteration_and_whole_states_preferred() -> None:
    expected = newest([held(0, 6, "a", window=3)], 1, None)
    assert expected is not None
    assert (expected.restored_iteration, expected.target_iteration) == (4, 6)
    expected = newest([held(0, 6, "a", window=3), held(0, 6, "a")], 1, None)
    assert expected is not None
    assert (expected.restored_iteration, expected.target_iteration) == (6, 6)


def test_nothing_is_expected_of_state_that_a_rank_lacks() -> None:
    assert newest([held(0, 4, "a")], 2, None) is None
    assert newest([], 1, None) is None
