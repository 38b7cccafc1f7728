"""Numbers of the whole job at the end of an iteration, for stages that will run it again alone.

They are equal to those of the iteration's record, and cost nothing: the boundary log keeps them of every
iteration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_ft.format.json_values import finite_or_name
from moe_ft.format.records import JobNumbers
from moe_ft.state.packed_values import copied
from moe_ft.state.record import IterationFacts, capture_found_inf
from moe_ft.state.tensors import inner_optimizers


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedNumbers:
    """Numbers of the job, of which some may still be on the device."""

    facts: IterationFacts
    grad_norms_by_group: Mapping[str, Any]
    num_tokens: torch.Tensor | None
    found_inf: tuple[torch.Tensor | None, ...]

    def encode(self) -> JobNumbers:
        """Return them in the form that files have, equal to those of the record. Any thread."""
        facts, counters = self.facts, self.facts.counters
        checked = [each for each in self.found_inf if each is not None]
        return JobNumbers(
            iteration=facts.iteration,
            grad_norm=None if facts.grad_norm is None else finite_or_name(float(facts.grad_norm)),
            grad_norms_by_group={
                name: finite_or_name(float(value))
                for name, value in self.grad_norms_by_group.items()
            },
            num_tokens=None if self.num_tokens is None else int(self.num_tokens),
            found_inf=tuple(bool(each) for each in checked)
            if len(checked) == len(self.found_inf)
            else (),
            num_floating_point_operations=float(facts.num_floating_point_operations),
            num_microbatches=counters.num_microbatches,
            consumed_train_samples=counters.consumed_train_samples,
            consumed_valid_samples=counters.consumed_valid_samples,
            skipped_train_samples=counters.skipped_train_samples,
        )


def capture_numbers(optimizer: Any, facts: IterationFacts) -> CapturedNumbers:
    """Copy the numbers before the next iteration changes them. Training thread; waits for no GPU."""
    return CapturedNumbers(
        facts=facts,
        grad_norms_by_group=dict(getattr(optimizer, "grad_norms_by_group", None) or {}),
        num_tokens=copied(facts.num_tokens),
        found_inf=tuple(map(capture_found_inf, inner_optimizers(optimizer))),
    )
