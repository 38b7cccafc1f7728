"""Repairs in which only the stages that lost state run iterations again; the others keep theirs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.harness import digests, events
from tests.kept_job import run_kept
from tests.local_recoveries import ALL, DENSE, NUM_ITERATIONS, PP2, PP4, Case
from tests.references import References

_LOG_LINE = re.compile(r"iteration +(\d+)/ +\d+ \|")


@dataclass(frozen=True, kw_only=True)
class RepairCase(Case):
    """A case whose dead ranks are replaced in place.

    Attributes:
        dead: ``[repair]`` the rank.
        repeated: ``[repair]`` iterations that ranks of stages that kept their state ran again; others more.
    """

    dead: Sequence[int]
    repeated: Sequence[int]

    def repair(self, base: Sequence[str], folder: Path, memory_dir: Path) -> None:
        """Run the job to its end in one start, under `moe_ft keep`."""
        flags = [*self.flags_of(base, folder, memory_dir), "--moe-ft-repair", "auto"]
        result = run_kept(flags, self.world_size, log=folder / "log")
        assert result.check().num_restarts == 0

    def check_repairs(self, folder: Path) -> None:
        """Check that survivors kept their processes, and what each rank has run again."""
        self.check(folder)
        for rank in range(self.world_size):
            found = events(folder / "events", rank, "repair")
            assert [each["dead_ranks"] for each in found] == [[each] for each in self.dead]
            assert [each["scope"] for each in found] == [
                "local" if stages else "global" for stages in self.stages
            ]
            assert [each["stages"] for each in found] == [[*(each or ())] for each in self.stages]
            for each, stages, repeated in zip(found, self.stages, self.repeated, strict=True):
                is_whole = stages is None or (stages and self.stage_of(rank) not in stages)
                assert (
                    (each["repeated_iterations"] == repeated)
                    if is_whole
                    else (each["repeated_iterations"] > repeated)
                ), each
            pids = [line["pid"] for line in events(folder / "events", rank, "start")]
            assert len(pids) == 1 + len(self.dead)
            assert len(set(pids)) == 1 + [*self.dead].count(rank), "survivors keep their processes"
        logged = [int(number) for number in _LOG_LINE.findall((folder / "log").read_text())]
        assert logged == list(range(1, NUM_ITERATIONS + 1)), "each log line comes once"


CASES = {
    "first-and-last-stage": RepairCase(
        layout=PP2,
        faults=("kill:1@5:backward", "kill:2@10:forward"),
        stages=[[0], [1]],
        dead=[1, 2],
        repeated=[0, 0],
    )
}
REST = {
    "middle-stage": RepairCase(
        layout=PP4,
        faults=("kill:2@5:forward", "kill:1@10:backward"),
        stages=[[2], [1]],
        dead=[2, 1],
        repeated=[0, 0],
    ),
    "ends-of-the-pipeline": RepairCase(
        layout=PP4,
        faults=("kill:0@5:backward", "kill:3@10:forward"),
        stages=[[0], [3]],
        dead=[0, 3],
        repeated=[0, 0],
    ),
    "two-stages": RepairCase(
        layout={"pp": 2},
        faults=("kill:0@5:forward", "kill:1@10:backward"),
        stages=[[0], [1]],
        dead=[0, 1],
        repeated=[0, 0],
    ),
    "again-before-a-new-window": RepairCase(
        layout=PP2,
        faults=("kill:1@5:backward", "kill:2@6:forward"),
        stages=[[0], [0]],
        dead=[1, 2],
        repeated=[0, 1],
    ),
    "before-and-after-the-step": RepairCase(
        layout=PP2,
        faults=("kill:1@5:before-step", "kill:2@10:after-step"),
        stages=[[0], [1]],
        dead=[1, 2],
        repeated=[0, 0],
    ),
    "in-the-step": RepairCase(
        layout=PP4,
        faults=("kill:2@5:in-step", "kill:3@10:in-step"),
        stages=[[2], [3]],
        dead=[2, 3],
        repeated=[0, 0],
    ),
    "fp16": RepairCase(
        layout=PP2,
        faults=("kill:1@5:after-step", "kill:2@10:backward"),
        stages=[[0], [1]],
        dead=[1, 2],
        repeated=[0, 0],
        # The scale grows until gradients overflow, again and again: some steps are skipped.
        flags=("--fp16", "--initial-loss-scale", "1048576", "--loss-scale-window", "2"),
        changes={"bf16": False, "hysteresis": 1},
    ),
    "biases-and-tokens": RepairCase(
        layout=PP2,
        faults=("kill:3@5:after-step", "kill:0@10:backward"),
        stages=[[1], [0]],
        dead=[3, 0],
        repeated=[0, 0],
        flags=(
            *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
            "--calculate-per-token-loss",
        ),
    ),
    "result-that-cannot-be-made": RepairCase(
        layout=PP2,
        faults=("kill:1@5:after-step",),
        stages=[ALL],
        dead=[1],
        repeated=[0],
        flags=("--log-num-zeros-in-grad",),
    ),
    "virtual-stages": RepairCase(
        layout=PP4,
        faults=("kill:2@5:in-step", "kill:3@10:backward"),
        stages=[[2], [3]],
        dead=[2, 3],
        repeated=[0, 0],
        flags=("--num-virtual-stages-per-pipeline-rank", "2"),
        changes={"num_layers": 8},
    ),
    "tensor-parallelism": RepairCase(
        layout={"pp": 2, "tp": 2},
        faults=("kill:1@5:backward", "kill:2@10:after-step"),
        stages=[[0], [1]],
        dead=[1, 2],
        repeated=[0, 0],
        flags=("--sequence-parallel",),
    ),
    "snapshots": RepairCase(
        layout=PP2,
        faults=("kill:3@6:forward", "kill:0@11:backward"),
        stages=[[1], [0]],
        strategy=DENSE,
        dead=[3, 0],
        repeated=[0, 0],
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.rest) for name, case in REST.items()),
    ],
)
def test_survivors_of_whole_stages_run_nothing_again_in_a_repair(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
    case: RepairCase,
) -> None:
    base = case.base(dataset_flags)
    case.repair(base, tmp_path, memory_dir)
    case.check_repairs(tmp_path)
    assert digests(tmp_path / "events", case.world_size) == references.digests(
        base, case.world_size
    )


@pytest.mark.rest
@pytest.mark.parametrize("second", ["kill:1@3:replay", "kill:2@5:recovery"], ids=["same", "other"])
def test_death_in_a_local_repair_begins_another_one(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
    second: str,
) -> None:
    """The other rank that dies has left its breakpoint: also its stage runs nothing again."""
    case = RepairCase(
        layout=PP4, faults=("kill:1@5:backward", second), stages=[], dead=[], repeated=[]
    )
    base = case.base(dataset_flags)
    case.repair(base, tmp_path, memory_dir)
    for rank in range(case.world_size):
        (found,) = events(tmp_path / "events", rank, "repair")
        assert (found["round"], found["broken_iteration"]) == (2, 5)
        assert (found["scope"], found["stages"], found["recovered_iteration"]) == ("local", [1], 5)
        assert (found["repeated_iterations"] > 0) == (rank == 1)
        assert rank == 1 or not any(
            each["replayed_iterations"] for each in events(tmp_path / "events", rank, "recovery")
        )
    assert digests(tmp_path / "events", case.world_size) == references.digests(
        base, case.world_size
    )


@pytest.mark.rest
def test_log_lines_after_repairs_are_those_of_a_run_without_failures(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    """Both die in or after their step: the result of that iteration is not computed again."""
    case = RepairCase(
        layout=PP2,
        faults=("kill:0@5:after-step", "kill:3@10:in-step"),
        stages=[[0], [1]],
        dead=[0, 3],
        repeated=[0, 0],
        flags=("--moe-z-loss-coeff", "1e-3"),
    )
    base = case.base(dataset_flags)
    found = []
    for name, each in (("whole", replace(case, faults=())), ("repaired", case)):
        folder = tmp_path / name
        folder.mkdir()
        each.repair(base, folder, memory_dir / name)
        found.append(numbers_in((folder / "log").read_text()))
    case.check_repairs(tmp_path / "repaired")
    assert found[0] == found[1]
    assert "z_loss" in found[0][0]


def numbers_in(log: str) -> list[str]:
    """Return the log lines of a run without times."""
    lines = [line for line in log.splitlines() if _LOG_LINE.search(line)]
    return [re.sub(r"^.*?iteration|elapsed time[^|]*\|", "", line) for line in lines]
