"""Checkpoint sizes and the bottleneck rank with partial experts, next to MoC-System's figures.

    python -m benchmarks.partial_sizes [--quick] [--output FILE.md]

Calculated, not measured. First Table 1, Fig. 2, Fig. 10 and the "Ckpt" column of Table 3 by the paper's own
arithmetic (benchmarks/paper_sizes.py): 14 bytes of a parameter, equal slices of every expert. Two ways of
counting bytes: equation 6 (experts that are not selected are left out) and "master in full" (the master
weights of all experts are saved). Bottleneck: the most that a rank saves in one snapshot while sequential
selection goes around. Verdicts: REPRODUCED if equal when rounded as printed, CLOSE within 5 % of the printed
figure, else NOT. Then what moe_ft saves of the same models on the same ranks (strategies/partial/size.py).
"""

import argparse
import itertools
import platform
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.output import markdown_table, parse_options, show
from benchmarks.paper_models import PRESETS, ModelShape, Sharding, planned_preset
from benchmarks.paper_sizes import (
    NonExpertUnit,
    PaperBytes,
    PaperLayout,
    checkpoint_bytes,
    paper_workload,
)
from moe_ft.planning.report import reduction
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.kind import PARTIAL
from moe_ft.strategies.partial.size import PartialSizes

CASES = {"Case 1": (8, 8), "Case 2": (16, 16), "Case 3": (16, 8)}  # Table 2: (dp, ep)
KS = (1, 2, 4, 8, 16)
BYTE_MODELS = {"eq. 6": PaperBytes(), "master in full": PaperBytes(master_always_full=True)}
UNITS = {"elements": NonExpertUnit.ELEMENT, "modules": NonExpertUnit.MODULE}
CLOSE = 0.05
SMALL, LARGE = PRESETS["gpt-125m-8e"], PRESETS["gpt-350m-16e"]

FULL_REDUCTION = (12.0, 28.0)  # section 6.2.1, % over the cases, equal sharding against none
PARTIAL_REDUCTION = (22.0, 29.0)  # the same with PEC; k not printed
ADAPTIVE_REDUCTION = (3.7, 6.1)  # adaptive against equal sharding, k = 1

Row = tuple[object, ...]


def verdict(ours: float, paper: float, digits: int) -> str:
    """Compare a figure with one that is printed with so many digits."""
    if round(ours, digits) == paper:
        return "REPRODUCED"
    miss = ours - paper
    word = "CLOSE" if abs(miss) <= CLOSE * abs(paper) else "NOT"
    return f"{word} ({miss:+.{digits + 1}f})"


def model_rows() -> Iterator[Row]:
    """Yield parameters (Table 1) and shares of a full checkpoint (Fig. 2)."""
    small, large = SMALL.num_parameters / 1e6, LARGE.num_parameters / 1e9
    yield "GPT-125M-8E, parameters, 1e6", f"{small:.1f}", "323", verdict(small, 323.0, 0)
    yield "GPT-350M-16E, parameters, 1e9", f"{large:.3f}", "1.7", verdict(large, 1.7, 1)
    large = LARGE.num_parameters / 2**30
    yield "GPT-350M-16E, parameters, 2^30", f"{large:.3f}", "1.7", verdict(large, 1.7, 1)
    bytes_of, total = PaperBytes(), checkpoint_bytes(LARGE, LARGE.num_experts, PaperBytes())
    expert, other = LARGE.num_expert_parameters, LARGE.num_non_expert_parameters
    for name, num_bytes, printed in (
        ("expert weights", expert * bytes_of.weights, 12),
        ("non-expert weights", other * bytes_of.weights, 2),
        ("expert optimizer", expert * bytes_of.optimizer, 74),
        ("non-expert optimizer", other * bytes_of.optimizer, 12),
    ):
        share = 100 * num_bytes / total
        yield f"share of {name}, %", f"{share:.1f}", printed, verdict(share, printed, 0)


