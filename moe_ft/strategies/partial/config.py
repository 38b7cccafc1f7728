"""Options of the strategy `partial`: which experts a snapshot holds."""

from dataclasses import dataclass
from typing import ClassVar, override

from moe_ft.config.fields import Bounds, ConfigPart, setting
from moe_ft.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialConfig(ConfigPart):
    """Partial experts checkpointing: which experts a snapshot holds."""

    TITLE: ClassVar[str] = "strategy partial"
    PAGE: ClassVar[str] = "partial.md"
    k_snapshot: str = setting(
        "auto",
        "experts per MoE layer in each snapshot; auto = as many as can be copied while forward and "
        "backward run",
        metavar="{N,auto}",
        bounds=Bounds(at_least=1),
    )
    k_persist: int = setting(
        1,
        "experts per MoE layer that each checkpoint writes to storage",
        metavar="N",
        bounds=Bounds(at_least=1),
        reason="an expert that never goes to storage is lost with its node",
        remedy="Give a number of experts per MoE layer",
        needs=("persist_dir",),
    )
    selection: str = setting(
        "sequential",
        "which experts: one after the other, or those with the most unsaved tokens",
        choices=("sequential", "load-aware"),
    )
    master_always_full: bool = setting(
        False, "save the fp32 master weights of all experts in every snapshot"
    )
    dynamic_k: bool = setting(
        False,
        "double k after a recovery if one more could take the proportion of lost tokens past the share of "
        "--moe-ft-plt-limit that this k has",
    )
    plt_limit: float = setting(
        0.0375,
        "proportion of the planned tokens that may be lost, as --moe-ft-dynamic-k tries to keep it",
        bounds=Bounds(above=0, below=1),
        remedy="Write 0.0375 for 3.75 percent",
        needs=("dynamic_k",),
        metavar="FRACTION",
        page="lost_tokens.md",
    )

    @property
    def k_in_memory(self) -> int | None:
        """The experts in a snapshot, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("k_snapshot")

    @property
    def is_load_aware(self) -> bool:
        """True if experts are selected by their unsaved tokens, and not in turn."""
        return self.selection == "load-aware"

    @override
    def check(self, world_size: int) -> None:
        k_snapshot = self.k_in_memory
        if k_snapshot is not None and self.k_persist > k_snapshot:
            raise ConfigError(
                f"--moe-ft-k-persist={self.k_persist} must be at most --moe-ft-k-snapshot={k_snapshot}: "
                "storage is fed from what snapshots hold. Lower the first or raise the second."
            )
