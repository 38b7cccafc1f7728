"""Integer arithmetic: results are the smallest integers that suffice."""

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.arithmetic import ceil_div, round_up


@given(number=st.integers(-(10**20), 10**20), divisor=st.integers(1, 10**10))
def test_quotient_is_the_smallest_that_covers_the_number(number: int, divisor: int) -> None:
    found = ceil_div(number, divisor)
    assert (found - 1) * divisor < number <= found * divisor


@given(number=st.integers(0, 10**20), multiple=st.integers(1, 10**10))
def test_rounded_number_is_the_next_multiple(number: int, multiple: int) -> None:
    found = round_up(number, multiple)
    assert found % multiple == 0
    assert number <= found < number + multiple
