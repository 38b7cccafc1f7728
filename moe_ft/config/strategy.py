"""Settings that all strategies share: which one, when it takes snapshots, and in which precision.

The options of a single strategy are with the strategy, in moe_ft/strategies/.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, override

from moe_ft.config.fields import STRATEGY, Bounds, ConfigPart, flag_of, parse_size, setting
from moe_ft.config.untested import UNTESTED
from moe_ft.errors import ConfigError
from moe_ft.format.packings import Packing

NO_STRATEGY = "none"
PARTS = ("master", "exp_avg", "exp_avg_sq")
_LEAST_STAGING_BYTES = 1 << 20
_DEFAULT_STAGING = "64MiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig(ConfigPart):
    """Strategy: the state that is checkpointed, and when."""

    TITLE: ClassVar[str] = "any strategy"
    PAGE: ClassVar[str] = "strategies.md"
    NEEDS: ClassVar[tuple[str, ...]] = (STRATEGY,)

    strategy: str = setting(NO_STRATEGY, "what is checkpointed, and when: none = nothing", needs=())
    interval: str = setting(
        "1",
        "iterations between snapshots; auto = the smallest that keeps the overhead under "
        "--moe-ft-overhead-limit",
        metavar="{N,auto}",
        bounds=Bounds(at_least=1),
    )
    sharding: str = setting(
        "equal",
        "which data-parallel rank saves replicated state: none = the first; equal = all, equal parts; "
        "adaptive = all, the less the more selected experts a rank has; what the distributed optimizer has "
        "divided stays divided",
        choices=("none", "equal", "adaptive"),
    )
    overhead_limit: float = setting(
        0.03,
        "fraction of the training time that checkpoints may cost with --moe-ft-interval auto",
        bounds=Bounds(above=0, below=1),
        remedy="Write 0.03 for three percent",
        needs=("interval=auto",),
        metavar="FRACTION",
    )
    on_error: str = setting(
        "degrade",
        "when a background part fails: train on with the last good checkpoint, or raise",
        choices=("degrade", "raise"),
        page="when_something_dies.md",
    )
    allow_untested: str | None = setting(
        None,
        f"what a start refuses as it has not run, and you want to try: some of {', '.join(UNTESTED)}",
        metavar="WHAT,...",
        needs=(),
        unset="nothing",
        page="gpus.md#what-a-start-refuses",
    )

    @property
    def is_on(self) -> bool:
        """True if anything is checkpointed."""
        return self.strategy != NO_STRATEGY

    @property
    def interval_iterations(self) -> int | None:
        """The interval, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("interval")

    @override
    def check(self, world_size: int) -> None:
        if self.allow_untested is not None and {*self.allow_untested.split(",")} - UNTESTED.keys():
            raise ConfigError(
                f"--moe-ft-allow-untested={self.allow_untested} must be some of {','.join(UNTESTED)}. Name "
                "those that the refusal of a start names."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(ConfigPart):
    """Precision in which state is kept, and its packing."""

    TITLE: ClassVar[str] = "precision"
    PAGE: ClassVar[str] = "precision.md"
    NEEDS: ClassVar[tuple[str, ...]] = (STRATEGY,)

    state_dtype: str | None = setting(
        None,
        "how fp32 state is kept in snapshots: master=FORMAT,exp_avg=FORMAT,exp_avg_sq=FORMAT, each exact if "
        f"it is not named; FORMAT is one of {', '.join(Packing)}; split (of masters only) keeps them as BF16 "
        "weights and what these leave out, and loses nothing",
        metavar="PART=FORMAT,...",
        unset="exact",
    )
    allow_lossy: bool = setting(
        False,
        "let a strategy that recovers exactly keep state in a format that does not, or have peers repeat the "
        "steps of fused Adam, which rounds otherwise; it is exact no more",
        needs=("state_dtype|replicate=gradients",),
        page="gradient_replicas.md#fused-adam",
    )
    staging_bytes: str | None = setting(
        None,
        "device memory in which snapshots are packed, half of it at a time; if it is given, exact state is "
        "packed too, and copied in few large pieces",
        metavar="SIZE",
        unset=f"{_DEFAULT_STAGING} if --moe-ft-state-dtype names a format, else none",
    )

    @property
    def packings(self) -> Mapping[str, Packing]:
        """The format of every part of the state; raises ConfigError if one cannot be read."""
        found = dict.fromkeys(PARTS, Packing.EXACT)
        named: set[str] = set()
        for choice in self.state_dtype.split(",") if self.state_dtype is not None else ():
            part, _, name = choice.strip().partition("=")
            if part not in PARTS or name not in list(Packing) or part in named:
                raise ConfigError(
                    f"--moe-ft-state-dtype={self.state_dtype}: '{choice.strip()}' must be PART=FORMAT, "
                    f"each part once; parts are {', '.join(PARTS)}, formats {', '.join(Packing)}. "
                    "Write it like exp_avg=bf16,exp_avg_sq=bf16."
                )
            named.add(part)
            found[part] = Packing(name)
        return found

    @property
    def lossy_parts(self) -> Mapping[str, str]:
        """The parts of the state that do not come back as they were, and their formats."""
        return {part: each.value for part, each in self.packings.items() if each.is_lossy}

    @property
    def is_ruinous(self) -> bool:
        """True if second moments are kept in a format that rounds most of them to 0.

        They are squares of gradients. Where one is 0 and the first moment is not, a weight is moved by their
        quotient: training diverged after every such recovery (docs/benchmarks/lossy_state.md).
        """
        return self.packings["exp_avg_sq"] in (Packing.FP16, Packing.E4M3, Packing.E5M2)

    @property
    def staging(self) -> int:
        """Bytes in which snapshots are packed; 0 if nothing is; raises ConfigError if it is no size."""
        if self.staging_bytes is not None:
            return parse_size(flag_of("staging_bytes"), self.staging_bytes)
        is_packed = any(each is not Packing.EXACT for each in self.packings.values())
        return parse_size(flag_of("staging_bytes"), _DEFAULT_STAGING) if is_packed else 0

    @override
    def check(self, world_size: int) -> None:
        for part in ("exp_avg", "exp_avg_sq"):
            if self.packings[part] is Packing.SPLIT:
                raise ConfigError(
                    f"--moe-ft-state-dtype={self.state_dtype}: only masters can be split, {part} has no "
                    "bf16 weights to go with it. Choose another format for it."
                )
        if self.staging_bytes is not None and self.staging < _LEAST_STAGING_BYTES:
            raise ConfigError(
                f"--moe-ft-staging-bytes={self.staging_bytes} must be at least 1MiB. Give more, or leave it "
                "out."
            )

    def check_is_exact(self, strategy: str) -> None:
        """Raise ConfigError if a strategy promises exact recoveries and formats break that."""
        if self.lossy_parts and not self.allow_lossy:
            raise ConfigError(
                f"--moe-ft-state-dtype={self.state_dtype} loses precision, and --moe-ft-strategy={strategy} "
                "promises recoveries that are exact. Add --moe-ft-allow-lossy to give that up, or use exact "
                "or (for masters) split."
            )
