"""Ranks of jobs under Megatron-Bridge die and are replaced in place; the bits are those without moe_ft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.bridge.jobs import EP2, EVALUATION, OVERLAP, PP2, ReplacedJob
from tests.jobs import DENSE, SPARSE


@dataclass(frozen=True, kw_only=True)
class Death:
    """Death of rank 1, and the repair that it needs.

    Attributes:
        fault: that moe_ft injects.
        kill: instead, the moment in which the script kills it, see tiny_job.py.
        recovered: iterations from which training may run again.
    """

    fault: str = ""
    kill: str = ""
    recovered: frozenset[int] = frozenset({3})
    strategy: Sequence[str] = DENSE
    layout: Mapping[str, int] = field(default_factory=lambda: EP2)
    overrides: Sequence[str] = ()


BACKWARD = "kill:1@5:backward"
DEATHS = {
    "dense": Death(fault=BACKWARD, recovered=frozenset({4, 5})),
    "sparse": Death(fault=BACKWARD, strategy=SPARSE),
    "stages": Death(fault=BACKWARD, strategy=SPARSE, layout=PP2),
    "overlap": Death(fault="kill:1@5:after-step", recovered=frozenset({4, 5}), overrides=OVERLAP),
    "log line": Death(kill="log:6", strategy=SPARSE),
    "evaluation": Death(kill="evaluation:6", strategy=SPARSE, overrides=EVALUATION),
}


@pytest.mark.parametrize("name", DEATHS)
def test_dead_rank_is_replaced_in_place_and_the_bits_are_those_without_moe_ft(
    replaced: ReplacedJob, name: str
) -> None:
    death = DEATHS[name]
    result = replaced.run(
        *([death.fault] if death.fault else []),
        strategy=death.strategy,
        layout=death.layout,
        extra=death.overrides,
        env={"KILL": death.kill},
    )
    assert result.num_restarts == 0
    replaced.check([1], [5], [set(death.recovered)])
