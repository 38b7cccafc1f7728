"""Deaths between two iterations: a log line or an evaluation begins again, and is printed once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.jobs import DENSE, LOCAL, NUM_REPAIRED, PP_EP, SPARSE, RepairedJob
from tests.kept_job import ROOT, KeptResult
from tests.references import Place

EVALUATIONS = ("--eval-interval", "2", "--eval-iters", "2")
SCRIPT = ROOT / "tests" / "distributed" / "scripts" / "pretrain_dying_between.py"
DEADLINE_S = 600  # a rank that hangs is noticed after a minute
_SUMS = re.compile(r"iteration +(\d+)/ +\d+ \|.*?(learning rate: .*)")
_LOSS = re.compile(r"validation loss at iteration (\d.*?) \| (.*)")


@dataclass(frozen=True, kw_only=True)
class Death:
    """Ranks that die in an evaluation, and what the repairs must be.

    Attributes:
        ranks: of the faults, as pretrain_dying_between.py has them.
        rounds: ``[repair]`` its number, and the ranks that it replaced.
        hung: ranks that were killed because they hung.
        restored: ``[repair]`` states that may have been recovered.
    """

    ranks: str
    rounds: Sequence[tuple[int, list[int]]]
    restored: Sequence[set[int]]
    hung: Sequence[str] = ()
    strategy: Sequence[str] = DENSE
    layout: Mapping[str, int] = field(default_factory=lambda: PP_EP)
    changes: Mapping[str, Any] = field(default_factory=dict)


def run(
    job: RepairedJob,
    death: Death,
    *,
    where: str = "evaluation",
    is_disturbed: bool = True,
    max_restarts: int = 0,
) -> KeptResult:
    return job.run(
        strategy=death.strategy,
        layout=death.layout,
        extra=EVALUATIONS,
        changes=death.changes,
        script=str(SCRIPT),
        env={
            "DYING": death.ranks if is_disturbed else "",
            "DYING_IN": where,
            "DYING_MARKER": str(job.folder / "has_died"),
        },
        max_restarts=max_restarts,
        deadline_s=DEADLINE_S,
    )


def check(job: RepairedJob, death: Death) -> None:
    """Check that survivors have kept their processes, and what was recovered."""
    dead = [rank for _, ranks in death.rounds for rank in ranks]
    for each in range(job.num_ranks):
        repairs = job.events("repair", each)
        assert [(line["round"], line["dead_ranks"]) for line in repairs] == list(death.rounds)
        assert {line["broken_iteration"] for line in repairs} == {3}
        assert repairs[-1]["is_replacement"] == (each in death.rounds[-1][1])
        assert list(repairs[-1]["hung_s"]) == list(death.hung)
        # A recovery that was broken off has no event.
        targets = [line["target_iteration"] for line in job.events("recovery", each)]
        assert targets == [line["recovered_iteration"] for line in repairs]
        for target, allowed in zip(targets, death.restored, strict=True):
            assert target in allowed
        pids = {line["pid"] for line in job.events("start", each)}
        assert (len(pids) > 1) == (each in dead), "survivors keep their processes"
        assert job.events("stopped", each) == []


def losses(job: RepairedJob) -> list[tuple[str, str]]:
    """Return the iterations and losses of all evaluations, as they were printed."""
    return _LOSS.findall((job.folder / "log").read_text())


DEATHS = {
    "first rank": Death(ranks="kill:0@4", rounds=[(1, [0])], restored=[{2, 3}]),
    "rank that prints": Death(ranks="kill:3@4", rounds=[(1, [3])], restored=[{2, 3}]),
    "sparse": Death(ranks="kill:2@4", rounds=[(1, [2])], restored=[{3}], strategy=SPARSE),
    "tensor parallelism": Death(
        ranks="kill:1@4",  # reads no data
        rounds=[(1, [1])],
        restored=[{2, 3}],
        layout={"tp": 2, "pp": 2},
        changes={"sequence_parallel": True},
    ),
    "virtual stages": Death(
        ranks="kill:2@4",
        rounds=[(1, [2])],
        restored=[{2, 3}],
        changes={"num_layers_per_virtual_pipeline_stage": 1},
    ),
    "breakpoints and windows": Death(
        ranks="kill:2@4", rounds=[(1, [2])], restored=[{3}], strategy=(*SPARSE, *LOCAL)
    ),
    # The sixth step of a survivor is the second one of the evaluation that began again.
    "another one in the evaluation that begins again": Death(
        ranks="kill:3@4 kill:0@6",
        rounds=[(1, [3]), (2, [0])],
        restored=[{2, 3}, {2, 3}],
    ),
    "rank that hangs": Death(ranks="hang:1@4", rounds=[(1, [1])], restored=[{2, 3}], hung=["1"]),
}


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("death", [pytest.param(each, id=name) for name, each in DEATHS.items()])
def test_evaluation_in_which_a_rank_dies_is_repeated_and_printed_once(
    place: Place, death: Death
) -> None:
    jobs = []
    for name, is_disturbed in (("undisturbed", False), ("job", True)):
        (folder := place.folder / name).mkdir()
        own = replace(place, folder=folder, memory_dir=place.memory_dir / name)
        jobs.append(job := RepairedJob(own))
        assert run(job, death, is_disturbed=is_disturbed).num_restarts == 0
    undisturbed, job = jobs
    check(job, death)
    assert job.logged() == list(range(1, NUM_REPAIRED + 1)), "each log line comes once"
    # The last two are those after training.
    assert [at for at, _ in losses(job)] == [
        *("2", "4", "6", "8"),
        *("8 on validation set", "8 on test set"),
    ]
    assert losses(job) == losses(undisturbed)
    assert job.digests() == job.reference()


# Half of the log lines are those of two iterations, so that their sums count.
LOGS = {"log_interval": 2, "timing_log_level": 2}
LOG_DEATHS = {
    "beginning": ("log", Death(ranks="kill:1@4", rounds=[(1, [1])], restored=[{2, 3}])),
    "end": ("logged", Death(ranks="kill:1@4", rounds=[(1, [1])], restored=[{2, 3}])),
    "two ranks": (
        "log",
        Death(ranks="kill:2@4 kill:1@5", rounds=[(1, [2]), (2, [1])], restored=[{2, 3}, {2, 3}]),
    ),
    "breakpoints and windows": (
        "log",
        Death(ranks="kill:2@4", rounds=[(1, [2])], restored=[{3}], strategy=(*SPARSE, *LOCAL)),
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("where", LOG_DEATHS)
def test_log_line_in_which_a_rank_dies_is_written_once_with_the_same_sums(
    place: Place, where: str
) -> None:
    at, death = LOG_DEATHS[where]
    death = replace(death, changes=LOGS)
    lines, jobs = [], []
    for name, is_disturbed in (("undisturbed", False), ("job", True)):
        (folder := place.folder / name).mkdir()
        own = replace(place, folder=folder, memory_dir=place.memory_dir / name)
        jobs.append(job := RepairedJob(own))
        assert run(job, death, where=at, is_disturbed=is_disturbed).num_restarts == 0
        lines.append(_SUMS.findall((job.folder / "log").read_text()))
    check(jobs[1], death)
    assert [int(each) for each, _ in lines[1]] == [1, 2, 4, 6, 8], "each log line comes once"
    assert lines[1] == lines[0]
    assert jobs[1].digests() == jobs[1].reference()
