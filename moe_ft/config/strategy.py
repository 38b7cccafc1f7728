"""Settings that all strategies share: which one, and when it takes snapshots.

The options of a single strategy are with the strategy, in moe_ft/strategies/.
"""

from dataclasses import dataclass

from moe_ft.config.fields import Bounds, Part, setting

NO_STRATEGY = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig(Part):
    """Strategy: the state that is checkpointed, and when."""

    strategy: str = setting(NO_STRATEGY, "which state is checkpointed when")
    interval: str = setting(
        "1",
        "iterations between snapshots; auto = the smallest that keeps the overhead under "
        "--moe-ft-overhead-limit",
        metavar="N|auto",
        bounds=Bounds(at_least=1),
    )
    sharding: str = setting(
        "equal",
        "who saves state that data-parallel ranks hold alike: their first rank, all in equal parts, or "
        "(adaptive) the less the more selected experts a rank has; what the distributed optimizer has "
        "divided stays divided",
        choices=("none", "equal", "adaptive"),
    )
    overhead_limit: float = setting(
        0.03,
        "fraction of the training time that checkpoints may cost with --moe-ft-interval auto",
        bounds=Bounds(above=0, below=1),
        remedy="Write 0.03 for three percent",
    )
    on_error: str = setting(
        "degrade",
        "when a background part fails: train on with the last good checkpoint, or raise",
        choices=("degrade", "raise"),
    )
    allow_untested_megatron: bool = setting(
        False, "run with a Megatron whose seams do not fit what moe_ft was tested with"
    )

    @property
    def is_on(self) -> bool:
        """True if anything is checkpointed."""
        return self.strategy != NO_STRATEGY

    @property
    def interval_iterations(self) -> int | None:
        """The interval, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("interval")
