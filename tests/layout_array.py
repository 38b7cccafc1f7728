"""Factors of the jobs that continue in another layout, and the runs that together show each pair of values.

`make test` runs three of them, `make test-all` all. What a run does and what is checked is in relayouts.py
and distributed/test_layouts.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.covering import Space, Values
from tests.demo_model import DEEPSEEK
from tests.relayouts import Layout

_SEQUENCE = {"sequence_parallel": True}
_VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}
LAYOUTS: dict[str, Layout] = {
    "pp2-ep2": Layout(ranks=4, sizes={"pp": 2, "ep": 2}),
    "ep4": Layout(ranks=4, sizes={"ep": 4}),
    "ep2": Layout(ranks=2, sizes={"ep": 2}),
    "tp2-ep2": Layout(ranks=4, sizes={"tp": 2, "ep": 2, "etp": 1}, changes=_SEQUENCE),
    "virtual-pp2": Layout(ranks=2, sizes={"pp": 2}, changes=_VIRTUAL),
    "dp3": Layout(ranks=3),
    "slots3": Layout(ranks=3, changes={"moe_ft_expert_slots": 2, "moe_ft_rebalance_interval": 1}),
}
_PLAIN = {"use_distributed_optimizer": False}
# Of the start before and the one after.
OPTIMIZERS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "distributed": ({}, {}),
    "replicated": (_PLAIN, _PLAIN),
    "divided-later": (_PLAIN, {}),
    "replicated-later": ({}, _PLAIN),
}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "dense": (),
    "partial": ("--moe-ft-k-snapshot", "1"),
    "sparse": ("--moe-ft-window", "3"),
}
TIERS = ("memory", "peer", "storage")
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"bf16": False, "fp16": True, "initial_loss_scale": 65536},
    "fp32": {"bf16": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {},
    "expert-bias": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0,
    },
    "tied": {"untie_embeddings_and_output_weights": False},
    "query-groups": {"group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True},
    "deepseek": {**DEEPSEEK, "num_layers": 4, "moe_layer_freq": "([0]*1+[1]*3)"},
}
FACTORS: dict[str, tuple[str, ...]] = {
    "before": tuple(LAYOUTS),
    "after": tuple(LAYOUTS),
    "optimizer": tuple(OPTIMIZERS),
    "strategy": tuple(STRATEGIES),
    "tier": TIERS,
    "precision": tuple(PRECISIONS),
    "model": tuple(MODELS),
}
SPREAD = ("n0", "n1")  # nodes of the tier "peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCase:
    """One job that changes its layout once."""

    values: Values

    def __str__(self) -> str:
        return "_".join(self.values[name] for name in FACTORS)

    @property
    def strategy(self) -> str:
        return self.values["strategy"]

    @property
    def tier(self) -> str:
        return self.values["tier"]

    @property
    def has_window(self) -> bool:
        """True if the state is a window of several snapshots. The end of a start leaves a whole state."""
        return self.strategy == "sparse" and self.tier != "storage"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the strategy."""
        return STRATEGIES[self.strategy]

    @property
    def common(self) -> dict[str, Any]:
        """Flags of the model and its training, as `model_flags` takes them."""
        batch = {"global_batch_size": 12, "micro_batch_size": 1}  # three ranks divide it too
        return {**MODELS[self.values["model"]], **PRECISIONS[self.values["precision"]], **batch}

    @property
    def before(self) -> Layout:
        return self._layout("before", 0)

    @property
    def after(self) -> Layout:
        return self._layout("after", 1)

    def _layout(self, name: str, number: int) -> Layout:
        layout = LAYOUTS[self.values[name]]
        changes = {**layout.changes, **OPTIMIZERS[self.values["optimizer"]][number]}
        return Layout(ranks=layout.ranks, sizes=layout.sizes, changes=changes)

    def nodes(self, layout: Layout, *, is_turned: bool = False) -> tuple[str, ...] | None:
        """Return the nodes of the ranks, half of them on each; None for one node."""
        if self.tier != "peer":
            return None
        half = -(-layout.ranks // 2)
        found = (SPREAD[0],) * half + (SPREAD[1],) * (layout.ranks - half)
        return found[::-1] if is_turned else found


def is_possible(values: Values) -> bool:
    """Return whether values of a run do not exclude each other."""
    # Megatron builds the layers of multi-token prediction without slots.
    has_slots = "slots3" in (values.get("before"), values.get("after"))
    return values.get("before", "") != values.get("after") and not (
        has_slots and values.get("model") == "deepseek"
    )


def cost(values: Values) -> float:
    """Return the relative time of a run."""
    return float(sum(LAYOUTS[values[name]].ranks for name in ("before", "after")))


SPACE = Space(
    factors=FACTORS, is_possible=is_possible, views=lambda values: [dict(values)], cost=cost
)


@cache
def cases() -> list[LayoutCase]:
    """Return runs in which each two values of different factors meet, those of `make test` first."""
    return [LayoutCase(values=run) for run in SPACE.cover(SPACE.examples)]


def chosen() -> list[LayoutCase]:
    """Return the three runs of `make test`: one of each strategy and of each tier, with the fewest ranks."""
    wanted = zip(STRATEGIES, ("peer", "memory", "storage"), strict=True)
    return [
        min(
            (each for each in cases() if (each.strategy, each.tier) == pair),
            key=lambda each: (cost(each.values), str(each)),
        )
        for pair in wanted
    ]
