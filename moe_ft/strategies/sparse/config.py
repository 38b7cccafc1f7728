"""Options of the strategy `sparse`: its windows, and the order of their units."""

from dataclasses import dataclass
from typing import ClassVar

from moe_ft.config.fields import Bounds, ConfigPart, setting
from moe_ft.strategies.sparse.popularity import MEASURES


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig(ConfigPart):
    """Sparse windows: how many snapshots hold everything once, and which units come first."""

    TITLE: ClassVar[str] = "strategy sparse"
    PAGE: ClassVar[str] = "sparse.md"
    window: str = setting(
        "auto",
        "snapshots of consecutive iterations that together hold every unit; auto = as few as cost no "
        "time, measured while training",
        metavar="{N,auto}",
        bounds=Bounds(at_least=1),
    )
    max_window: int = setting(
        8,
        "longest window that auto may choose; host memory is reserved for it",
        metavar="N",
        bounds=Bounds(at_least=1),
        remedy="Give a number of snapshots",
        needs=("window=auto",),
    )
    unit_order: str = setting(
        "count",
        "what makes an expert popular, and so late in the window: its tokens, the probabilities that the "
        "gate gives it for all tokens, or a decaying average of its tokens",
        choices=MEASURES,
    )
    popularity_decay: float = setting(
        0.9,
        "share of the average that an iteration keeps with --moe-ft-unit-order decayed",
        bounds=Bounds(at_least=0, below=1),
        remedy="Write 0.9 to remember about ten iterations",
        needs=("unit_order=decayed",),
        metavar="FRACTION",
    )
    reorder_change: float = setting(
        0.10,
        "relative change of an expert's share of tokens that counts as one",
        bounds=Bounds(at_least=0),
        remedy="Write 0.1 for ten percent",
        metavar="FRACTION",
    )
    reorder_fraction: float = setting(
        0.25,
        "fraction of the experts that must have changed before units are ordered again",
        bounds=Bounds(at_least=0, at_most=1),
        remedy="Write 0.25 for a quarter of the experts",
        metavar="FRACTION",
    )

    @property
    def is_soft(self) -> bool:
        """True if the gate's probabilities are summed up, not tokens."""
        return self.unit_order == "soft-count"

    @property
    def window_snapshots(self) -> int | None:
        """The window, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("window")
