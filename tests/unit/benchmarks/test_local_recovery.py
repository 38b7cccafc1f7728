"""Jobs and tables of the benchmark of local recoveries."""

from dataclasses import replace

import pytest

from benchmarks.local_recovery import (
    LOG_HEADERS,
    REPLAY_HEADERS,
    Case,
    Result,
    Schedule,
    check_digests,
    expected_ratio,
    log_rows,
    replay_row,
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


def test_rows_of_logs_have_what_was_found_next_to_the_formula() -> None:
    rows = [dict(zip(LOG_HEADERS[:3], row, strict=False)) for row in log_rows(SLEEPING, RESULTS)]
    assert [row["stage"] for row in rows] == ["first", "middle", "last"]
    middle = list(log_rows(SLEEPING, RESULTS))[1]
    assert middle[3:7] == ("12", "12", f"{MIDDLE_BYTES:,}", f"{MIDDLE_BYTES:,}")
    assert middle[9:] == ("2", "10")


def test_jobs_that_end_in_one_state_pass() -> None:
    check_digests({SLEEPING: RESULTS, COMPUTING: RESULTS})


@pytest.mark.parametrize("case", [SLEEPING, COMPUTING, PLAIN])
def test_job_that_ends_in_another_state_is_refused(case: Case) -> None:
    found = {each: RESULTS for each in (SLEEPING, COMPUTING, PLAIN)}
    found[case] = {**RESULTS, "global": result(1.0, 1.0, digest="b")}
    with pytest.raises(AssertionError, match="ends in another state than"):
        check_digests(found)
