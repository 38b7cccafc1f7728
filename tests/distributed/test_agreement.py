"""Ranks that decide together notice when one of them leaves or falls silent, and none waits for long."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine import agreement as agreement_file
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions, EndVote, Votes
from moe_ft.engine.exchange import INT, TEXT, encode
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.errors import ConfigError, CorruptStateError, StorageAwayError
from moe_ft.launches import Launch
from moe_ft.planning import levels
from moe_ft.recovery import look as phase
from moe_ft.recovery import planner
from moe_ft.recovery.meet import Ranks
from tests.harness import run_ranks

TEXTS = msgspec.msgpack.Decoder(list[str])
GROUP_TIMEOUT_S = 600.0  # the test fails long before
ANSWER_S = 0.5


@dataclass(frozen=True)
class Case:
    """Ranks that agree, and the one among them that is about to fail."""

    num_ranks: int
    fan_out: int
    odd: int


CASES = [
    pytest.param(Case(3, 8, 2), id="one group"),
    pytest.param(Case(5, 2, 1), id="below a leader"),
    pytest.param(Case(5, 2, 2), id="leader"),
    pytest.param(Case(5, 2, 0), id="leader of all", marks=pytest.mark.rest),
    pytest.param(Case(5, 2, 4), id="member of the top group alone", marks=pytest.mark.rest),
]
each_case = pytest.mark.parametrize("case", CASES)


def votes() -> Votes:
    """Return the votes of a rank that is ready for everything."""
    return Votes(
        state=SnapshotState.COMPLETE,
        is_ready=True,
        is_idle=True,
        can_persist=True,
        is_protected=True,
        can_grow=True,
        turn=EndVote.TRY,
        strategy=(7,),
        interval=(dist.get_rank(),),
    )


def decide(case: Case, act: Callable[[Decisions, bool], None]) -> None:
    """Decide once with all ranks, then act. Runs on every rank."""
    levels.FAN_OUT = case.fan_out
    dist.init_process_group("gloo")
    agreement, stage = Agreement(GROUP_TIMEOUT_S), StageSum(GROUP_TIMEOUT_S)
    agreement.start()
    stage.start([0] * case.num_ranks, dist.get_rank())
    assert agreement.gather(dist.get_rank(), INT) == list(range(case.num_ranks))
    assert agreement.broadcast(dist.get_rank(), INT) == 0
    collected = agreement.collect(f"of {dist.get_rank()}", TEXT)
    assert (collected is not None) == (dist.get_rank() == 0)
    contents = [encode(each) for each in collected or ()]
    assert agreement.hand_out(contents, TEXT) == f"of {dist.get_rank()}"
    in_order = [f"of {rank}" for rank in range(case.num_ranks)]
    assert (
        agreement.fold([f"of {dist.get_rank()}"], lambda found: sum(found, []), TEXTS) == in_order
    )
    agreement.barrier()
    decisions = Decisions(agreement, stage, EventQueue(), Clock())
    decisions.begin_count(torch.ones(1, 2, dtype=torch.int64), 0)
    decisions.begin(votes, 0)
    decided = decisions.read(0)
    assert decided is not None
    assert decided[0].interval == (0,)
    assert decided[1] is not None
    assert decided[1].tolist() == [[case.num_ranks] * 2]
    act(decisions, dist.get_rank() == case.odd)
    # The slowest rank has noticed too: the process that keeps the store may end now.
    dist.barrier()


def pass_iterations(decisions: Decisions, last: int) -> None:
    """Decide in each iteration as training does, even where deciding is off."""
    for iteration in range(1, last + 1):
        decisions.begin(votes, iteration)
        decisions.read(iteration)


def leave_on_one(decisions: Decisions, is_odd: bool) -> None:
    """Fail on one rank: decisions are off on all ranks in the same iteration."""
    if is_odd:
        decisions.attempt(1, lambda: 1 // 0)
    pass_iterations(decisions, 1)
    assert decisions.is_off


def fall_silent_on_one(decisions: Decisions, is_odd: bool) -> None:
    """Keep one rank from voting: decisions are off on the others after a wait."""
    decisions._agreement._answer = timedelta(seconds=ANSWER_S)
    if not is_odd:
        pass_iterations(decisions, 1)
        assert decisions.is_off


def leave_after_voting_on_one(decisions: Decisions, is_odd: bool) -> None:
    """Let one rank hear a result and leave before it acts on it: no later one comes about."""
    decisions.begin(votes, 1)
    assert is_odd or decisions.read(1) is not None
    if is_odd:
        assert decisions._agreement.result()
        dist.barrier()
        decisions.attempt(1, lambda: 1 // 0)
    else:
        dist.barrier()
        decisions.begin(votes, 2)
        assert decisions.read(2) is None
    assert decisions.is_off


def leave_while_others_owe_an_answer(decisions: Decisions, is_odd: bool) -> None:
    """Let one rank leave in the middle of a vote: it does not wait for the end of the vote."""
    agreement_file._ANSWER_S = GROUP_TIMEOUT_S
    slow = Agreement(2 * GROUP_TIMEOUT_S)
    slow.start()
    if is_odd:
        slow.begin([1])
        slow.leave()


@each_case
def test_rank_that_leaves_takes_all_others_with_it_at_once(tmp_path: Path, case: Case) -> None:
    # Whoever waits for an answer waits longer than the test does.
    run_ranks(with_long_answers, case.num_ranks, case, leave_on_one, log_dir=tmp_path).check()


@each_case
def test_rank_that_falls_silent_is_waited_for_a_while_only(tmp_path: Path, case: Case) -> None:
    run_ranks(decide, case.num_ranks, case, fall_silent_on_one, log_dir=tmp_path).check()


def with_long_answers(case: Case, act: Callable[[Decisions, bool], None]) -> None:
    """Run one rank that waits long for the others."""
    agreement_file._ANSWER_S = GROUP_TIMEOUT_S
    decide(case, act)


@each_case
def test_result_that_one_rank_does_not_act_on_is_the_last_one(tmp_path: Path, case: Case) -> None:
    run_ranks(decide, case.num_ranks, case, leave_after_voting_on_one, log_dir=tmp_path).check()


@each_case
def test_rank_that_leaves_does_not_wait_for_what_is_under_way(tmp_path: Path, case: Case) -> None:
    target = leave_while_others_owe_an_answer
    run_ranks(decide, case.num_ranks, case, target, log_dir=tmp_path).check()


@dataclass(frozen=True)
class Trouble:
    """Error of one rank while it looks for state, or of rank 0 while it plans."""

    rank: int
    is_planning: bool
    error: Exception
    kind: type[Exception]


TROUBLES = [
    pytest.param(Trouble(4, False, OSError(5, "Input/output error"), OSError), id="look, OSError"),
    pytest.param(Trouble(0, False, MemoryError("full"), MemoryError), id="look, MemoryError"),
    pytest.param(Trouble(3, False, KeyError("full"), RuntimeError), id="look, a mistake of ours"),
    pytest.param(Trouble(0, True, ConfigError("full"), ConfigError), id="plan, ConfigError"),
    pytest.param(Trouble(0, True, StorageAwayError("full"), StorageAwayError), id="plan, storage"),
    pytest.param(
        Trouble(0, True, CorruptStateError("full"), CorruptStateError), id="plan, corrupt"
    ),
    pytest.param(
        Trouble(0, True, PermissionError(13, "full"), PermissionError), id="plan, OSError"
    ),
]


def look_and_plan(trouble: Trouble, folder: Path) -> None:
    """Look for state and plan, with an error on one rank. Runs on every rank."""
    levels.FAN_OUT = 2
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = Ranks(everyone=Agreement(GROUP_TIMEOUT_S), stage=StageSum(1.0), rank=rank)
    ranks.everyone.start()
    node_dir = folder / f"node-{rank}"
    node_dir.mkdir()
    site = SimpleNamespace(
        rank=rank,
        node=f"node-{rank}",
        node_dir=node_dir,
        job_id="job",
        is_lowest_on_node=True,
        launch=Launch(),
    )
    met: Any = SimpleNamespace(
        site=site,
        ranks=ranks,
        pipelines=None,
        config=MoeFtConfig(),
        facts=SimpleNamespace(iteration=0, began_with="", world_size=dist.get_world_size()),
        fingerprint={},
    )

    def fail(*given: Any) -> Any:
        raise trouble.error

    claimed: Any = SimpleNamespace(storage=None)
    is_odd = rank == trouble.rank
    module, name = (planner, "plan") if trouble.is_planning else (phase, "find_on_node")
    found = fail if is_odd else getattr(module, name)
    with patch.object(module, name, found), pytest.raises(trouble.kind) as raised:
        planner.Planner(met, phase.look(met, claimed)).plan()
    assert type(raised.value) is trouble.kind
    assert len(set(ranks.everyone.gather(str(raised.value), TEXT))) == 1
    if not trouble.is_planning:
        assert f"rank {trouble.rank} on node node-{trouble.rank}" in str(raised.value)
    dist.barrier()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_error_of_one_rank_that_looks_or_plans_is_raised_by_all(
    tmp_path: Path, trouble: Trouble
) -> None:
    run_ranks(look_and_plan, 5, trouble, tmp_path, log_dir=tmp_path).check()


LEAVE = """
import sys, time
import torch.distributed as dist
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.exchange import INT
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
agreement = Agreement(20.0)
agreement.start()
stage = StageSum(20.0)
stage.start(agreement.gather(0, INT), rank)
if rank == 0:
    agreement.begin([1])
    agreement.leave()
    stage.leave()
else:
    time.sleep(5.0)  # the vote of rank 0 stays under way
stage.close()
agreement.close()
"""


@pytest.mark.rest
def test_process_that_leaves_a_vote_that_is_under_way_ends_well(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", LEAVE, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
