"""State of another layout: only whole units of one version count, and only what is found by its place."""

from math import prod

import pytest

from moe_ft.errors import PlanError
from moe_ft.format.entries import GlobalPlace
from moe_ft.format.records import ExpertProgress
from moe_ft.planning.relayout import (
    ModelTensor,
    VersionNumber,
    blocks_of,
    complete_versions,
    merge_progress,
    wholes_of,
)
from moe_ft.planning.transfer import Part, cut

KEY = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
EXPERT = GlobalPlace(key=KEY, shape=(4, 6, 2), offset=(2, 3, 0), start=(0, 0), extent=(3, 2))
WHOLE = wholes_of([EXPERT], "param")


def halves(*which: int) -> list[Part]:
    """Return halves of an expert, each of which one rank has."""
    places = [
        GlobalPlace(key=KEY, shape=(4, 6, 2), offset=(2, 3 * half, 0), start=(0, 0), extent=(3, 2))
        for half in which
    ]
    return [
        part
        for half, place in zip(which, places, strict=True)
        for part in cut(half, blocks_of([place], (3, 2), "param"), 0, 6)
    ]


def test_an_expert_is_a_tensor_of_its_own_though_checkpoints_stack_them() -> None:
    (block,), (whole,) = blocks_of([EXPERT], (3, 2), "param"), WHOLE
    assert block.tensor == whole.tensor == ModelTensor(KEY, (2,), "param")
    assert (block.offset, block.extent, whole.extent) == ((3, 0), (3, 2), (6, 2))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({(0, 5): (0, 1), (0, 6): (0, 1)}, [(0, 6), (0, 5)]),
        ({(0, 5): (0, 1), (0, 6): (1,)}, [(0, 5)]),
        ({(0, 9): (0, 1), (1, 6): (0, 1)}, [(1, 6), (0, 9)]),
        ({(0, 5): (0,), (0, 6): (1,)}, []),  # a mixture of ages is no version
        ({}, []),
    ],
)
def test_versions_of_which_all_is_there_come_newest_first(
    there: dict[VersionNumber, tuple[int, ...]], expected: list[VersionNumber]
) -> None:
    parts = {version: halves(*which) for version, which in there.items()}
    wanted = [Part(None, block, 0, prod(block.extent)) for block in WHOLE]
    assert complete_versions(parts, wanted) == expected


def progress(layer: str, *, k: int = 1, cursor: int = 0, left: int = 0) -> ExpertProgress:
    return ExpertProgress(
        cursor=cursor,
        k_snapshot=k,
        k_persist=1,
        least_k=1,
        interval=1,
        routed_tokens={layer: (3, 4)},
        gaps={layer: (((0, 1),), ())},
        planned_tokens=100,
        owed={layer: (5 * left, 0)} if left else {},
        boost_left=left,
    )


def test_progress_of_all_stages_is_put_together_by_layer() -> None:
    parts = [progress("layer.0", cursor=2), progress("layer.1", cursor=3, left=7)]
    merged = merge_progress(parts)
    assert merged is not None
    assert merged.cursor == 2
    assert merged.routed_tokens == {"layer.0": (3, 4), "layer.1": (3, 4)}
    assert merged.gaps.keys() == {"layer.0", "layer.1"}
    assert (merged.owed, merged.boost_left) == ({"layer.1": (35, 0)}, 7)
    assert merge_progress([]) is None


def test_stages_that_save_different_numbers_of_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="different numbers of experts"):
        merge_progress([progress("layer.0"), progress("layer.1", k=2)])
