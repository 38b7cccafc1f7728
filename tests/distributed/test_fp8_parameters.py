"""FP8 parameters: bytes and scales are the same after a recovery, in Megatron's own loop."""

from collections.abc import Sequence

import pytest

from tests.fp8_training import train_with_fp8_parameters
from tests.jobs import CheckpointJob, RepairedJob
from tests.kept_job import ROOT

FP8 = ("--fp8-param-gather", "--fp8-format", "e4m3")
BF16_MOMENTS = (
    *("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
)
MXFP8 = (*FP8, "--fp8-recipe", "mxfp8", "--reuse-grad-buf-for-mxfp8-param-ag")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
RECIPES = {
    "blockwise": (*FP8, "--fp8-recipe", "blockwise"),
    "blockwise, overlapped": (*FP8, "--fp8-recipe", "blockwise", *OVERLAP, *BF16_MOMENTS),
    "mxfp8": (*MXFP8, *BF16_MOMENTS),
    "mxfp8, overlapped": (*MXFP8, *OVERLAP),
    "delayed": ("--fp8-param-gather", "--fp8-format", "hybrid"),
    "tensorwise": (*FP8, "--fp8-recipe", "tensorwise"),
}
SCRIPT = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_fp8.py")
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
# Where a snapshot is packed, the copy of a unit that computes is rounded there.
PACKED = (*SPARSE, "--moe-ft-staging-bytes", "1MiB")
QUICK = {("blockwise, overlapped", PACKED), ("mxfp8, overlapped", SPARSE)}
CASES = [(recipe, strategy) for recipe in RECIPES for strategy in ((), SPARSE, PACKED)]


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.rest) for each in CASES],
)
def test_bytes_and_scales_of_fp8_parameters_are_recovered_bitwise(
    job: CheckpointJob, recipe: str, strategy: Sequence[str]
) -> None:
    job.train = train_with_fp8_parameters
    reference = job.reference(*RECIPES[recipe])
    job.run_with_faults("kill:1@4:backward", flags=[*RECIPES[recipe], *strategy])
    assert job.digests() == reference


@pytest.mark.rest
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_parameters_of_a_replaced_rank_have_the_same_bytes_and_scales(
    repaired: RepairedJob, recipe: str
) -> None:
    repaired.train = train_with_fp8_parameters  # for the reference
    repaired.run("kill:3@4:backward", extra=RECIPES[recipe], script=SCRIPT)
    repaired.check([3], [4], [{4}])
