"""Losses of experts are read from the indexes of a state."""

import msgspec

from moe_ft.format.files import Index, UnitEntry
from moe_ft.format.records import ExpertProgress
from moe_ft.recovery.inspect.experts import render_experts, summarize_experts
from tests.unit.moe_ft.builders import make_state

# Two experts of one layer, of which recoveries have dropped tokens 3 to 7 of the first.
PROGRESS = ExpertProgress(
    cursor=0,
    k_snapshot=1,
    k_persist=1,
    least_k=1,
    interval=1,
    routed_tokens={"layer.0": (20, 12)},
    gaps={"layer.0": (((3, 7),), ())},
    planned_tokens=100,
)


def index_of(**iterations_and_tokens: tuple[int, int]) -> Index:
    """Return an index that has experts of a layer, each at an iteration with its routed tokens."""
    index, _ = make_state(0, 5, None)
    template: UnitEntry = next(iter(index.units.values()))
    units = {
        f"layer.0.{name.replace('_', '.')}": msgspec.structs.replace(
            template, iteration=iteration, routed_tokens=tokens
        )
        for name, (iteration, tokens) in iterations_and_tokens.items()
    }
    return msgspec.structs.replace(index, progress=PROGRESS, units=units)


def test_tokens_after_the_saved_version_are_missing_and_those_of_gaps_lost() -> None:
    summary = summarize_experts([index_of(expert_0=(4, 15), expert_1=(5, 12))])
    assert summary is not None
    assert summary.iterations == {"layer.0": (4, 5)}
    assert summary.missing == {"layer.0": (5, 0)}
    assert summary.lost == {"layer.0": (4, 0)}
    assert summary.plt(summary.lost) == 0.04


def test_newest_version_that_any_rank_saves_counts() -> None:
    summary = summarize_experts([index_of(expert_0=(4, 15)), index_of(expert_0=(5, 19))])
    assert summary is not None
    assert summary.iterations == {"layer.0": (5, None)}
    assert summary.missing == {"layer.0": (1, 0)}


def test_table_shows_experts_of_other_ranks_as_unknown() -> None:
    summary = summarize_experts([index_of(expert_0=(4, 15))])
    assert summary is not None
    text = render_experts(summary)
    assert text.splitlines()[2].split() == ["layer.0", "4", "-", "5", "4"]
    assert "have lost 4 tokens, PLT 4.000 %" in text
    assert "loses 5 more, PLT 5.000 %" in text


def test_state_whose_snapshots_hold_everything_has_no_losses() -> None:
    index, _ = make_state(0, 5, None)
    assert summarize_experts([index]) is None