def size_rows() -> Iterator[Row]:
    """Yield the size of a checkpoint against a full one (Fig. 10a), in %."""
    for (model, shape), (name, byte_model) in itertools.product(
        PRESETS.items(), BYTE_MODELS.items()
    ):
        full = checkpoint_bytes(shape, shape.num_experts, byte_model)
        for k in _ks(shape):
            num_bytes = checkpoint_bytes(shape, k, byte_model)
            share = 100 * num_bytes / full
            is_printed = shape is LARGE and k == 1
            paper = ("42.3", verdict(share, 42.3, 1)) if is_printed else ("", "")
            yield model, name, k, f"{num_bytes / 1e6:,.0f}", f"{share:.1f}", *paper


def table_3_rows() -> Iterator[Row]:
    """Yield the relative sizes of Table 3, whose rows leave experts out of some classes of bytes only."""
    full = checkpoint_bytes(LARGE, LARGE.num_experts, PaperBytes())
    for name, printed, weights_full, optimizer_full in (
        ("W: weights only", 0.88, False, True),
        ("O: optimizer only", 0.54, True, False),
        ("WO: both", 0.42, False, False),
    ):
        cells: list[object] = []
        for master_full in (False, True):
            byte_model = PaperBytes(
                weights_always_full=weights_full,
                master_always_full=optimizer_full or master_full,
                moments_always_full=optimizer_full,
            )
            share = checkpoint_bytes(LARGE, 1, byte_model) / full
            cells += [f"{share:.3f}", verdict(share, printed, 2)]
        yield name, printed, *cells


def bottlenecks(
    shape: ModelShape, case: str, k: int, byte_model: PaperBytes, unit: NonExpertUnit
) -> dict[Sharding, int]:
    """Return the bytes of the bottleneck rank with every sharding."""
    dp, ep = CASES[case]
    return {
        sharding: paper_workload(
            shape,
            k,
            byte_model,
            PaperLayout(dp=dp, ep=ep, sharding=sharding, non_expert_unit=unit),
        ).bottleneck_bytes
        for sharding in Sharding
    }


def _ks(shape: ModelShape) -> list[int]:
    return [k for k in KS if k <= shape.num_experts]


def _reductions(most: dict[Sharding, int]) -> tuple[float, float]:
    """Return in % what equal sharding saves against none, and adaptive against equal."""
    return (
        100 * reduction(most[Sharding.EQUAL], most[Sharding.NONE]),
        100 * reduction(most[Sharding.ADAPTIVE], most[Sharding.EQUAL]),
    )


def bottleneck_rows(shape: ModelShape, unit: NonExpertUnit) -> Iterator[Row]:
    """Yield the bottleneck rank of every case that the model's experts allow (Fig. 10b to d)."""
    for name, byte_model in BYTE_MODELS.items():
        for case, (_, ep) in CASES.items():
            if shape.num_experts % ep:
                continue
            for k in _ks(shape):
                most = bottlenecks(shape, case, k, byte_model, unit)
                sizes = (f"{most[sharding] / 1e6:,.1f}" for sharding in Sharding)
                equal, adaptive = _reductions(most)
                yield name, case, k, *sizes, f"{equal:.1f}", f"{adaptive:.1f}"


def range_rows() -> Iterator[Row]:
    """Yield ranges over the cases against those that the paper prints, in %."""
    for unit_name, unit in UNITS.items():
        for (name, byte_model), k in itertools.product(BYTE_MODELS.items(), KS):
            of_cases = [_reductions(bottlenecks(LARGE, c, k, byte_model, unit)) for c in CASES]
            equal, adaptive = zip(*of_cases, strict=True)
            if k == LARGE.num_experts:
                if byte_model is BYTE_MODELS["eq. 6"]:  # full checkpoints are the same in both
                    yield _range_row("full, equal", "both", k, unit_name, equal, FULL_REDUCTION, 0)
                continue
            yield _range_row("partial, equal", name, k, unit_name, equal, PARTIAL_REDUCTION, 0)
            if k == 1:
                yield _range_row("adaptive", name, k, unit_name, adaptive, ADAPTIVE_REDUCTION, 1)


def _range_row(
    what: str,
    byte_model: str,
    k: int,
    unit: str,
    values: Sequence[float],
    paper: tuple[float, float],
    digits: int,
) -> Row:
    low, high = min(values), max(values)
    return (
        what,
        byte_model,
        k,
        unit,
        f"{low:.1f} to {high:.1f}",
        f"{paper[0]:.{digits}f} to {paper[1]:.{digits}f}",
        verdict(low, paper[0], digits),
        verdict(high, paper[1], digits),
    )


