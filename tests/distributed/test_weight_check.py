"""Bits that flip in memory are found by --moe-ft-check-weights before a step uses them; nothing else is."""

from collections.abc import Mapping
from typing import Any

import pytest

from moe_ft.loop.refusing import EXIT_CORRUPTION
from tests.covering_array import Case, case_of, runs
from tests.demo_model import NO_EXPERTS
from tests.faulty_case import job_flags
from tests.harness import JobResult, run_training
from tests.jobs import CheckpointJob, Job, fault_flags
from tests.references import Digests, Place
from tests.shares import share_of


class CheckedJob(Job):
    """A job without checkpoints whose weights are checked."""

    def run(self, every: int, *faults: str) -> JobResult:
        flags = ["--moe-ft-event-log", str(self.events_dir), "--moe-ft-state-digest"]
        flags += ["--moe-ft-check-weights", str(every), *fault_flags(faults)]
        return run_training(
            [*self.base, *flags], self.num_ranks, log_dir=self.folder / "log", train=self.train
        )

    def findings(self) -> list[dict[str, Any]]:
        """Return what each rank says that it has found."""
        found = [self.events("corruption", rank) for rank in range(self.num_ranks)]
        names = ("iteration", "check", "ranks", "decided", "where", "since")
        return [{name: line[name] for name in names} for lines in found for line in lines]


@pytest.fixture
def checked(place: Place) -> CheckedJob:
    return CheckedJob(place)


def test_wrong_results_that_all_ranks_step_with_are_not_found(
    checked: CheckedJob, job: CheckpointJob, expected: Digests
) -> None:
    checked.run(1, "flip:0@1:gradients", "flip:1@2:activation").check()
    assert [line["target"] for line in checked.faults_fired()] == ["gradients", "activation"]
    assert checked.findings() == []
    assert checked.digests() != expected


@pytest.mark.parametrize("target", share_of(("weights", "moment"), "weights"))
def test_memory_that_changes_between_two_steps_names_its_rank_and_place(
    target: str, checked: CheckedJob
) -> None:
    result = checked.run(2, f"flip:1@4:{target}", f"flip:0@5:{target}")
    assert EXIT_CORRUPTION in result.exit_codes and 0 not in result.exit_codes
    (fired,) = checked.faults_fired()
    (one, other) = checked.findings()
    assert one == other
    assert one.pop("where").removesuffix("/own") == fired["parameter"]
    assert one == {
        "iteration": 4,
        "check": "weights at rest",
        "ranks": [1],
        "decided": True,
        "since": 2,
    }
    assert result.output(0).count("iteration 4: rank 1 is corrupt: memory of its weights") >= 1


def test_weight_that_differs_from_its_copies_names_the_rank_that_most_disagree_with(
    checked: CheckedJob,
) -> None:
    checked.set_model(4, {"ep": 2}, train_iters=8, bf16=False, use_distributed_optimizer=False)
    result = checked.run(3, "flip:2@4:weights:1")
    assert all(result.exit_codes)
    (fired,) = checked.faults_fired()
    finding, *others = checked.findings()
    assert others == [finding] * 3
    assert finding.pop("where").split(",")[0] == fired["parameter"]
    assert finding == {
        "iteration": 6,
        "check": "equal weights",
        "ranks": [2],
        "decided": True,
        "since": 3,
    }


@pytest.mark.rest
def test_embedding_that_differs_from_that_of_the_last_stage_leaves_two_suspects(
    checked: CheckedJob,
) -> None:
    checked.set_model(
        *(2, {"pp": 2}),
        untie_embeddings_and_output_weights=False,
        bf16=False,
        use_distributed_optimizer=False,
        train_iters=8,
    )
    checked.run(3, "flip:0@4:weights:9")
    assert "embedding" in checked.faults_fired()[0]["parameter"]
    one, other = checked.findings()
    assert one == other
    assert (one["ranks"], one["decided"], one["since"]) == ([0, 1], False, 3)
    assert one["where"].endswith("among stages with the same embedding 0, 1")


_VARIED = ("layout", "precision", "optimizer", "model", "feature")
_OTHERS: Mapping[str, tuple[int, Mapping[str, int], Mapping[str, Any]]] = {
    "mtp-tied-pp3": (
        3,
        {"pp": 3},
        {
            "pipeline_model_parallel_layout": "Ett|ttm|L",
            "mtp_num_layers": 1,
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "tied-tp2-without-sequences": (
        2,
        {"tp": 2},
        {**NO_EXPERTS, "untie_embeddings_and_output_weights": False},
    ),
    "muon": (2, {}, {**NO_EXPERTS, "optimizer": "muon", "use_distributed_optimizer": False}),
    "offloaded": (
        2,
        {"ep": 2},
        {
            "optimizer_cpu_offload": True,
            "use_precision_aware_optimizer": True,
            "optimizer_offload_fraction": 0.5,
        },
    ),
}


def varied_cases() -> list[Case]:
    """Return a few runs of the covering array that together have each value of what changes weights."""
    missing = {(name, run[name]) for run in runs() for name in _VARIED}
    found = []
    while missing:
        best = max(runs(), key=lambda run: len(missing & run.items()))
        missing -= best.items()
        found.append(case_of(best))
    return found


@pytest.mark.rest
@pytest.mark.parametrize("case", varied_cases(), ids=str)
def test_clean_job_of_the_covering_array_has_no_finding(
    case: Case, checked: CheckedJob, place: Place
) -> None:
    checked.base, checked.num_ranks = job_flags(case, place), case.world_size
    checked.run(1).check()
    assert checked.findings() == []


@pytest.mark.rest
@pytest.mark.parametrize("name", _OTHERS)
def test_clean_job_of_another_kind_has_no_finding(name: str, checked: CheckedJob) -> None:
    num_ranks, layout, changes = _OTHERS[name]
    checked.set_model(num_ranks, layout, **changes)
    checked.run(1).check()
    assert checked.findings() == []
