"""Deaths between two iterations: an evaluation begins again after the repair, and is printed once."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events
from tests.kept_job import ROOT, KeptResult, run_kept
from tests.references import References

NUM_RANKS, NUM_ITERATIONS = 4, 8
EVALUATIONS = ("--eval-interval", "2", "--eval-iters", "2")
_LOSS = re.compile(r"validation loss at iteration (\d.*?) \| (.*)")
_LOG_LINE = re.compile(r"iteration +(\d+)/ +\d+ \|")


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
        model = model_flags(train_iters=NUM_ITERATIONS, hidden_dropout=0.1)
        layout = layout_flags({"pp": 2, "ep": 2})
        self.flags = [*model, *layout, *dataset_flags, *EVALUATIONS]

    def run(
        self,
        dying_rank: int,
        strategy: Sequence[str],
        *,
        name: str = "job",
        where: str = "evaluation",
        max_restarts: int = 0,
    ) -> KeptResult:
        """Run the job to its end; a rank below 0 does not die."""
        folder = self.folder / name
        folder.mkdir()
        self._monkeypatch.setenv("DYING_RANK", str(dying_rank))
        self._monkeypatch.setenv("DYING_IN", where)
        self._monkeypatch.setenv("DYING_MARKER", str(folder / "has_died"))
        flags = [
            *(*self.flags, *event_flags(folder / "events")),
            *("--moe-ft-repair", "auto", "--moe-ft-strategy", *strategy),
            *("--moe-ft-memory-dir", str(self._memory / name)),
        ]
        script = ROOT / "tests" / "distributed" / "scripts" / "pretrain_dying_between.py"
        return run_kept(
            flags,
            NUM_RANKS,
            log=folder / "log",
            script=str(script),
            max_restarts=max_restarts,
        ).check()

    def lines(self, name: str = "job") -> list[tuple[str, str]]:
        """Return the iterations and losses of all evaluations, as they were printed."""
        return _LOSS.findall((self.folder / name / "log").read_text())


@pytest.fixture
def evaluated(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> EvaluatedJob:
    return EvaluatedJob(dataset_flags, tmp_path, memory_dir, monkeypatch)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("rank", "strategy"),
    [(0, ("dense",)), (3, ("dense",)), (2, ("sparse", "--moe-ft-window", "3"))],
    ids=["first rank", "rank that prints", "sparse"],
)
def test_evaluation_in_which_a_rank_dies_is_repeated_and_printed_once(
    evaluated: EvaluatedJob, references: References, rank: int, strategy: Sequence[str]
) -> None:
    evaluated.run(-1, strategy, name="undisturbed")
    result = evaluated.run(rank, strategy)
    assert result.num_restarts == 0
    log = evaluated.folder / "job" / "events"
    for each in range(NUM_RANKS):
        (repair,) = events(log, each, "repair")
        assert (repair["dead_ranks"], repair["broken_iteration"]) == ([rank], 3)
        assert repair["is_replacement"] == (each == rank)
        (recovery,) = events(log, each, "recovery")
        assert recovery["target_iteration"] == repair["recovered_iteration"] <= 3
        pids = {line["pid"] for line in events(log, each, "start")}
        assert len(pids) == 1 + (each == rank), "survivors keep their processes"
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
    assert digests(log, NUM_RANKS) == references.digests(evaluated.flags, NUM_RANKS)


@pytest.mark.rest
def test_death_in_a_log_line_is_restarted_and_the_others_say_why(
    evaluated: EvaluatedJob, references: References
) -> None:
    result = evaluated.run(1, ("dense",), where="log", max_restarts=1)
    assert result.num_restarts == 1
    log = evaluated.folder / "job" / "events"
    reasons = [line["reason"] for rank in range(NUM_RANKS) for line in events(log, rank, "stopped")]
    assert any("a rank has died between two iterations" in each for each in reasons), reasons
    for each in range(NUM_RANKS):
        assert events(log, each, "repair") == []
    assert digests(log, NUM_RANKS) == references.digests(evaluated.flags, NUM_RANKS)