def training_rows() -> Iterator[Row]:
    """Yield what moe_ft saves in every case that the model's experts allow."""
    for (model, shape), (case, (dp, ep)) in itertools.product(PRESETS.items(), CASES.items()):
        if shape.num_experts % ep:
            continue
        flags = ("--moe-ft-strategy", "partial")
        replicated = planned_preset(shape, *flags, dp=dp, ep=ep)
        jobs = [planned_preset(shape, *flags, "--use-distributed-optimizer", dp=dp, ep=ep)]
        jobs += [replicated.divided(sharding) for sharding in Sharding]
        sizes = [PartialSizes(job, PartialConfig(), PARTIAL.build) for job in jobs]
        for k in _ks(shape):
            workloads = [each.plan_workload(k) for each in sizes]
            num_bytes = workloads[0].total_bytes
            most = (f"{workload.bottleneck_bytes / 1e6:,.1f}" for workload in workloads)
            yield model, case, k, f"{num_bytes / 1e6:,.0f}", f"{num_bytes / dp / 1e6:,.1f}", *most


def _claim(row: Sequence[object]) -> int:
    return ("full, equal", "partial, equal", "adaptive").index(str(row[0]))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = parse_options(parser)
    bottleneck_headers = ["bytes", "case", "k", *(f"{sharding}, MB" for sharding in Sharding)]
    bottleneck_headers += ["equal saves, %", "adaptive saves more, %"]
    parts = [
        "Calculated, not measured. All tables but the last are MoC-System's own arithmetic, not what moe_ft "
        "saves: weights 2, master weights 4, moments 8 bytes; optimizer distributed in equal slices, also "
        "of every expert; cases 1, 2, 3: dp/ep 8/8, 16/16, 16/8. REPRODUCED: equal when rounded as "
        f"printed; CLOSE: within {CLOSE:.0%} of the printed figure. Python "
        f"{platform.python_version()}, numpy {np.__version__}.",
        "Parameters (Table 1) and composition of a full checkpoint (Fig. 2)",
        markdown_table(model_rows(), ("what", "ours", "paper", "verdict")),
        "Size of a checkpoint with k experts per MoE layer (Fig. 10a)",
        markdown_table(
            size_rows(), ("model", "bytes", "k", "MB", "of full, %", "paper, %", "verdict")
        ),
        "Size relative to full with k = 1 in some classes of bytes only (Table 3, GPT-350M-16E)",
        markdown_table(
            table_3_rows(),
            ("leaves experts out of", "paper", "eq. 6", "verdict", "master in full", "verdict"),
        ),
        "Reduction of the bottleneck rank, range over cases 1 to 3, GPT-350M-16E (Fig. 10b to d). "
        "Non-experts are divided by elements or by whole modules; the paper prints neither k of "
        "its partial range nor the modules",
        markdown_table(
            sorted(range_rows(), key=_claim),
            ("sharding", "bytes", "k", "unit", "ours, %", "paper, %", "lower end", "upper end"),
        ),
    ]
    for model, shape in PRESETS.items():
        for unit_name, unit in UNITS.items():
            parts += [
                f"Bottleneck rank, {model.upper()}, non-experts divided by {unit_name}",
                markdown_table(bottleneck_rows(shape, unit), bottleneck_headers),
            ]
    parts += [
        "Case 2 needs 16 expert-parallel ranks; GPT-125M-8E has 8 experts.",
        "What moe_ft saves: 12 bytes of a parameter (master weights and moments), and of each rank what it "
        "owns: with the distributed optimizer its slices of Megatron's buffers, in which an expert lies on "
        "one rank or two, and --moe-ft-sharding changes nothing; without it what --moe-ft-sharding says",
        markdown_table(
            training_rows(),
            (
                *("model", "case", "k", "MB", "mean of a rank, MB", "bottleneck, MB"),
                *(f"not distributed, {sharding}, MB" for sharding in Sharding),
            ),
        ),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
