"""Repair in place: killed ranks are replaced in the processes of the others, and compute the same bits.

The launcher never learns of it: nothing is restarted. What cannot be repaired is restarted as before.
"""

import json
import re
from collections.abc import Mapping, Sequence

import pytest

from tests.distributed.scripts.pretrain_dying_between import COMPILES
from tests.jobs import DENSE, LOCAL, NUM_REPAIRED, PHASES, PP_EP, SPARSE, RepairedJob
from tests.kept_job import ROOT


@pytest.mark.versions
def test_ranks_killed_in_a_log_line_and_stopped_in_an_iteration_are_replaced_one_after_the_other(
    repaired: RepairedJob,
) -> None:
    heartbeat = ("--moe-ft-repair-heartbeat-s", "8")
    repaired.run(
        "stop:3@6:forward",
        strategy=(*SPARSE, *heartbeat),
        extra=("--num-workers", "2"),
        script=str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_dying_between.py"),
        env={
            "DYING": "kill:2@5",  # of iteration 4, counted from 0
            "DYING_IN": "log",
            "DYING_MARKER": str(repaired.folder / "has_died"),
            "PINS_DIR": str(repaired.folder),
        },
    )
    # The window that began with the repair at iteration 3 is complete at 6, if it was committed in time.
    repaired.check([2, 3], [4, 6], [{3}, {3, 6}])
    compiled = re.findall(rf"{COMPILES} on rank (\d)", (repaired.folder / "log").read_text())
    assert sorted(compiled) == ["0", "1", "2", "3"], "not in a replacement"
    check_pins(repaired)


def check_pins(job: RepairedJob) -> None:
    """Check that only new processes have pinned and touched memory, and that all was let go at the end."""
    for rank in range(job.num_ranks):
        text = (job.folder / f"pins_{rank}").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        *starts, end = lines
        assert (end["seam"], end["kept"]) == ("close", 0)
        new = [
            each["pid"] not in {one["pid"] for one in starts[:at]} for at, each in enumerate(starts)
        ]
        assert len(starts) > new.count(True)
        assert [each["pinned"] > 0 for each in starts] == new, starts
        assert [each["touched"] > 0 for each in starts] == new, starts
        assert len({each["kept"] for each in starts}) == 1


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=lambda strategy: str(strategy[0]))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("rank", "layout", "num_ranks"),
    [(0, PP_EP, 4), (2, PP_EP, 4), (3, PP_EP, 4), (0, {}, 2), (1, {}, 2)],
)
def test_rank_of_pipeline_and_experts_or_of_data_parallelism_is_replaced_in_every_phase(
    repaired: RepairedJob,
    rank: int,
    layout: Mapping[str, int],
    num_ranks: int,
    phase: str,
    strategy: Sequence[str],
) -> None:
    fault = f"kill:{rank}@4:{phase}"
    repaired.run(fault, strategy=strategy, layout=layout, num_ranks=num_ranks)
    repaired.check([rank], [4], [{3, 4} if strategy is DENSE else {3}])


@pytest.mark.rest
def test_evaluations_storage_and_upstream_logs_continue_after_a_repair(
    repaired: RepairedJob,
) -> None:
    storage = repaired.folder / "storage"
    repaired.run(
        "kill:3@5:backward",
        strategy=(
            *("dense", "--moe-ft-persist-dir", str(storage), "--moe-ft-persist-interval", "2"),
            *LOCAL,
        ),
        extra=("--eval-interval", "2", "--eval-iters", "1"),
    )
    repaired.check([3], [5], [{4, 5}])
    text = (repaired.folder / "log").read_text()
    assert re.findall(r"validation loss at iteration (\d) \| lm", text) == ["2", "4", "6", "8"]
    assert (storage / f"iter_{NUM_REPAIRED:07d}" / "manifest.json").exists()


@pytest.mark.rest
@pytest.mark.parametrize(
    "faults",
    [
        ("kill:3@4:forward", "exception:1@3:recovery"),
        ("kill:1@0:backward",),
    ],
    ids=["exception in a recovery", "kill before any state"],
)
def test_failure_that_cannot_be_repaired_is_restarted(
    repaired: RepairedJob, faults: Sequence[str]
) -> None:
    result = repaired.run(*faults, max_restarts=1)
    assert result.num_restarts == 1
    for rank in range(repaired.num_ranks):
        assert repaired.events("repair", rank) == []
        assert repaired.events("end", rank)[-1]["reason"] == "finished"
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
def test_torchrun_does_not_learn_of_a_repair(repaired: RepairedJob) -> None:
    repaired.run_under_torchrun("kill:2@4:after-step")
    repaired.check([2], [4], [{4}])
