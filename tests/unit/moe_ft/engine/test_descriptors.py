"""The limit of open files: raised to what a rank needs, or refused with the remedy."""

import os
import resource
from collections.abc import Iterator

import pytest

from moe_ft.engine.descriptors import allow_descriptors
from moe_ft.errors import ConfigError
from moe_ft.planning.levels import most_connections

NOFILE = resource.RLIMIT_NOFILE


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of this process, which are put back."""
    before = resource.getrlimit(NOFILE)
    yield before
    resource.setrlimit(NOFILE, before)


def needed_by(world_size: int, stage_size: int) -> int:
    """Return the least that a rank can need: what is open, and its sockets."""
    others = most_connections(world_size) + most_connections(stage_size)
    return len(os.listdir("/proc/self/fd")) + others


def test_soft_limit_that_is_too_low_is_raised(limits: tuple[int, int]) -> None:
    few = len(os.listdir("/proc/self/fd")) + 8  # tests before this one may have left some open
    resource.setrlimit(NOFILE, (few, limits[1]))
    allow_descriptors(300, 100)
    soft, hard = resource.getrlimit(NOFILE)
    assert soft >= needed_by(300, 100)
    assert hard == limits[1]


@pytest.fixture
def fake_limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Limits of a process that has 40 files open; the last ones are those that hold."""
    limits = [(128, 256)]
    monkeypatch.setattr(os, "listdir", lambda path: [str(number) for number in range(40)])
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    return limits


def test_limit_is_raised_to_the_hard_one_where_only_the_spare_ones_do_not_fit(
    fake_limits: list[tuple[int, int]],
) -> None:
    allow_descriptors(3000, 750)
    assert fake_limits[-1] == (256, 256)


@pytest.mark.parametrize("soft", [4096, resource.RLIM_INFINITY])
def test_limit_that_holds_all_is_not_touched(fake_limits: list[tuple[int, int]], soft: int) -> None:
    fake_limits.append((soft, resource.RLIM_INFINITY))
    allow_descriptors(1000, 250)
    assert len(fake_limits) == 2


def test_hard_limit_that_is_too_low_is_refused_with_the_number_that_is_needed(
    fake_limits: list[tuple[int, int]],
) -> None:
    message = (
        r"the limit of open files \(ulimit -Hn\) is 200, and a rank of this job needs 218: 40 are open, "
        r"and sockets follow to 50 other ranks, and 128 others. Raise it .* ulimit -n 218"
    )
    fake_limits[-1] = (100, 200)
    with pytest.raises(ConfigError, match=message):
        allow_descriptors(4000, 1000)
    assert len(fake_limits) == 1
