"""Many repairs in one process: a survivor holds no more after the last one than after the first."""

from pathlib import Path

import pytest

from tests.demo_model import NO_EXPERTS, event_flags, model_flags
from tests.distributed.scripts.pretrain_counted import COUNTS
from tests.harness import digests, events
from tests.kept_job import ROOT, logged_in, run_kept
from tests.references import References

NUM_REPAIRS = 50
# No death is near the iterations after which the survivor is counted: its connections would be fewer.
FIRST, COUNTED = 2, 4
BROKEN = (FIRST, *range(FIRST + 3, FIRST + 2 + NUM_REPAIRS))
NUM_ITERATIONS = BROKEN[-1] + 3
_MOST = 1.1


def counts(path: Path) -> dict[int, tuple[int, int, int]]:
    """Return descriptors, threads and KiB of a process by iteration."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {int(it): (int(fds), int(threads), int(kib)) for it, fds, threads, kib in lines}


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_survivor_of_many_repairs_holds_no_more_than_after_the_first(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COUNTS, str(tmp_path / "counts"))
    (tmp_path / "counts").mkdir()
    faults = [f"kill:1@{iteration}:backward" for iteration in BROKEN]
    # Experts would have matrices of new sizes in each iteration, and oneDNN keeps a kernel for each.
    model = model_flags(train_iters=NUM_ITERATIONS, num_layers=1, **NO_EXPERTS)
    base = [*model, *dataset_flags]
    flags = [
        *(*base, *event_flags(tmp_path / "events"), "--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-repair", "auto", "--moe-ft-strategy", "dense"),
        *(word for fault in faults for word in ("--moe-ft-inject-fault", fault)),
    ]
    script = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_counted.py")
    log = tmp_path / "log"
    result = run_kept(flags, 2, log=log, script=script, deadline_s=800).check()
    assert result.num_restarts == 0
    repairs = events(tmp_path / "events", 0, "repair")
    assert [each["dead_ranks"] for each in repairs] == [[1]] * NUM_REPAIRS
    assert [each["broken_iteration"] for each in repairs] == list(BROKEN)
    pids = {each["pid"] for each in events(tmp_path / "events", 0, "start")}
    assert len(pids) == 1, "the survivor keeps its process"
    found = counts(tmp_path / "counts" / str(pids.pop()))
    first, last = found[COUNTED], found[NUM_ITERATIONS]
    assert all(new <= _MOST * old for old, new in zip(first, last, strict=True)), found
    assert logged_in(log.read_text()) == list(range(1, NUM_ITERATIONS + 1))
    assert digests(tmp_path / "events", 2) == references.digests(base, 2)
