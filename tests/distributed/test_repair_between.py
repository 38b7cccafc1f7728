"""Deaths between two iterations: an evaluation begins again after the repair, and is printed once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events
from tests.kept_job import ROOT, KeptResult, run_kept
from tests.references import References

NUM_RANKS, NUM_ITERATIONS = 4, 8
EVALUATIONS = ("--eval-interval", "2", "--eval-iters", "2")
DENSE, SPARSE = ("dense",), ("sparse", "--moe-ft-window", "3")
LOCAL = ("--moe-ft-upstream-log", "--moe-ft-breakpoints")
PP_EP = {"pp": 2, "ep": 2}
DEADLINE_S = 600  # a rank that hangs is noticed after a minute
_LOSS = re.compile(r"validation loss at iteration (\d.*?) \| (.*)")
_LOG_LINE = re.compile(r"iteration +(\d+)/ +\d+ \|")


@dataclass(frozen=True, kw_only=True)
class Death:
    """Ranks that die in an evaluation, and what the repairs must be.

    Attributes:
        ranks: of the faults, as pretrain_dying_between.py has them.
        faults: further ones, of --moe-ft-inject-fault.
        rounds: ``[repair]`` its number, and the ranks that it replaced.
        hung: ranks that were killed because they hung.
        restored: ``[repair]`` states that may have been recovered.
    """

    ranks: str
    rounds: Sequence[tuple[int, list[int]]]
    restored: Sequence[set[int]]
    faults: Sequence[str] = ()
    hung: Sequence[str] = ()
    strategy: Sequence[str] = DENSE
    layout: Mapping[str, int] = field(default_factory=lambda: PP_EP)
    changes: Mapping[str, Any] = field(default_factory=dict)


class EvaluatedJob:
    """Small job that evaluates, under `moe_ft keep` with --moe-ft-repair auto."""

    def __init__(
        self,
        dataset_flags: Sequence[str],
        folder: Path,
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.folder, self._memory, self._monkeypatch = folder, memory, monkeypatch
        self._dataset_flags = dataset_flags

    def base(self, death: Death) -> list[str]:
        """Return the flags of the job without checkpoints."""
        changes = {"train_iters": NUM_ITERATIONS, "hidden_dropout": 0.1, **death.changes}
        model = [*model_flags(**changes), *layout_flags(death.layout)]
        return [*model, *self._dataset_flags, *EVALUATIONS]

    def run(
        self,
        death: Death,
        *,
        name: str = "job",
        where: str = "evaluation",
        is_disturbed: bool = True,
        max_restarts: int = 0,
    ) -> KeptResult:
        """Run the job to its end."""
        folder = self.folder / name
        folder.mkdir()
        self._monkeypatch.setenv("DYING", death.ranks if is_disturbed else "")
        self._monkeypatch.setenv("DYING_IN", where)
        self._monkeypatch.setenv("DYING_MARKER", str(folder / "has_died"))
        faults = death.faults if is_disturbed else ()
        flags = [
            *(*self.base(death), *event_flags(folder / "events")),
            *("--moe-ft-repair", "auto", "--moe-ft-strategy", *death.strategy),
            *("--moe-ft-memory-dir", str(self._memory / name)),
            *(word for fault in faults for word in ("--moe-ft-inject-fault", fault)),
        ]
        script = ROOT / "tests" / "distributed" / "scripts" / "pretrain_dying_between.py"
        return run_kept(
            flags,
            NUM_RANKS,
            log=folder / "log",
            script=str(script),
            max_restarts=max_restarts,
            deadline_s=DEADLINE_S,
        ).check()

    def check(self, death: Death) -> None:
        """Check that survivors have kept their processes, and what was recovered."""
        dead = [rank for _, ranks in death.rounds for rank in ranks]
        log = self.folder / "job" / "events"
        for each in range(NUM_RANKS):
            repairs = events(log, each, "repair")
            found = [(line["round"], line["dead_ranks"]) for line in repairs]
            assert found == list(death.rounds)
            assert {line["broken_iteration"] for line in repairs} == {3}
            assert repairs[-1]["is_replacement"] == (each in death.rounds[-1][1])
            assert list(repairs[-1]["hung_s"]) == list(death.hung)
            # A recovery that was broken off has no event.
            targets = [line["target_iteration"] for line in events(log, each, "recovery")]
            assert targets == [line["recovered_iteration"] for line in repairs]
            for target, allowed in zip(targets, death.restored, strict=True):
                assert target in allowed
            pids = {line["pid"] for line in events(log, each, "start")}
            assert (len(pids) > 1) == (each in dead), "survivors keep their processes"
            assert events(log, each, "stopped") == []

    def lines(self, name: str = "job") -> list[tuple[str, str]]:
        """Return the iterations and losses of all evaluations, as they were printed."""
        return _LOSS.findall((self.folder / name / "log").read_text())


@pytest.fixture
def evaluated(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> EvaluatedJob:
    return EvaluatedJob(dataset_flags, tmp_path, memory_dir, monkeypatch)


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
    "breakpoints": Death(
        ranks="kill:1@4", rounds=[(1, [1])], restored=[{2, 3}], strategy=(*DENSE, *LOCAL)
    ),
    "breakpoints and windows": Death(
        ranks="kill:2@4", rounds=[(1, [2])], restored=[{3}], strategy=(*SPARSE, *LOCAL)
    ),
    "another one during the repair": Death(
        ranks="kill:3@4",
        faults=("kill:1@2:recovery",),
        rounds=[(2, [1, 3])],
        restored=[{2, 3}],
    ),
    "the replacement during the repair": Death(
        ranks="kill:0@4",
        faults=("kill:0@2:recovery",),
        rounds=[(2, [0])],
        restored=[{2, 3}],
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
    evaluated: EvaluatedJob, references: References, death: Death
) -> None:
    evaluated.run(death, name="undisturbed", is_disturbed=False)
    assert evaluated.run(death).num_restarts == 0
    evaluated.check(death)
    text = (evaluated.folder / "job" / "log").read_text()
    logged = [int(number) for number in _LOG_LINE.findall(text)]
    assert logged == list(range(1, NUM_ITERATIONS + 1)), "each log line comes once"
    lines = evaluated.lines()
    # The last two are those after training.
    assert [at for at, _ in lines] == [
        *("2", "4", "6", "8"),
        *("8 on validation set", "8 on test set"),
    ]
    assert lines == evaluated.lines("undisturbed")
    log = evaluated.folder / "job" / "events"
    assert digests(log, NUM_RANKS) == references.digests(evaluated.base(death), NUM_RANKS)


@pytest.mark.rest
def test_death_in_a_log_line_is_restarted_and_the_others_say_why(
    evaluated: EvaluatedJob, references: References
) -> None:
    death = Death(ranks="kill:1@4", rounds=[], restored=[])
    result = evaluated.run(death, where="log", max_restarts=1)
    assert result.num_restarts == 1
    log = evaluated.folder / "job" / "events"
    reasons = [line["reason"] for rank in range(NUM_RANKS) for line in events(log, rank, "stopped")]
    assert any("a rank has died between two iterations" in each for each in reasons), reasons
    for each in range(NUM_RANKS):
        assert events(log, each, "repair") == []
    assert digests(log, NUM_RANKS) == references.digests(evaluated.base(death), NUM_RANKS)
