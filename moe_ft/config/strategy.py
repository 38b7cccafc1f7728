"""Settings of the strategies: which state is checkpointed when, and what each snapshot holds.

Fields become flags as in moe_ft/config/config.py, which holds everything else.
"""

from dataclasses import dataclass

from moe_ft.config.fields import count, one_of, setting
from moe_ft.errors import ConfigError

STRATEGIES = ("none", "dense", "partial", "sparse")
UNIT_ORDERS = ("count", "soft-count", "decayed")


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """What is checkpointed when, and with which Megatron."""

    strategy: str = setting("none", "which state is checkpointed when", choices=STRATEGIES)
    interval: str = setting(
        "1",
        "iterations between snapshots; auto = the smallest that keeps the overhead under "
        "--moe-ft-overhead-limit",
        metavar="N|auto",
    )
    sharding: str = setting(
        "equal",
        "who saves state that data-parallel ranks hold alike: their first rank, all in equal parts, or "
        "(adaptive) the less the more selected experts a rank has; what the distributed optimizer has "
        "divided stays divided",
        choices=("none", "equal", "adaptive"),
    )
    overhead_limit: float = setting(
        0.03, "fraction of the training time that checkpoints may cost with --moe-ft-interval auto"
    )
    on_error: str = setting(
        "degrade",
        "when a background part fails: train on with the last good checkpoint, or raise",
        choices=("degrade", "raise"),
    )
    allow_untested_megatron: bool = setting(
        False, "run with a megatron-core version that moe_ft was not tested with"
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is checkpointed."""
        return self.strategy != "none"

    @property
    def is_exact(self) -> bool:
        """Whether what is recovered is the state as it was."""
        return self.strategy in ("dense", "sparse")

    @property
    def interval_iterations(self) -> int | None:
        """The interval, None for automatic; raises ConfigError if it is neither."""
        return None if self.interval == "auto" else count("interval", self.interval, least=1)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is not among those offered."""
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("on_error", self.on_error, ("degrade", "raise"))
        one_of("sharding", self.sharding, ("none", "equal", "adaptive"))
        _ = self.interval_iterations
        if not 0 < self.overhead_limit < 1:
            raise ConfigError(
                f"--moe-ft-overhead-limit={self.overhead_limit} must be a fraction between 0 and 1. "
                "Write 0.03 for three percent."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialConfig:
    """Partial experts checkpointing: which experts a snapshot holds."""

    k_snapshot: str = setting(
        "auto",
        "experts per MoE layer in each snapshot; auto = as many as can be copied while forward and "
        "backward run",
        metavar="N|auto",
    )
    k_persist: int = setting(
        1, "experts per MoE layer that each checkpoint writes to storage", metavar="N"
    )
    selection: str = setting(
        "sequential",
        "which experts: one after the other, or those with the most unsaved tokens",
        choices=("sequential", "load-aware"),
    )
    partial_covers: str = setting(
        "both",
        "what of an expert is saved only when it is selected: its weights, its optimizer moments, or "
        "both; the rest is in every snapshot",
        choices=("weights", "optimizer", "both"),
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
    )

    @property
    def k_in_memory(self) -> int | None:
        """The experts in a snapshot, None for automatic; raises ConfigError if it is neither."""
        is_auto = self.k_snapshot == "auto"
        return None if is_auto else count("k_snapshot", self.k_snapshot, least=1)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is not among those offered, or storage wants more than memory."""
        k_snapshot = self.k_in_memory
        one_of("selection", self.selection, ("sequential", "load-aware"))
        one_of("partial_covers", self.partial_covers, ("weights", "optimizer", "both"))
        if self.k_persist < 1:
            raise ConfigError(
                f"--moe-ft-k-persist={self.k_persist} must be at least 1: an expert that never goes to "
                "storage is lost with its node. Give a number of experts per MoE layer."
            )
        if k_snapshot is not None and self.k_persist > k_snapshot:
            raise ConfigError(
                f"--moe-ft-k-persist={self.k_persist} must be at most --moe-ft-k-snapshot={k_snapshot}: "
                "storage is fed from what snapshots hold. Lower the first or raise the second."
            )
        if not 0 < self.plt_limit < 1:
            raise ConfigError(
                f"--moe-ft-plt-limit={self.plt_limit} must be a fraction between 0 and 1. Write 0.0375 "
                "for 3.75 percent."
            )
        if self.partial_covers == "weights" and self.master_always_full:
            raise ConfigError(
                "--moe-ft-partial-covers=weights with --moe-ft-master-always-full leaves nothing that a "
                "snapshot could leave out. Drop one of them, or use --moe-ft-strategy dense."
            )

    def check_experts(self, num_experts: int) -> None:
        """Raise ConfigError if the model does not have so many experts.

        Args:
            num_experts: per MoE layer; 0 for a model without experts.
        """
        if num_experts == 0:
            raise ConfigError(
                "--moe-ft-strategy=partial needs a model with experts (--num-experts). Use dense."
            )
        for flag, k in (("snapshot", self.k_in_memory), ("persist", self.k_persist)):
            if k is not None and k > num_experts:
                raise ConfigError(
                    f"--moe-ft-k-{flag}={k} must be at most --num-experts={num_experts}. Lower it, or use "
                    "--moe-ft-strategy dense to save all experts each time."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig:
    """Sparse windows: how many snapshots hold everything once, and which units come first."""

    window: str = setting(
        "auto",
        "snapshots of consecutive iterations that together hold every unit; auto = as few as cost no "
        "time, measured while training",
        metavar="N|auto",
    )
    max_window: int = setting(
        8, "longest window that auto may choose; host memory is reserved for it", metavar="N"
    )
    unit_order: str = setting(
        "count",
        "what makes an expert popular, and so late in the window: its tokens, the probabilities that the "
        "gate gives it for all tokens, or a decaying average of its tokens",
        choices=UNIT_ORDERS,
    )
    popularity_decay: float = setting(
        0.9, "share of the average that an iteration keeps with --moe-ft-unit-order decayed"
    )
    reorder_change: float = setting(
        0.10, "relative change of an expert's share of tokens that counts as one"
    )
    reorder_fraction: float = setting(
        0.25, "fraction of the experts that must have changed before units are ordered again"
    )

    @property
    def is_soft(self) -> bool:
        """True if the gate's probabilities are summed up, not tokens."""
        return self.unit_order == "soft-count"

    @property
    def window_snapshots(self) -> int | None:
        """The window, None for automatic; raises ConfigError if it is neither."""
        return None if self.window == "auto" else count("window", self.window, least=1)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is not among those offered."""
        _ = self.window_snapshots
        one_of("unit_order", self.unit_order, UNIT_ORDERS)
        if self.max_window < 1:
            raise ConfigError(
                f"--moe-ft-max-window={self.max_window} must be at least 1. Give a number of snapshots."
            )
        if not 0 <= self.popularity_decay < 1:
            raise ConfigError(
                f"--moe-ft-popularity-decay={self.popularity_decay} must be at least 0 and less than 1. "
                "Write 0.9 to remember about ten iterations."
            )
        if not self.reorder_change >= 0:
            raise ConfigError(
                f"--moe-ft-reorder-change={self.reorder_change} must not be negative. Write 0.1 for ten "
                "percent."
            )
        if not 0 <= self.reorder_fraction <= 1:
            raise ConfigError(
                f"--moe-ft-reorder-fraction={self.reorder_fraction} must be between 0 and 1. Write 0.25 "
                "for a quarter of the experts."
            )

    def check_length(self, num_iterations: int) -> None:
        """Raise ConfigError if training ends before the first window does.

        Args:
            num_iterations: that training has.
        """
        window = self.window_snapshots
        if window is not None and window > num_iterations:
            raise ConfigError(
                f"--moe-ft-window={window} must be at most --train-iters={num_iterations}: a window is of "
                "use when it is complete. Lower it, or use auto."
            )
