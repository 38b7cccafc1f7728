"""Features that use a GPU: which have been seen on one, and which a start refuses unless it is told to.

docs/gpus.md shows them. What looks at Megatron's flags and seams is in megatron/fault_tolerance/seams; each
strategy says itself whether it has been seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ft.config.fields import flag_of


@dataclass(frozen=True, slots=True)
class Feature:
    """Part of a job that uses the device, or the processes on it.

    Attributes:
        setting, value: show that a run uses it; without a value any that is neither off nor none does.
        allowed_by: value of --moe-ft-allow-untested without which a start refuses it, for the reason.
        seen: date, card, versions and page of a run on a GPU; empty for none.
    """

    name: str
    setting: str
    value: str = ""
    allowed_by: str = ""
    reason: str = ""
    seen: str = ""

    def is_used(self, run: Mapping[str, Any]) -> bool:
        """Return whether a run with these arguments and facts uses it."""
        given = run.get(self.setting)
        return given == self.value if self.value else given not in (None, False, 0, "none")

    def is_allowed(self, given: str | None) -> bool:
        """Return whether a value of the flag allows it."""
        return self.allowed_by in (given or "").split(",")

    @property
    def risk(self) -> str:
        """The remedy for users who take the risk."""
        return f"take the risk with {flag_of('allow_untested')} {self.allowed_by} (docs/gpus.md)"


MEGATRON = Feature("a Megatron that does not fit", "has_misfits", allowed_by="megatron")
GRAPHS = Feature(
    *("CUDA graphs", "cuda_graph_impl"),
    allowed_by="cuda-graphs",
    reason="none has been captured or replayed beside moe_ft on one",
)
FEATURES = (
    Feature("replicas", "has_replicas"),
    Feature("replicas by gradients", "moe_ft_replicate", "gradients"),
    Feature("packed snapshots", "is_packed"),
    Feature("breakpoints", "moe_ft_breakpoints"),
    Feature("local recovery", "moe_ft_upstream_log"),
    Feature("another layout", "moe_ft_layout", "any"),
    Feature("expert slots", "moe_ft_expert_slots"),
    Feature("launch", "is_kept"),
    Feature("NCCL", "distributed_backend", "nccl"),
    Feature("Transformer Engine", "transformer_impl", "transformer_engine"),
    Feature("FP8", "fp8"),
    Feature("FP8 parameters", "fp8_param_gather"),
    Feature("precision-aware optimizer", "use_precision_aware_optimizer"),
    Feature("optimizer offload", "optimizer_cpu_offload"),
    Feature("flex dispatcher", "moe_token_dispatcher_type", "flex"),
    Feature("repair in place", "moe_ft_repair", "auto", "repair", "it has never run on one"),
    Feature("crowding", "moe_ft_without_spare", "crowd"),
    Feature("sharing", "moe_ft_without_spare", "share", "sharing", "it has never run on one"),
    Feature(
        "late gradients",
        "moe_ft_late_gradients",
        "always",
        "late-gradients",
        "it has never run on one",
    ),
    GRAPHS,
)
UNTESTED = {each.allowed_by: each for each in (MEGATRON, *FEATURES) if each.allowed_by}


def refusals_on_gpus(settings: Mapping[str, Any]) -> list[str]:
    """Return why a start on GPUs refuses settings of moe_ft, by their arguments; nothing if it does not."""
    return [
        f"--{each.setting.replace('_', '-')}={each.value} is refused on GPUs: {each.reason}. Leave it out, "
        f"or {each.risk}."
        for each in UNTESTED.values()
        if each.is_used(settings) and not each.is_allowed(settings["moe_ft_allow_untested"])
    ]


def lines_of_features(run: Mapping[str, Any], own: Sequence[Feature] = ()) -> list[str]:
    """Return a line on which features of a run have been seen on a GPU; none if it uses none."""
    used = [*own, *(each for each in FEATURES if each.is_used(run))]
    seen = [each.name for each in used if each.seen]
    words = [f"seen on one: {', '.join(seen)}"] if seen else []
    if written := [each.name for each in used if not each.seen]:
        words.append(f"written and never seen on one: {', '.join(written)}")
    return [f"on GPUs, {'; '.join(words)} (docs/gpus.md)"] if words else []
