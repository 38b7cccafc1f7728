"""Repairs in which only the stages that lost state run iterations again; the others keep theirs.

When ranks die is the subject of the simulation; here are the layouts and models.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.harness import events
from tests.kept_job import logged_in, run_kept
from tests.local_recoveries import (
    ALL,
    BIASED,
    DENSE,
    FP16,
    INTERLEAVED,
    NUM_ITERATIONS,
    PP4,
    Case,
)
from tests.references import Place
from tests.shares import share_of


@dataclass(frozen=True, kw_only=True)
class RepairCase(Case):
    """A case whose dead ranks are replaced in place.

    Attributes:
        repeated: ``[repair]`` iterations that ranks of stages that kept their state ran again; others more.
    """

    faults: Sequence[str] = ("kill:1@5:backward", "kill:2@10:forward")
    repeated: Sequence[int] = (0, 0)

    def repair(self, place: Place) -> str:
        """Run the job to its end in one start, under `moe_ft keep`; return its log."""
        flags = [*self.flags_of(place), "--moe-ft-repair", "auto"]
        result = run_kept(flags, self.world_size, log=place.folder / "log")
        assert result.check().num_restarts == 0
        return result.log.read_text()

    def check_repairs(self, place: Place) -> None:
        """Check that survivors kept their processes, and what each rank has run again."""
        self.check(place)
        dead = [int(fault.partition(":")[2].partition("@")[0]) for fault in self.faults]
        for rank in range(self.world_size):
            found = events(place.folder / "events", rank, "repair")
            assert [each["dead_ranks"] for each in found] == [[each] for each in dead]
            assert [each["scope"] for each in found] == [
                "local" if stages else "global" for stages in self.stages
            ]
            assert [each["stages"] for each in found] == [[*each] for each in self.stages]
            for each, stages, repeated in zip(found, self.stages, self.repeated, strict=True):
                if stages and self.stage_of(rank) not in stages:
                    assert each["repeated_iterations"] == repeated, each
                else:
                    assert each["repeated_iterations"] > repeated, each
            pids = [line["pid"] for line in events(place.folder / "events", rank, "start")]
            assert len(pids) == 1 + len(dead)
            assert len(set(pids)) == 1 + dead.count(rank), "survivors keep their processes"


CASES = {
    "first-and-last-stage": RepairCase(),
    "middle-stage": RepairCase(
        layout=PP4, faults=("kill:2@5:forward", "kill:1@10:backward"), stages=((2,), (1,))
    ),
    "two-stages": RepairCase(layout={"pp": 2}, faults=("kill:0@5:forward", "kill:1@10:backward")),
    "again-before-a-new-window": RepairCase(
        faults=("kill:1@5:backward", "kill:2@6:forward"), stages=((0,), (0,)), repeated=(0, 1)
    ),
    "in-the-step": RepairCase(
        layout=PP4, faults=("kill:2@5:in-step", "kill:3@10:after-step"), stages=((2,), (3,))
    ),
    "fp16": RepairCase(**FP16),
    "biases-and-tokens": RepairCase(flags=(*BIASED, "--calculate-per-token-loss")),
    "result-that-cannot-be-made": RepairCase(
        faults=("kill:1@5:after-step",),
        stages=(ALL,),
        repeated=(0,),
        flags=("--log-num-zeros-in-grad",),
    ),
    "virtual-stages": RepairCase(
        layout=PP4,
        faults=("kill:2@5:in-step", "kill:3@10:backward"),
        stages=((2,), (3,)),
        flags=INTERLEAVED,
        changes={"num_layers": 8},
    ),
    "tensor-parallelism": RepairCase(layout={"pp": 2, "tp": 2}, flags=("--sequence-parallel",)),
    "snapshots": RepairCase(
        faults=("kill:3@6:forward", "kill:0@11:backward"), stages=((1,), (0,)), strategy=DENSE
    ),
}


@pytest.mark.parametrize("name", share_of(CASES, "two-stages"))
def test_survivors_of_whole_stages_run_nothing_again_in_a_repair(place: Place, name: str) -> None:
    case = CASES[name]
    log = case.repair(place)
    case.check_repairs(place)
    assert logged_in(log) == list(range(1, NUM_ITERATIONS + 1)), "each log line comes once"
    case.check_end(place)


@pytest.mark.rest
@pytest.mark.parametrize("second", ["kill:1@3:replay", "kill:2@5:recovery"], ids=["same", "other"])
def test_death_in_a_local_repair_begins_another_one(place: Place, second: str) -> None:
    """The other rank that dies has left its breakpoint: also its stage runs nothing again."""
    case = RepairCase(layout=PP4, faults=("kill:1@5:backward", second))
    case.repair(place)
    for rank in range(case.world_size):
        (found,) = events(place.folder / "events", rank, "repair")
        assert (found["round"], found["broken_iteration"]) == (2, 5)
        assert (found["scope"], found["stages"], found["recovered_iteration"]) == ("local", [1], 5)
        assert (found["repeated_iterations"] > 0) == (rank == 1)
        recoveries = events(place.folder / "events", rank, "recovery")
        assert rank == 1 or not any(each["replayed_iterations"] for each in recoveries)
    case.check_end(place)


@pytest.mark.rest
def test_log_lines_after_repairs_are_those_of_a_run_without_failures(place: Place) -> None:
    """Both die in or after their step: the result of that iteration is not computed again."""
    faults = ("kill:0@5:after-step", "kill:3@10:in-step")
    case = RepairCase(faults=faults, flags=("--moe-z-loss-coeff", "1e-3"))
    found: list[Any] = []
    for name, each in (("whole", replace(case, faults=())), ("repaired", case)):
        own = replace(place, folder=place.folder / name, memory_dir=place.memory_dir / name)
        own.folder.mkdir()
        log = each.repair(own)
        lines = [line for line in log.splitlines() if logged_in(line)]
        found.append([re.sub(r"^.*?iteration|elapsed time[^|]*\|", "", line) for line in lines])
    case.check_repairs(own)
    assert found[0] == found[1]
    assert "z_loss" in found[0][0]
