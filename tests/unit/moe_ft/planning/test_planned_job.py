"""Measured values that cannot be are refused; intervals follow from the others."""

from typing import Any

import pytest

from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import MeasuredTimes
from tests.unit.moe_ft.planning.described import LARGE, planned_job

GB = 10**9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"iteration_s": 0.0}, "--iteration-s=0.0 must be more than 0 seconds. Give a measured"),
        ({"iteration_s": float("nan")}, "--iteration-s=nan must be more than 0 seconds"),
        ({"iteration_s": float("inf")}, "--iteration-s=inf must be more than 0 seconds"),
        ({"mtbf_s": 0.0}, "--mtbf-s=0.0 must be more than 0 seconds"),
        ({"mtbf_s": float("nan")}, "--mtbf-s=nan must be more than 0 seconds"),
        ({"restart_s": -1.0}, "--restart-s=-1.0 must be at least 0 seconds"),
        ({"update_s": -1.0}, "--update-s=-1.0 must be at least 0 seconds"),
        (
            {"iteration_s": 1.0, "update_s": 1.0},
            "--update-s=1.0 must be less than --iteration-s=1.0, .* Lower it",
        ),
        ({"bandwidth": 1e9}, "--bandwidth=1e.09 needs --iteration-s: .* or leave --bandwidth out"),
        ({"storage_bandwidth": 1e9}, "--storage-bandwidth=1e.09 needs --iteration-s: .* leave"),
    ],
)
def test_value_that_cannot_be_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeasuredTimes(**values)


def test_bytes_that_can_be_copied_follow_from_forward_and_backward() -> None:
    assert MeasuredTimes(iteration_s=2.0, update_s=0.5, bandwidth=10.0).budget_bytes == 15.0
    assert MeasuredTimes(iteration_s=2.0).budget_bytes is None


def test_given_interval_is_planned_as_it_is() -> None:
    assert planned_job(*LARGE, "--moe-ft-interval", "7").interval(GB, GB) == 7


@pytest.mark.parametrize(
    ("flags", "measured", "interval"),
    [
        ((), {"bandwidth": 2e9}, 1),
        # 4 s of waiting are 3 % of 133.3 iterations.
        ((), {"bandwidth": 2e8}, 134),
        (("--moe-ft-overhead-limit", "0.5"), {"bandwidth": 2e8}, 8),
        # Writing takes 20 s for each snapshot, or for each tenth.
        (("--moe-ft-persist-interval", "1"), {"bandwidth": 2e9, "storage_bandwidth": 5e7}, 21),
        ((), {"bandwidth": 2e9, "storage_bandwidth": 5e7}, 3),
    ],
)
def test_automatic_interval_follows_from_bandwidths(
    flags: tuple[str, ...], measured: dict[str, Any], interval: int
) -> None:
    job = planned_job(
        *(*LARGE, "--moe-ft-interval", "auto", "--moe-ft-persist-dir", "/x", *flags),
        iteration_s=1.0,
        **measured,
    )
    assert job.interval(GB, GB) == interval


def test_automatic_interval_needs_bandwidths() -> None:
    job = planned_job(*LARGE, "--moe-ft-interval", "auto", iteration_s=1.0)
    with pytest.raises(ConfigError, match="--moe-ft-interval=auto needs --iteration-s and --bandw"):
        job.interval(GB, GB)
