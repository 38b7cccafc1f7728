"""Recounts what recoveries lose, from the routing log and the rules of selection alone.

Nothing of moe_ft is used: the order of experts, the two selections and the sums are written again from their
description, so that a mistake in one of the two shows.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import events

Expert = tuple[str, int]


Missing = dict[
    int, int
]  # tokens whose updates an expert lacks, by the iteration whose state they made


@dataclass
class Version:
    """A saved version of an expert; iteration 0 is the first state."""

    iteration: int = 0
    missing: Missing = field(default_factory=dict)


@dataclass
class Saved:
    """An expert's newest versions in memory and on storage."""

    memory: Version = field(default_factory=Version)
    storage: Version = field(default_factory=Version)


@dataclass
class Recount:
    """Follows one run of a model whose MoE layers are all on one stage.

    Attributes:
        routed: tokens by (layer, expert) and iteration whose state they made, in the last attempt at it.
        saved: newest versions.
        missing: what the live experts lack.
    """

    folder: Path
    num_ranks: int
    layers: tuple[str, ...]
    num_experts: int
    ep_size: int
    k_snapshot: int
    k_persist: int = 1
    is_load_aware: bool = False
    routed: dict[Expert, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    saved: dict[Expert, Saved] = field(default_factory=lambda: defaultdict(Saved))
    missing: dict[Expert, Missing] = field(default_factory=lambda: defaultdict(dict))
    cursor: int = 0

    def order(self, layer: int) -> list[int]:
        """Return a layer's experts as they come next: from rank to rank, layer after layer."""
        num_local = self.num_experts // self.ep_size
        start = self.cursor + layer * self.k_snapshot
        positions = [(start + step) % self.num_experts for step in range(self.num_experts)]
        return [place % self.ep_size * num_local + place // self.ep_size for place in positions]

    def read(self, incarnation: int, after: int) -> None:
        """Read what was routed in an incarnation that went on from an iteration."""
        fresh: dict[Expert, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for rank in range(self.num_ranks):
            for line in events(self.folder, rank, "router_load"):
                if line["incarnation"] == incarnation:
                    for layer, counts in line["tokens"].items():
                        for expert, count in enumerate(counts):
                            fresh[layer, expert][line["iteration"]] += count
        for expert, counts in fresh.items():
            kept = {at: count for at, count in self.routed[expert].items() if at <= after}
            self.routed[expert] = {**kept, **counts}

    def unsaved(self, expert: Expert, iteration: int) -> int:
        """Return the tokens that the live expert has learnt from and its version in memory has not."""
        version = self.saved[expert].memory
        return sum(
            count
            for at, count in self.routed[expert].items()
            if version.iteration < at <= iteration and at not in self.missing[expert]
        )

    def news_in_memory(self, expert: Expert) -> int:
        """Return the tokens that the version in memory has learnt from and the one on storage has not."""

        def learnt(version: Version) -> int:
            return sum(
                count
                for at, count in self.routed[expert].items()
                if at <= version.iteration and at not in version.missing
            )

        return learnt(self.saved[expert].memory) - learnt(self.saved[expert].storage)

    def snapshot(self, iteration: int) -> None:
        """A snapshot of this iteration was complete."""
        for number, layer in enumerate(self.layers):
            order = self.order(number)
            if self.is_load_aware:
                order.sort(
                    key=lambda expert, layer=layer: -self.unsaved((layer, expert), iteration)
                )
            for expert in order[: self.k_snapshot]:
                saved = self.saved[layer, expert]
                saved.memory = Version(iteration, dict(self.missing[layer, expert]))
        self.cursor = (self.cursor + self.k_snapshot) % self.num_experts

    def persist(self) -> None:
        """The newest versions of some experts went to storage."""
        for number, layer in enumerate(self.layers):
            saved = {expert: self.saved[layer, expert] for expert in self.order(number)}
            candidates = [
                expert
                for expert in saved
                if saved[expert].memory.iteration > saved[expert].storage.iteration
            ]
            news = {expert: self.news_in_memory((layer, expert)) for expert in candidates}
            candidates.sort(
                key=lambda expert, saved=saved, news=news: (
                    -news[expert] if self.is_load_aware else 0,
                    saved[expert].storage.iteration,
                    -saved[expert].memory.iteration,
                )
            )
            for expert in candidates[: self.k_persist]:
                saved[expert].storage = saved[expert].memory

    def recover(
        self, iteration: int, lost_ranks: frozenset[int] = frozenset()
    ) -> dict[str, list[int]]:
        """Return the tokens ``[expert]`` that a recovery loses by layer; lost ranks have storage only."""
        num_local = self.num_experts // self.ep_size
        lost: dict[str, list[int]] = {layer: [] for layer in self.layers}
        for layer in self.layers:
            for expert in range(self.num_experts):
                saved, before = self.saved[layer, expert], self.missing[layer, expert]
                if expert // num_local in lost_ranks:
                    saved.memory = saved.storage
                version = saved.memory
                missing = {at: count for at, count in version.missing.items() if at <= iteration}
                for at, count in self.routed[layer, expert].items():
                    if version.iteration < at <= iteration:
                        missing[at] = count
                lost[layer].append(sum(count for at, count in missing.items() if at not in before))
                self.missing[layer, expert] = missing
        return lost

    @property
    def total(self) -> int:
        """The tokens that all live experts lack."""
        return sum(sum(missing.values()) for missing in self.missing.values())
