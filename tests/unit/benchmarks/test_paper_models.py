"""Models of the papers have the sizes that the papers print."""

import pytest

from benchmarks.papers.models import PRESETS, evenly_spaced_layers
from benchmarks.papers.sizes import PaperBytes


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("gpt-125m-8e", 323_605_248), ("gpt-350m-16e", 1_866_939_392)]
)
def test_presets_have_the_parameters_of_the_paper(name: str, num_parameters: int) -> None:
    assert PRESETS[name].num_parameters == num_parameters


def test_composition_of_gpt_350m_16e_is_that_of_figure_2() -> None:
    shape, model = PRESETS["gpt-350m-16e"], PaperBytes()
    total = shape.num_parameters * model.total
    shares = [
        round(100 * count * num_bytes / total)
        for num_bytes in (model.weights, model.optimizer)
        for count in (shape.num_expert_parameters, shape.num_non_expert_parameters)
    ]
    assert shares == [12, 2, 74, 12]


@pytest.mark.parametrize(
    ("num_layers", "num_moe_layers", "expected"),
    [(12, 6, (1, 3, 5, 7, 9, 11)), (4, 4, (0, 1, 2, 3)), (4, 0, ()), (5, 2, (1, 4))],
)
def test_moe_layers_are_spaced_evenly(
    num_layers: int, num_moe_layers: int, expected: tuple[int, ...]
) -> None:
    assert evenly_spaced_layers(num_layers, num_moe_layers) == expected
