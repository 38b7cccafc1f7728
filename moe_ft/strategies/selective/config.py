"""Options of the strategy `selective`: budgets of bytes, and the rule that spends them."""

from dataclasses import dataclass
from typing import ClassVar, override

from moe_ft.config.fields import PEERS, Bounds, ConfigPart, flag_of, parse_size, setting
from moe_ft.errors import ConfigError

NAME = "selective"
AGE, PAPER = "age", "paper"


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveConfig(ConfigPart):
    """Selective checkpoints: how much a snapshot may hold, and which experts those are."""

    TITLE: ClassVar[str] = "strategy selective"
    PAGE: ClassVar[str] = "selective.md"
    local_budget: str = setting(
        "auto",
        "bytes of a rank in a snapshot, like 2GiB; auto = as many as can be copied while forward and "
        "backward run, and committed until the next snapshot",
        metavar="{SIZE,auto}",
    )
    remote_budget: str = setting(
        "auto",
        "bytes of a snapshot that each peer of a rank gets; auto = as many as can be sent until the next one",
        metavar="{SIZE,auto}",
        needs=(PEERS,),
    )
    selective_rule: str = setting(
        AGE,
        "which experts: those with the most tokens x age since their last save, or MoEtion's Algorithm 1 as "
        "printed",
        choices=(AGE, PAPER),
    )
    age_limit: int = setting(
        200,
        "iterations without a save after which an expert comes first, with or without tokens; not with "
        "Algorithm 1",
        metavar="N",
        bounds=Bounds(at_least=1),
        reason="an expert has an age after an iteration",
        remedy="Give a number of iterations, larger than the interval between snapshots",
        needs=(f"selective_rule={AGE}",),
    )

    @property
    def local_bytes(self) -> int | None:
        """Bytes of a snapshot, None for automatic; raises ConfigError if it is neither."""
        return self._size("local_budget")

    @property
    def remote_bytes(self) -> int | None:
        """Bytes that a peer gets of a snapshot, None for automatic; raises ConfigError if it is neither."""
        return self._size("remote_budget")

    def _size(self, name: str) -> int | None:
        text = getattr(self, name)
        return None if text == "auto" else parse_size(flag_of(name), text)

    @override
    def check(self, world_size: int) -> None:
        for name in ("local_budget", "remote_budget"):
            if self._size(name) == 0:
                raise ConfigError(
                    f"{flag_of(name)}={getattr(self, name)} must be more than 0 bytes: every snapshot holds "
                    "the state outside experts. Give more, or auto."
                )
