"""Origins of starts: which are over for certain, and which may still run."""

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from moe_ft.engine.persist.storage_lock import Origin, own_origin
from moe_ft.launches import launch_of

_TELL = """
import os, sys, msgspec
from moe_ft.engine.persist.storage_lock import own_origin
from moe_ft.launches import launch_of
print(msgspec.json.encode(own_origin(launch_of(os.environ))).decode(), flush=True)
sys.stdin.read()
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


class Other:
    """A process that has started a job, and says what its origin is."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TELL],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.origin = msgspec.json.decode(self._process.stdout.readline(), type=Origin)

    def kill(self, *, is_reaped: bool = True) -> None:
        """Kill it."""
        self._process.kill()
        if is_reaped:
            self._process.wait()
        else:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        """Close its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[Other]:
    other = Other(getattr(request, "param", {}))
    yield other
    other.close()


@pytest.mark.parametrize("is_reaped", [True, False])
def test_start_whose_process_was_killed_is_over_on_its_own_machine_alone(
    other: Other, is_reaped: bool
) -> None:
    own = own_origin(launch_of({}))
    assert not other.origin.is_over(own)
    other.kill(is_reaped=is_reaped)
    assert other.origin.is_over(own)
    assert not other.origin.is_over(msgspec.structs.replace(own, system="another boot"))


def test_start_whose_process_has_left_its_number_to_another_is_over() -> None:
    own = own_origin(launch_of({}))
    ((number, started),) = own.processes
    assert not own.is_over(own)
    assert msgspec.structs.replace(own, processes=((number, started - 1),)).is_over(own)


@pytest.mark.parametrize("other", [TORCHRUN], indirect=True)
def test_start_whose_agent_lives_is_not_over_for_others_since_it_may_be_repaired(
    other: Other,
) -> None:
    other.kill()
    assert not other.origin.is_over(own_origin(launch_of({})))


def test_starts_that_an_agent_has_made_one_after_the_other_do_not_run_together() -> None:
    first = own_origin(launch_of(TORCHRUN), ["a", "b"])
    assert first.is_over(own_origin(launch_of(TORCHRUN), ["", "c", "b"]))
    assert not first.is_over(own_origin(launch_of(TORCHRUN), ["c", "d"]))
    assert not own_origin(launch_of(TORCHRUN), [""]).is_over(own_origin(launch_of(TORCHRUN), [""]))


def test_agents_that_a_lock_names_are_few_and_each_is_named_once() -> None:
    agents = [str(rank // 8) for rank in range(8000)]
    assert own_origin(launch_of(TORCHRUN), agents).agents == tuple(map(str, range(64)))


@pytest.mark.parametrize(
    ("first", "second", "is_over"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, {"SLURM_RESTART_COUNT": "1"}, True),
        # Agents count each for itself, and two of them may run in one job of SLURM.
        (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}, False),
        (TORCHRUN, {**TORCHRUN, "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_CLUSTER_NAME": "a"}, {"SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_starts_that_a_job_of_slurm_counts_do_not_run_together(
    first: dict[str, str], second: dict[str, str], is_over: bool
) -> None:
    job = {"SLURM_JOB_ID": "7"}
    origin = own_origin(launch_of(job | first))
    assert origin.is_over(own_origin(launch_of(job | second))) == is_over
    assert not origin.is_over(own_origin(launch_of({"SLURM_JOB_ID": "8"} | second)))
