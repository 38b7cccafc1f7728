"""Jobs whose optimizer state Megatron steps or parks on the host, in its own loop.

With --optimizer-cpu-offload both of Megatron's optimizers run: on CPU ranks all memory is the host's, and
what would be on a device is told apart where it divides the parameters (cpu/adam.py of the product).
What its dev branch does with --offload-optimizer-states has stand-ins (tests/parked_state.py).
"""

from collections.abc import Sequence

import pytest

from tests.harness import Train
from tests.jobs import SPARSE, CheckpointJob, RepairedJob
from tests.kept_job import ROOT
from tests.parked_state import train_chunked, train_parked

OFFLOAD = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
# As DeepSeek-V3 on H100 with 16k tokens; the dtypes of moments are those that this optimizer does not heed.
RECIPE = (
    *(*OFFLOAD, "--overlap-cpu-optimizer-d2h-h2d"),
    *("--main-grads-dtype", "fp32", "--main-params-dtype", "fp32"),
    *("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
)
HALF = (*OFFLOAD, "--optimizer-offload-fraction", "0.5")


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [SPARSE, ("dense",)])
@pytest.mark.parametrize("offload", [HALF, RECIPE])
def test_offloaded_optimizer_is_recovered_bitwise_from_memory_and_storage(
    job: CheckpointJob, offload: Sequence[str], strategy: Sequence[str]
) -> None:
    flags = [*offload, "--moe-ft-strategy", *strategy]
    job.run_with_faults("kill:1@4:backward", flags=flags, storage=True)
    assert job.events("recovery")[0]["lossy"] == {}
    assert job.digests() == job.reference(*offload)


@pytest.mark.parametrize("offload", [HALF, pytest.param(RECIPE, marks=pytest.mark.rest)])
def test_survivors_of_a_repair_step_what_was_restored(
    repaired: RepairedJob, offload: Sequence[str]
) -> None:
    repaired.run("kill:1@4:in-step", strategy=SPARSE, layout={"ep": 2}, num_ranks=2, extra=offload)
    repaired.check([1], [4], [{3}])


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [SPARSE, ("dense",)])
@pytest.mark.parametrize("train", [train_parked, train_chunked])
def test_state_that_is_parked_between_steps_is_recovered_bitwise(
    job: CheckpointJob, train: Train, strategy: Sequence[str]
) -> None:
    expected = job.reference()  # of a job that parks nothing
    job.train = train
    flags = ["--moe-ft-strategy", *strategy]
    job.run_with_faults("kill:1@4:backward", flags=flags, storage=True)
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["buffers", "chunks"])
def test_state_of_survivors_that_is_parked_when_a_rank_dies_is_restored(
    repaired: RepairedJob, kind: str
) -> None:
    repaired.run(
        *("kill:1@4:backward", "kill:1@6:after-step"),
        strategy=("dense",),
        layout={"ep": 2},
        num_ranks=2,
        script=str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_parked.py"),
        env={"PARKED": kind},
    )
    repaired.check([1, 1], [4, 6], [{3, 4}, {5, 6}])  # bits of a job that parks nothing
