"""Losses of the experts of a state: by recoveries so far, and by one from here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moe_ft.format.entries import FROZEN
from moe_ft.format.index import Index
from moe_ft.format.records import ExpertProgress
from moe_ft.planning.lost_tokens import num_lost
from moe_ft.tables import table
from moe_ft.units import UnitKind, parse_unit


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSummary:
    """Experts of some layers: their saved versions and lost tokens.

    Attributes:
        lost: by layer, ``[expert]`` tokens whose updates recoveries have dropped.
        missing: by layer, ``[expert]`` tokens whose updates the saved versions lack.
        iterations: by layer, ``[expert]`` of the saved version, -1 for the weights that the run began
            with; None where other ranks have the expert.
        planned_tokens: tokens times top-k of a layer in the whole planned run.
    """

    lost: Mapping[str, tuple[int, ...]]
    missing: Mapping[str, tuple[int, ...]]
    iterations: Mapping[str, tuple[int | None, ...]]
    planned_tokens: int

    def plt(self, tokens: Mapping[str, tuple[int, ...]]) -> float:
        """Return the proportion of lost tokens, the mean over the layers."""
        total = sum(map(sum, tokens.values()))
        return total / len(tokens) / self.planned_tokens if tokens and self.planned_tokens else 0.0


def summarize_experts(indexes: Iterable[Index]) -> ExpertSummary | None:
    """Return the summary of one state from its ranks' indexes; None if every snapshot holds every unit."""
    progress: dict[str, ExpertProgress] = {}
    versions: dict[tuple[str, int], tuple[int, int]] = {}
    planned_tokens = 0
    for index in indexes:
        if index.progress is None:
            continue
        planned_tokens = index.progress.planned_tokens
        progress.update(dict.fromkeys(index.progress.routed_tokens, index.progress))
        for name in index.origins:
            _note(versions, name, (-1, 0))
        for name, unit in index.units.items():
            if unit.routed_tokens or name in index.origins:
                _note(versions, name, (unit.iteration, unit.routed_tokens))
    if not progress:
        return None
    lost, missing, iterations = {}, {}, {}
    for layer in progress:
        routed = progress[layer].routed_tokens[layer]
        lost[layer] = tuple(num_lost(gaps) for gaps in progress[layer].gaps[layer])
        found = [versions.get((layer, expert)) for expert in range(len(routed))]
        iterations[layer] = tuple(each[0] if each else None for each in found)
        missing[layer] = tuple(
            max(0, count - each[1]) if each else 0
            for count, each in zip(routed, found, strict=True)
        )
    return ExpertSummary(
        lost=lost, missing=missing, iterations=iterations, planned_tokens=planned_tokens
    )


def _note(
    versions: dict[tuple[str, int], tuple[int, int]], name: str, version: tuple[int, int]
) -> None:
    """Note a version of an expert; ranks that save parts of it may have different ones."""
    if name == FROZEN:
        return
    unit = parse_unit(name)
    if unit.kind is not UnitKind.EXPERT:
        return
    known = versions.get((unit.layer_name, unit.expert))
    if known is None or known[0] < version[0]:
        versions[unit.layer_name, unit.expert] = version


def render_experts(summary: ExpertSummary) -> str:
    """Return a table with a line per layer, and the sums of what was and would be lost."""
    rows = [
        (
            layer,
            " ".join("-" if each is None else str(each) for each in summary.iterations[layer]),
            sum(summary.missing[layer]),
            sum(summary.lost[layer]),
        )
        for layer in summary.iterations
    ]
    headers = ("layer", "iteration of each expert", "tokens not saved", "tokens lost")
    return "\n".join(
        (
            table(rows, headers),
            "",
            f"recoveries so far have lost {sum(map(sum, summary.lost.values()))} tokens, PLT "
            f"{100 * summary.plt(summary.lost):.3f} %; one from here loses "
            f"{sum(map(sum, summary.missing.values()))} more, PLT "
            f"{100 * summary.plt(summary.missing):.3f} % (iteration -1: never saved)",
        )
    )
