"""Ablation of what partial checkpoints leave out of an expert: weights, optimizer states, or both.

    python -m benchmarks.partial_covers [DIR_OR_FILES ...] --folder DIR [--output FILE.md]
    python -m benchmarks.partial_covers --quick

MoC-System's W, O and WO (Fig. 14a, Table 3). Users have no such choice: the strategy `covers` is registered
here alone. It is `partial`, except for the parts of an expert that rotate; the other parts are in every
snapshot and in every checkpoint. The runs are benchmarks/quality_runs.py's.

W    master weights rotate, moments are always saved; compute weights are a cast of the masters
O    moments rotate, master weights are always saved
WO   both rotate

storage   both ranks lose their memory in each fault. Snapshots hold 2 of 8 experts, checkpoints 1, as 4 and 1
          of 16 in the paper. In "WO-2L" one rank loses it (two-level recovery)
memory    processes die, snapshots stay. They hold 1 expert, every 8 iterations: much is lost
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import override

import pretrain_gpt_moe
from benchmarks.output import markdown_table, show
from benchmarks.partial_quality import CASE_HEADERS, case_rows
from benchmarks.partial_sizes import table_3_rows
from benchmarks.quality_runs import REFERENCE, Case, conditions, quality_options, run_cases
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import ConfigPart as Options
from moe_ft.config.fields import setting
from moe_ft.strategies import registry
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.kind import Partial
from moe_ft.units import Part, UnitId, UnitKind

_ROTATING = {
    "W": (Part.WEIGHTS,),
    "O": (Part.MOMENTS,),
    "WO": (Part.WEIGHTS, Part.MOMENTS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CoversConfig(Options):
    """Parts of an expert that rotate, and how many experts at a time."""

    covers: str = setting("WO", "parts of an expert that rotate", choices=tuple(_ROTATING))
    covers_k_snapshot: int = setting(1, "experts per MoE layer in each snapshot")
    covers_k_persist: int = setting(1, "experts per MoE layer in each checkpoint on storage")


@dataclass(frozen=True, kw_only=True)
class Covers(Partial):
    """`partial` with other parts of experts that rotate."""

    @override
    def options_in(self, config: MoeFtConfig) -> PartialConfig:
        own: CoversConfig = super().options_in(config)
        return PartialConfig(k_snapshot=f"{own.covers_k_snapshot}", k_persist=own.covers_k_persist)

    @override
    def division(self, config: MoeFtConfig) -> str:
        return f"--moe-ft-covers {self._covers(config)}"

    @override
    def divide(
        self, units: Iterable[UnitId], config: MoeFtConfig
    ) -> tuple[list[UnitId], list[UnitId]]:
        always, rotating = list[UnitId](), list[UnitId]()
        parts = _ROTATING[self._covers(config)]
        for unit in units:
            if unit.kind is not UnitKind.EXPERT:
                always.append(unit)
            elif len(parts) == 2:
                rotating.append(unit)
            else:
                for part in (Part.WEIGHTS, Part.MOMENTS):
                    (rotating if part in parts else always).append(replace(unit, part=part))
        return always, rotating

    def _covers(self, config: MoeFtConfig) -> str:
        own: CoversConfig = super().options_in(config)
        return own.covers


def train(flags: list[str]) -> None:
    """Train with the strategy `covers` among those that can be chosen."""
    registry.register(
        Covers(name="covers", options=CoversConfig, is_exact=False, leaves_out_frozen=True)
    )
    pretrain_gpt_moe.main(flags)


def covering(covers: str, interval: int, k: int, *more: str) -> tuple[str, ...]:
    """Return the flags of a strategy in which some parts rotate."""
    every = ("--moe-ft-interval", f"{interval}", "--moe-ft-covers-k-snapshot", f"{k}")
    return ("--moe-ft-strategy", "covers", "--moe-ft-covers", covers, *every, *more)


_STORAGE = ("--moe-ft-replication-factor", "0", "--moe-ft-persist-interval", "1")
CASES: dict[str, Case] = {
    REFERENCE: Case(fault=""),
    "no faults, lr x 1.001": Case(fault="", lr_factor=1.001),
    **{
        f"{covers}, storage": Case(
            flags=covering(covers, 2, 2, *_STORAGE), fault="lose-node", stores=True, loses_all=True
        )
        for covers in _ROTATING
    },
    "WO-2L, storage": Case(flags=covering("WO", 2, 2, *_STORAGE), fault="lose-node", stores=True),
    **{
        f"{covers}, memory, K=1, interval 8": Case(flags=covering(covers, 8, 1))
        for covers in _ROTATING
    },
}


def main() -> None:
    """Train what is missing, and print the tables."""
    options = quality_options(__doc__.splitlines()[0], "W, storage")
    job, names, runs = run_cases(options, CASES, train)
    show(
        [
            conditions(job, runs),
            markdown_table(case_rows(runs, names), CASE_HEADERS),
            "Calculated: size of a checkpoint against a full one, GPT-350M-16E, k = 1 (MoC-System, Table 3)",
            markdown_table(
                table_3_rows(),
                ("experts left out of", "paper", "eq. 6", "verdict", "master in full", "verdict"),
            ),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
