"""Jobs in a wrapper of another project: whether it is there, and when functions were called again."""

from pathlib import Path

import pytest

from benchmarks import inprocess
from benchmarks.inprocess import called_s, find_problem, note_call


def test_wrapper_that_is_not_there_is_named_with_the_command(tmp_path: Path) -> None:
    assert f"pip install --no-deps --target {tmp_path} nvidia-res" in find_problem(tmp_path)


def test_wrapper_that_is_there_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "nvidia_resiliency_ext" / "inprocess").mkdir(parents=True)
    assert find_problem(tmp_path) == ""


def test_call_counts_when_the_last_rank_has_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(100, 200))
    monkeypatch.setattr(inprocess.time, "time", lambda: next(times))
    for number in range(3):
        for rank in (1, 0):
            note_call(tmp_path, number, rank)
    assert called_s(tmp_path, num_ranks=2, num_kills=2) == [103.0, 105.0]
