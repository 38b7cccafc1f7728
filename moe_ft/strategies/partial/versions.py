"""Versions of the experts of a stage: the newest ones in memory, or those on storage."""

from dataclasses import dataclass

import numpy as np

from moe_ft.planning.experts import Counts
from moe_ft.planning.token_ledger import NEVER
from moe_ft.strategies.partial.selection import Selection


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Versions:
    """One version of each expert.

    Attributes:
        trained: ``[layer, expert]`` tokens whose updates it incorporates.
        iterations: ``[layer, expert]``, NEVER for an expert without a version.
    """

    trained: Counts
    iterations: Counts

    @classmethod
    def none(cls, num_layers: int, num_experts: int) -> "Versions":
        """Return the table of a run that has saved nothing yet."""
        shape = (num_layers, num_experts)
        return cls(trained=np.zeros(shape, np.int64), iterations=np.full(shape, NEVER, np.int64))

    @classmethod
    def of(cls, trained: Counts, iteration: int) -> "Versions":
        """Return the versions that all experts have at an iteration."""
        return cls(trained=trained, iterations=np.full_like(trained, iteration))

    def replaced(self, selection: Selection, newer: "Versions") -> "Versions":
        """Return a table in which the selected experts have other versions."""
        trained, iterations = self.trained.copy(), self.iterations.copy()
        for layer, experts in enumerate(selection):
            chosen = list(experts)
            trained[layer, chosen] = newer.trained[layer, chosen]
            iterations[layer, chosen] = newer.iterations[layer, chosen]
        return Versions(trained=trained, iterations=iterations)

    def up_to(self, iteration: int) -> "Versions":
        """Return a table in which no version counts as newer than an iteration.

        A recovery may leave newer ones. What is saved from this iteration on replaces them.
        """
        return Versions(trained=self.trained, iterations=np.minimum(self.iterations, iteration))
