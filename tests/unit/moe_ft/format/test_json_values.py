"""Values become JSON: names for floats that JSON lacks, lists for tuples, strings for keys."""

import math

import pytest

from moe_ft.format.encoding import convert_leaves, finite_or_name


@pytest.mark.parametrize("value", [0.0, -1.5, 1e300, 7, True, None, "nan", [math.inf]])
def test_value_that_is_no_infinite_float_stays(value: object) -> None:
    assert finite_or_name(value) is value


@pytest.mark.parametrize("name", ["nan", "inf", "-inf"])
def test_float_that_is_not_finite_becomes_its_name(name: str) -> None:
    assert finite_or_name(float(name)) == name


def test_leaves_at_any_depth_are_converted_once() -> None:
    nested = {"a": (1, [2, {3: 4}]), 5: 6}
    assert convert_leaves(nested, lambda leaf: -leaf) == {"a": [-1, [-2, {"3": -4}]], "5": -6}


def test_leaf_that_is_converted_to_a_container_is_not_entered() -> None:
    assert convert_leaves([1], lambda leaf: {leaf: (leaf,)}) == [{1: (1,)}]
