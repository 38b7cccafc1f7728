"""Summary of the experts of a state: the versions that were saved, and the tokens that are lost."""

import msgspec
import pytest

from moe_ft.format.entries import FROZEN, UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.records import ExpertProgress
from moe_ft.recovery.inspect.experts import render_experts, summarize_experts
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_state

NUM_EXPERTS = 3
EXPERTS = [UnitId(kind=UnitKind.EXPERT, layer=4, expert=number) for number in range(NUM_EXPERTS)]
LAYER = EXPERTS[0].layer_name
PROGRESS = ExpertProgress(
    cursor=0,
    k_snapshot=1,
    k_persist=1,
    least_k=1,
    interval=1,
    routed_tokens={LAYER: (100, 80, 60)},
    gaps={LAYER: (((10, 25),), (), ())},
    planned_tokens=1000,
)


def index_of(
    versions: dict[int, tuple[int, int]], progress: ExpertProgress | None = PROGRESS
) -> Index:
    """Return a rank's index.

    Args:
        versions: by expert the iteration of the version and the tokens that it was trained with.
        progress: of the stage; None where every snapshot holds every unit.
    """
    index, _ = make_state()
    template: UnitEntry = next(iter(index.units.values()))
    units = {
        str(EXPERTS[number]): msgspec.structs.replace(
            template, iteration=iteration, routed_tokens=tokens
        )
        for number, (iteration, tokens) in versions.items()
    }
    origins = {str(each): "checksum" for each in EXPERTS} | {FROZEN: "checksum"}
    return msgspec.structs.replace(index, units=units, origins=origins, progress=progress)


def test_state_in_which_every_snapshot_holds_every_unit_has_no_summary() -> None:
    assert summarize_experts([index_of({}, progress=None)]) is None


def test_versions_and_tokens_of_each_expert_are_summarized() -> None:
    summary = summarize_experts([index_of({0: (5, 100), 1: (3, 50)})])
    assert summary is not None
    assert summary.iterations == {LAYER: (5, 3, -1)}
    assert summary.missing == {LAYER: (0, 30, 60)}
    assert summary.lost == {LAYER: (15, 0, 0)}
    assert summary.plt(summary.missing) == pytest.approx(0.09)


def test_newest_version_counts_where_ranks_that_save_parts_have_several() -> None:
    summary = summarize_experts([index_of({1: (3, 50)}), index_of({1: (4, 70)})])
    assert summary is not None
    assert summary.iterations[LAYER] == (-1, 4, -1)
    assert summary.missing[LAYER] == (100, 10, 60)


def test_table_has_a_line_per_layer_and_the_sums() -> None:
    summary = summarize_experts([index_of({0: (5, 100), 1: (3, 50)})])
    assert summary is not None
    text = render_experts(summary)
    (line,) = [each for each in text.splitlines() if each.startswith(LAYER)]
    assert line.split() == [LAYER, "5", "3", "-1", "90", "15"]
    assert "have lost 15 tokens, PLT 1.500 %; one from here loses 90 more, PLT 9.000 %" in text
