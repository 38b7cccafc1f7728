"""Settings of checks against silent corruption, and of what follows an error that comes again."""

from dataclasses import dataclass
from typing import ClassVar

from moe_ft.config.fields import REPAIR, Bounds, ConfigPart, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksConfig(ConfigPart):
    """Checks of what ranks compute and hold, and batches that are left out."""

    TITLE: ClassVar[str] = "silent corruption and bad batches"
    PAGE: ClassVar[str] = "corruption.md"

    check_iterations: int = setting(
        0,
        "every N iterations another rank repeats each rank's forward and backward pass, and the results must "
        "be equal bit for bit before the optimizer steps; 0 = never",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations: one in N takes a second forward and backward pass",
    )
    check_weights: int = setting(
        0,
        "every N iterations compare weights that ranks must have in common, and see that nothing has changed "
        "weights and moments since the last step; 0 = never",
        metavar="N",
        bounds=Bounds(at_least=0),
        remedy="Give a number of iterations",
    )
    skip_bad_batches: int = setting(
        0,
        "leave out up to N batches in a run, each of which has made the same rank fail twice with the same "
        "exception; 0 = none",
        metavar="N",
        needs=(REPAIR,),
        bounds=Bounds(at_least=0),
        remedy="Give the most batches that the run may leave out",
    )
