"""Ranks of jobs under Megatron-Bridge die and are replaced in place; the bits are those without moe_ft."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.bridge.jobs import EP2, EVALUATION, OVERLAP, PP2, ReplacedJob
from tests.jobs import DENSE, SPARSE, fault_flags
from tests.kept_job import KeptAgent


@dataclass(frozen=True, kw_only=True)
class Death:
    """Death of rank 1 in iteration 5, counted from 0, and its repair.

    Attributes:
        fault: that moe_ft injects.
        strike: instead, what the script does, see tiny_job.py.
        recovered: iterations from which training may run again.
    """

    fault: str = ""
    strike: str = ""
    recovered: frozenset[int] = frozenset({3})
    strategy: Sequence[str] = SPARSE
    layout: Mapping[str, int] = field(default_factory=lambda: EP2)
    overrides: Sequence[str] = ()


BACKWARD = "kill:1@5:backward"
BY_DENSE = frozenset({4, 5})
HEARTBEAT = ("--moe-ft-repair-heartbeat-s", "8")
DEATHS = {
    "dense": Death(fault=BACKWARD, recovered=BY_DENSE, strategy=DENSE),
    "sparse": Death(fault=BACKWARD),
    "stages": Death(fault=BACKWARD, layout=PP2),
    "overlap": Death(
        fault="kill:1@5:after-step", recovered=BY_DENSE, strategy=DENSE, overrides=OVERLAP
    ),
    "log line": Death(strike="kill:log:6"),
    "evaluation": Death(strike="kill:evaluation:6", overrides=EVALUATION),
}


def run(job: ReplacedJob, death: Death) -> str:
    """Run a job and check it; return what its processes printed."""
    result = job.run(
        *([death.fault] if death.fault else []),
        strategy=death.strategy,
        layout=death.layout,
        extra=death.overrides,
        env={"STRIKE": death.strike},
    )
    assert result.num_restarts == 0
    job.check([1], [5], [set(death.recovered)])
    return result.log.read_text()


@pytest.mark.parametrize("name", DEATHS)
def test_dead_rank_is_replaced_in_place_and_the_bits_are_those_without_moe_ft(
    replaced: ReplacedJob, name: str
) -> None:
    run(replaced, DEATHS[name])


@pytest.mark.rest
def test_rank_that_stands_still_in_an_evaluation_is_killed_there_and_replaced(
    replaced: ReplacedJob,
) -> None:
    death = Death(strike="stop:evaluation:6", strategy=(*SPARSE, *HEARTBEAT), overrides=EVALUATION)
    assert "(in its evaluation), and is killed" in run(replaced, death)


def test_two_ranks_die_one_after_the_other_and_are_both_replaced(replaced: ReplacedJob) -> None:
    result = replaced.run("kill:1@3:backward", "kill:0@6:forward")
    assert result.num_restarts == 0
    replaced.check([1, 0], [3, 6], [{2, 3}, {5, 6}])


def test_spare_node_takes_over_a_lost_one_with_the_state_from_its_peer(
    replaced: ReplacedJob,
) -> None:
    with replaced.on_nodes(2) as nodes:
        nodes.start("node0", "node1", "node2")
        replaced.lose(nodes, "node1")
        assert nodes.wait() == {"node0": 0, "node2": 0}, nodes.log("node0")[-3000:]
    for rank, tier in enumerate(("memory", "peer")):
        (repair,) = replaced.events("repair", rank)
        assert repair["taken_over"] == {"node1": "node2"}
        (recovery,) = replaced.events("recovery", rank)
        assert set(recovery["sources"]) == {tier}
    assert replaced.digests() == replaced.reference()


@pytest.mark.rest
def test_node_that_trains_runs_the_rank_of_a_lost_one_too(replaced: ReplacedJob) -> None:
    names = [f"node{number}" for number in range(4)]
    with replaced.on_nodes(4, "--moe-ft-without-spare", "crowd") as nodes:
        nodes.start(*names)
        replaced.lose(nodes, "node1")
        assert nodes.wait() == dict.fromkeys(("node0", "node2", "node3"), 0)
    (repair,) = replaced.events("repair")
    assert repair["taken_over"].keys() == {"node1"}
    assert replaced.digests() == replaced.reference()


@pytest.mark.rest
def test_stage_of_a_dead_rank_runs_iterations_again_alone(replaced: ReplacedJob) -> None:
    local = (*SPARSE, "--moe-ft-upstream-log", "--moe-ft-breakpoints")
    run(replaced, Death(fault=BACKWARD, recovered=BY_DENSE, strategy=local, layout=PP2))
    for rank in range(2):
        (repair,) = replaced.events("repair", rank)
        assert (repair["scope"], repair["stages"]) == ("local", [1])


def test_launch_alone_forks_ranks_from_a_process_that_has_imported_bridge_and_replaces_them(
    replaced: ReplacedJob,
) -> None:
    replaced.set_model(2, EP2)
    words = replaced.words("--moe-ft-strategy", "dense", *fault_flags([BACKWARD]))
    log = replaced.folder / "log"
    agent = KeptAgent(
        ["--ranks-per-node", "2", *words],
        log,
        {"JE_ARROW_MALLOC_CONF": ""},  # launch sets it itself
        command=[sys.executable, "-m", "moe_ft", "launch"],
    )
    try:
        assert agent.wait() == 0, log.read_text()[-5000:]
    finally:
        agent.kill()
    replaced.check([1], [5], [{4, 5}])
