"""Names of units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.units import UnitId, UnitKind, UnitPart, parse_unit

IN_LAYERS = (UnitKind.NON_EXPERT, UnitKind.ROUTER)
OUTSIDE = tuple(kind for kind in UnitKind if kind not in (*IN_LAYERS, UnitKind.EXPERT))
BLOCKS = st.sampled_from(["layer", "mtp"])
NUMBERS = st.integers(0, 10**6)
UNITS = st.one_of(
    st.builds(UnitId, kind=st.sampled_from(OUTSIDE)),
    st.builds(UnitId, kind=st.sampled_from(IN_LAYERS), block=BLOCKS, layer=NUMBERS),
    st.builds(
        UnitId,
        kind=st.just(UnitKind.EXPERT),
        block=BLOCKS,
        layer=NUMBERS,
        expert=NUMBERS,
        part=st.sampled_from(UnitPart),
    ),
)


@given(UNITS)
def test_name_of_any_unit_is_parsed_to_the_unit(unit: UnitId) -> None:
    assert parse_unit(str(unit)) == unit


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        (UnitId(kind=UnitKind.EXPERT, layer=3, expert=7), "layer.3.expert.7"),
        (UnitId(kind=UnitKind.ROUTER, block="mtp", layer=0), "mtp.0.router"),
        (UnitId(kind=UnitKind.NON_EXPERT, layer=12), "layer.12.non-expert"),
        (UnitId(kind=UnitKind.FINAL_NORM), "final-norm"),
        (
            UnitId(kind=UnitKind.EXPERT, layer=3, expert=7, part=UnitPart.WEIGHTS),
            "layer.3.expert.7.weights",
        ),
        (
            UnitId(kind=UnitKind.EXPERT, layer=3, expert=7, part=UnitPart.MOMENTS),
            "layer.3.expert.7.moments",
        ),
    ],
)
def test_name_of_a_unit_is_that_of_the_files(unit: UnitId, name: str) -> None:
    assert str(unit) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "router",
        "expert",
        "layer.3.expert",
        "layer.3.router.1",
        "layer.-1.router",
        "layer.3",
        "decoder.3.router",
        "layer.3.expert.7 ",
        "layer.3.expert.7.8",
        "layer.3.expert.7.",
        "layer.3.expert.weights",
        "layer.3.router.weights",
        "embedding.moments",
        "Embedding",
    ],
)
def test_text_that_names_no_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match="is not the name of a unit, such as layer.3.expert.7"):
        parse_unit(text)


@given(st.text(max_size=20) | st.from_regex(r"(layer|mtp)\.\d+\.(expert|router)(\.\d+)?"))
def test_text_that_is_accepted_is_the_name_of_what_it_is_parsed_to(text: str) -> None:
    try:
        unit = parse_unit(text)
    except PlanError:
        return
    assert parse_unit(str(unit)) == unit
