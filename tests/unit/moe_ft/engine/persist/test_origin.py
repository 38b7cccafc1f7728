"""Origins of starts: which are over for certain, and which may still run."""

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from moe_ft.engine.persist.origin import Origin, agent_name, own_origin

_TELL = """
import os, sys, msgspec
from moe_ft.engine.persist.origin import own_origin
print(msgspec.json.encode(own_origin(os.environ)).decode(), flush=True)
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
    own = own_origin({})
    assert not other.origin.is_over(own)
    other.kill(is_reaped=is_reaped)
    assert other.origin.is_over(own)
    assert not other.origin.is_over(msgspec.structs.replace(own, system="another boot"))


def test_start_whose_process_has_left_its_number_to_another_is_over() -> None:
    own = own_origin({})
    ((number, started),) = own.processes
    assert not own.is_over(own)
    assert msgspec.structs.replace(own, processes=((number, started - 1),)).is_over(own)


@pytest.mark.parametrize("other", [TORCHRUN], indirect=True)
def test_start_whose_agent_lives_is_not_over_for_others_since_it_may_be_repaired(
    other: Other,
) -> None:
    other.kill()
    assert not other.origin.is_over(own_origin({}))


def test_starts_that_an_agent_has_made_one_after_the_other_do_not_run_together() -> None:
    first = own_origin(TORCHRUN, ["a", "b"])
    assert first.is_over(own_origin(TORCHRUN, ["", "c", "b"]))
    assert not first.is_over(own_origin(TORCHRUN, ["c", "d"]))
    assert not own_origin(TORCHRUN, [""]).is_over(own_origin(TORCHRUN, [""]))


def test_agents_that_a_lock_names_are_few_and_each_is_named_once() -> None:
    agents = [str(rank // 8) for rank in range(8000)]
    assert own_origin(TORCHRUN, agents).agents == tuple(map(str, range(64)))


def test_agent_has_a_name_of_its_own_that_its_ranks_share() -> None:
    code = "import os; from moe_ft.engine.persist.origin import agent_name; print(agent_name(os.environ))"
    command, variables = [sys.executable, "-c", code], {**os.environ, **TORCHRUN}
    names = {subprocess.check_output(command, env=variables, text=True).strip() for _ in range(2)}
    assert len(names - {"", agent_name(TORCHRUN)}) == 1
    assert agent_name({}) == ""


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
    assert own_origin(job | first).is_over(own_origin(job | second)) == is_over
    assert not own_origin(job | first).is_over(own_origin({"SLURM_JOB_ID": "8"} | second))
