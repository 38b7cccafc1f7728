"""Second count of the tokens that recoveries lose, from the routing log and the rules of selection alone.

It uses nothing of moe_ft: the order of experts, the two selections and the sums are written again from their
description, so that a mistake in either count shows.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import events

Expert = tuple[str, int]


# Tokens whose updates an expert lacks, by the iteration that their update led to.
Missing = dict[int, int]


@dataclass
class Version:
    """Saved version of an expert; iteration 0 is the first state."""

    iteration: int = 0
    missing: Missing = field(default_factory=dict)


@dataclass
class Saved:
    """Newest versions of an expert in memory and on storage."""

    memory: Version = field(default_factory=Version)
    storage: Version = field(default_factory=Version)


@dataclass
class Recount:
    """Count of one run of a model whose MoE layers are all on one stage.

    Attributes:
        routed: tokens by (layer, expert) and the iteration that they led to, in the last attempt at it.
        saved: newest versions.
        missing: tokens that the live experts lack.
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
        """Return the experts of a layer in the order of their turns: from rank to rank, layer after layer."""
        num_local = self.num_experts // self.ep_size
        start = self.cursor + layer * self.k_snapshot
        positions = [(start + step) % self.num_experts for step in range(self.num_experts)]
        return [place % self.ep_size * num_local + place // self.ep_size for place in positions]

    def read(self, incarnation: int, after: int) -> None:
        """Read the routing log of an incarnation that continued from an iteration."""
        fresh: dict[Expert, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for rank in range(self.num_ranks):
            for line in events(self.folder, rank, "router_load"):
                if line["incarnation"] == incarnation:
                    for layer, counts in line["tokens"].items():
                        for number, count in enumerate(counts):
                            fresh[layer, number][line["iteration"]] += count
        for expert, tokens in fresh.items():
            kept = {at: count for at, count in self.routed[expert].items() if at <= after}
            self.routed[expert] = {**kept, **tokens}

    def unsaved(self, expert: Expert, iteration: int) -> int:
        """Return the number of tokens known to the live expert and not to its version in memory."""
        version = self.saved[expert].memory
        return sum(
            count
            for at, count in self.routed[expert].items()
            if version.iteration < at <= iteration and at not in self.missing[expert]
        )

    def news_in_memory(self, expert: Expert) -> int:
        """Return the number of tokens known to the version in memory and not to the one on storage."""

        def learnt(version: Version) -> int:
            return sum(
                count
                for at, count in self.routed[expert].items()
                if at <= version.iteration and at not in version.missing
            )

        return learnt(self.saved[expert].memory) - learnt(self.saved[expert].storage)

    def snapshot(self, iteration: int) -> None:
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
        """Count a checkpoint: the newest versions of some experts go to storage."""
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
        """Return by layer the tokens ``[expert]`` that a recovery loses; lost ranks have only storage."""
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
        """Number of tokens that all live experts lack together."""
        return sum(sum(missing.values()) for missing in self.missing.values())
