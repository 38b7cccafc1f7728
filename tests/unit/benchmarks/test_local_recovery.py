"""Jobs and tables of the benchmark of local recoveries."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.local_recovery import (
    LOG_HEADERS,
    PARTS,
    PHASE_HEADERS,
    REPLAY_HEADERS,
    Case,
    Result,
    Schedule,
    cases_of,
    check_digests,
    expected_ratio,
    log_rows,
    part_of,
    phase_rows,
    replay_row,
    stage_names,
    tables,
)
from benchmarks.recovery_phases import PHASES, Recovery

SLEEPING = Case(num_stages=3, num_microbatches=6, num_recoveries=2, stage_s=(0.03, 0.06))
COMPUTING = replace(SLEEPING, stage_s=(0.0, 0.0))
PLAIN = replace(SLEEPING, keeps=False)
MIDDLE_BYTES = 2 * 6 * 32 * 64 * 2  # an activation and a gradient of each micro-batch, BF16


def recovery(replay_s: float) -> Recovery:
    phases_s = {**dict.fromkeys(PHASES, 0.125), "restart": 4.5, "replay": replay_s}
    return Recovery(
        replay_s=replay_s, last_replay_s=replay_s / 4, wait_s=replay_s, phases_s=phases_s
    )


def result(*replays_s: float, digest: str = "a") -> Result:
    log = {"iteration": 1, "tensors": 12, "bytes": MIDDLE_BYTES, "file_bytes": 53_248}
    return Result(
        recoveries=[recovery(each) for each in replays_s],
        digests=[(digest, digest)] * 3,
        logs=[[[log, {**log, "iteration": 2}], [log]]] * 3,
    )


RESULTS = {"local": result(2.0, 1.0), "global": result(2.0, 2.0)}


def options(**changes: object) -> Namespace:
    given = {
        "stages": [2, 4],
        "micro_batches": [4, 8],
        "repeats": 1,
        "parts": PARTS,
        "forward_s": 0.03,
        "backward_s": 0.06,
    }
    return Namespace(**{**given, **changes})


def test_rank_is_killed_where_windows_end_and_one_window_after_a_recovery() -> None:
    assert Case(num_stages=4, num_microbatches=4, num_recoveries=3).kills == [3, 9, 15]


@pytest.mark.parametrize(("num_stages", "killed"), [(2, 1), (3, 1), (4, 2), (8, 4)])
def test_stage_with_two_neighbours_is_killed_where_there_is_one(
    num_stages: int, killed: int
) -> None:
    assert Case(num_stages=num_stages, num_microbatches=4, num_recoveries=1).killed == killed


def test_job_has_a_fault_for_each_recovery_and_trains_beyond_the_last() -> None:
    words = SLEEPING.words("local", Path("notes"), Path("memory"))
    faults = [after for word, after in zip(words, words[1:], strict=False) if "fault" in word]
    assert faults[1:] == ["kill:1@3:backward", "kill:1@9:backward"]
    assert words[words.index("--train-iters") + 1] == "11"
    assert words[words.index("--moe-ft-recovery") + 1] == "local"


def test_job_is_forked_only_if_it_keeps() -> None:
    assert "keep" in SLEEPING.words("global", Path("notes"), Path("memory"))
    assert "keep" not in PLAIN.words("global", Path("notes"), Path("memory"))


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_layers_are_the_same_on_all_stages(num_stages: int) -> None:
    case = Case(num_stages=num_stages, num_microbatches=4, num_recoveries=1)
    words = case.words("local", Path("notes"), Path("memory"))
    assert int(words[words.index("--num-layers") + 1]) % num_stages == 0


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_cores", "ratio"),
    [
        (2, 4, None, 4 / 5),
        (3, 7, None, 7 / 9),  # Fig. 9 of MoEvement prints 23 % less
        (8, 4, None, 4 / 11),
        (8, 4, 2, 4 / 16),
        (2, 4, 2, 4 / 5),
        (4, 8, 1, 8 / 32),
    ],
)
def test_expected_ratio_is_as_counted_by_hand(
    num_stages: int, num_microbatches: int, num_cores: int | None, ratio: float
) -> None:
    schedule = Schedule(num_stages=num_stages, num_microbatches=num_microbatches)
    assert expected_ratio(schedule, num_cores) == pytest.approx(ratio)


def test_row_of_replays_compares_pairs_with_the_bubble() -> None:
    row = dict(zip(REPLAY_HEADERS, replay_row(SLEEPING, RESULTS, 2), strict=True))
    assert row == {
        "S": "3",
        "M": "6",
        "stages are": "sleeping",
        "bubble": "25%",
        "slots, s": "0.54, 0.72",
        "local, s": "0.75 (0.50 to 1.00)",
        "global, s": "1.00 (1.00 to 1.00)",
        "local / global": "0.75 (0.50 to 1.00)",
        "last, local, s": "0.38 (0.25 to 0.50)",
        "last, global, s": "0.50 (0.50 to 0.50)",
        "last, local / global": "0.75 (0.50 to 1.00)",
        "expected": "0.75",
        "on these cores": "0.75",
    }


def test_computing_stages_share_the_cores() -> None:
    row = dict(zip(REPLAY_HEADERS, replay_row(COMPUTING, RESULTS, 2), strict=True))
    assert (row["stages are"], row["slots, s"]) == ("computing", "-")
    assert (row["expected"], row["on these cores"]) == ("0.75", "0.67")


def test_rows_of_logs_have_what_was_found_next_to_the_formula() -> None:
    rows = [dict(zip(LOG_HEADERS[:3], row, strict=False)) for row in log_rows(SLEEPING, RESULTS)]
    assert [row["stage"] for row in rows] == ["first", "middle", "last"]
    middle = list(log_rows(SLEEPING, RESULTS))[1]
    assert middle[3:7] == ("12", "12", f"{MIDDLE_BYTES:,}", f"{MIDDLE_BYTES:,}")
    assert middle[9:] == ("2", "10")


def test_log_of_several_sizes_shows_all_of_them() -> None:
    other = replace(RESULTS["global"], logs=[[[{"tensors": 7, "bytes": 1, "file_bytes": 2}]]] * 3)
    middle = list(log_rows(SLEEPING, {"local": RESULTS["local"], "global": other}))[1]
    assert (middle[3], middle[5]) == ("7 or 12", f"1 or {MIDDLE_BYTES:,}")


def test_pipeline_of_two_has_no_middle_stage() -> None:
    assert stage_names(2) == [(0, "first"), (1, "last")]


def test_row_of_phases_names_the_largest() -> None:
    rows = list(phase_rows(SLEEPING, {"local": result(1.5), "global": result(9.0)}))
    local, whole = (dict(zip(PHASE_HEADERS, row, strict=True)) for row in rows)
    assert (local["recovery"], local["total"], local["largest"]) == (
        "local",
        "7.25",
        "restart, 62%",
    )
    assert (whole["recovery"], whole["largest"]) == ("global", "replay, 61%")


def test_jobs_that_end_in_one_state_pass() -> None:
    check_digests({SLEEPING: RESULTS, COMPUTING: RESULTS})


@pytest.mark.parametrize("case", [SLEEPING, COMPUTING, PLAIN])
def test_job_that_ends_in_another_state_is_refused(case: Case) -> None:
    found = {each: RESULTS for each in (SLEEPING, COMPUTING, PLAIN)}
    found[case] = {**RESULTS, "global": result(1.0, 1.0, digest="b")}
    with pytest.raises(AssertionError, match="ends in another state than"):
        check_digests(found)


def test_jobs_of_other_sizes_may_end_in_other_states() -> None:
    other = replace(SLEEPING, num_microbatches=8)
    check_digests({SLEEPING: RESULTS, other: {"local": result(1.0, digest="b")}})


def test_cases_are_all_sizes_in_all_parts_and_one_without_keep() -> None:
    cases = list(cases_of(options()))
    assert [part_of(case) for case in cases] == ["sleeping", "computing"] * 4 + ["plain"]
    assert (cases[-1].num_stages, cases[-1].num_microbatches) == (2, 8)
    assert len(set(cases)) == 9


def test_tables_show_sizes_once_and_phases_of_the_most_microbatches() -> None:
    smaller = replace(SLEEPING, num_microbatches=4)
    found = {each: RESULTS for each in (smaller, SLEEPING, COMPUTING, PLAIN)}
    _, replays, _, _, logs, _, phases = tables(found, 2)
    assert len(replays.splitlines()) == 2 + 3
    assert len(logs.splitlines()) == 2 + 2 * 3
    assert [line.split("|")[3].strip() for line in phases.splitlines()[2:]] == [
        *("keep", "keep", "torchrun", "torchrun")
    ]
