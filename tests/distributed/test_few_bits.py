"""State that the optimizer itself keeps in few bits is saved and recovered unchanged, bit for bit.

They are four of the five configurations in Table 7 of MoEvement.
The fifth has FP8 masters, which Megatron lacks.
"""

from collections.abc import Sequence

import pytest

from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from tests.few_bits_adam import train_with_few_bits
from tests.jobs import CheckpointJob

FEW_BITS = "--use-precision-aware-optimizer"
# Formats that the optimizer keeps, and bytes per parameter at FULL: weight, master and moments.
CONFIGURATIONS = {
    "fp16-fp16+fp16": (
        ("--main-params-dtype", "fp16", "--exp-avg-dtype", "fp16", "--exp-avg-sq-dtype", "fp16"),
        2 + 2 + 2 + 2,
    ),
    "fp32-fp32+fp32": ((), 2 + 2 + 4 + 4),  # masters are 16-bit remainders of the weights
    "fp16-fp32+fp32": (("--main-params-dtype", "fp16"), 2 + 2 + 4 + 4),
    "fp16-fp8+fp16": (
        ("--main-params-dtype", "fp16", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16"),
        2 + 2 + 1 + 2,
    ),
    # Not in Table 7: unscaled moments in BF16, and masters that Megatron keeps itself, as it does with most
    # FP8 recipes. FP8 compute, the purpose of such a recipe, is not tested here.
    "fp32-bf16+bf16": (("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"), 2 + 2 + 2 + 2),
    "own-fp16+fp8": (
        ("--fp8-recipe", "blockwise", "--exp-avg-dtype", "fp16", "--exp-avg-sq-dtype", "fp8"),
        4 + 2 + 1,
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_in_few_bits_is_recovered_bitwise_from_snapshots_of_its_size(
    job: CheckpointJob, name: str
) -> None:
    flags, bytes_per_parameter = CONFIGURATIONS[name]
    job.train = train_with_few_bits
    reference = job.reference(FEW_BITS, *flags)
    strategy = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
    job.run_with_faults("kill:1@4:backward", flags=[FEW_BITS, *flags, *strategy], storage=True)
    (recovery,) = job.events("recovery")
    assert recovery["lossy"] == {}
    assert recovery["replayed_iterations"] == 1
    assert job.digests() == reference
    assert full_bytes(job) == {bytes_per_parameter}


def full_bytes(job: CheckpointJob) -> set[float]:
    """Return the bytes per parameter of all experts on storage, without gaps between tensors."""
    path = sorted(job.storage.glob("iter_*/rank_00000_*.json"))[-1]
    index = decode(path.read_bytes(), Index, str(path))
    widths = {"F32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1}
    found: dict[str, float] = {}
    for unit, entry in index.units.items():
        for tensor in entry.tensors:
            name = f"{unit}/{tensor.parameter}"
            found[name] = found.get(name, 0) + widths[tensor.dtype]
    return {size for name, size in found.items() if ".expert." in name}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (("--exp-avg-dtype", "bf16", "--moe-ft-state-dtype", "exp_avg=bf16"), "in bf16"),
        (("--moe-ft-state-dtype", "master=split"), "masters are the optimizer's own"),
    ],
)
def test_state_that_the_optimizer_keeps_in_few_bits_is_not_packed_again(
    job: CheckpointJob, flags: Sequence[str], rule: str
) -> None:
    job.train = train_with_few_bits
    result = job.run(FEW_BITS, *flags, "--moe-ft-allow-lossy")
    assert result.exit_codes[0] == 2
    assert rule in result.output(0)
