"""Plans of a start: settings of windows, readable logs of local recoveries, iterations that have ended."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.errors import ConfigError
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.couplings import SharedWeights, report_couplings
from moe_ft.planning.recovery import Plan, Rejection
from moe_ft.planning.remains import place_of
from moe_ft.planning.scope import Place
from moe_ft.recovery import plan as phase
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import Found
from moe_ft.recovery.meet import Met
from moe_ft.recovery.notices import Notices
from moe_ft.recovery.plan import Candidates, check_replay, plan_without
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.planning.test_local_recovery import (
    END,
    NEWEST,
    PIPELINES,
    failure,
    found_logs,
)
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, initialized, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, site, start, versions_of, wish

SETTINGS = {"--clip-grad": 1.0, "--global-batch-size": 8}


def notices() -> Notices:
    return Notices(site(), wish(), None)


def plan(window: int, replay_settings: str) -> Plan:
    history = (start(0, 0),)
    versions = versions_of(history, 7, window=window, replay_settings=replay_settings)
    (found,), _ = plans_of(versions)
    return found


MADE_WITH = '{"--clip-grad": 0.5, "--global-batch-size": 8}'


def test_window_of_a_run_with_other_settings_is_refused_with_them_and_both_remedies() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_replay(plan(3, MADE_WITH), SETTINGS, notices())
    message = str(refusal.value)
    assert "iteration 7 is in a window of 3 snapshots" in message
    assert "--clip-grad: 0.5 there, 1.0 now" in message
    assert "--global-batch-size" not in message
    assert "--exit-interval" in message
    assert "--moe-ft-recover-from load" in message


def test_window_of_a_version_that_noted_fewer_settings_is_recovered_and_the_gap_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"--clip-grad": 0.5, "--global-batch-size": 8, "--moe-z-loss-coeff": 0.1}
    speaker = notices()
    for _ in range(2):
        check_replay(plan(3, MADE_WITH), settings, speaker)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "WARNING moe_ft: the window of iteration 7 was written by another version"
    )
    assert line.endswith("must be the same for an exact recovery: --moe-z-loss-coeff")


# Recoveries of some stages alone


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    """Return rank 0 as it has met ranks of three stages, and gathers for all of them."""
    with initialized(), ExitStack() as opened:
        met = met_alone(config_of(tmp_path), facts_of(), opened)
        ranks = tuple(
            RankInfo(rank=rank, node=node, stage=rank, pid=1, address=None, region_bytes=1)
            for rank, node in enumerate(PIPELINES.node_of)
        )
        site = replace(met.site, topology=Topology(ranks=ranks))
        yield replace(met, site=site, pipelines=PIPELINES)


@pytest.fixture
def found() -> Found:
    """Return what is left after rank 1 has died without a breakpoint."""
    remains = failure({1})
    inventory = Inventory(versions=[*remains.versions], logs=found_logs(remains))
    return Found(inventory=inventory, wish=wish(), failed={})


def first_of(candidates: Candidates) -> Plan:
    first = candidates.choice.plans[0]
    assert first.is_local
    return first


def log_of(candidates: Candidates, sender: int, iteration: int) -> Place:
    (scope,) = first_of(candidates).scopes
    return next(
        each.place for each in scope.logs if (each.sender, each.iteration) == (sender, iteration)
    )


def test_recovery_of_some_stages_alone_comes_before_those_of_all(met: Met, found: Found) -> None:
    candidates = phase.plan(found, met)
    assert first_of(candidates).iteration == NEWEST
    assert [(each.iteration, each.is_local) for each in candidates.choice.plans] == [
        (NEWEST, True),
        (END, False),
    ]


def without(
    unreadable: Collection[Place], found: Found, candidates: Candidates, met: Met
) -> tuple[Found, Candidates]:
    """Return what is left after the best candidate was rejected because of these places."""
    rejected = candidates.choice.plans[0]
    reason = f"iteration {rejected.iteration}: rank 7 has no intact record"
    lacking = [Rejection(iteration=rejected.iteration, start=rejected.start, reason=reason)]
    return plan_without(rejected, lacking, unreadable, found, candidates, met)


def kinds(candidates: Candidates) -> list[tuple[int, bool]]:
    return [(each.iteration, each.is_local) for each in candidates.choice.plans]


def test_breakpoints_of_an_iteration_that_not_all_have_finished_are_left_out_with_the_reason(
    met: Met, found: Found
) -> None:
    until = replace(found, most_iteration=NEWEST)
    assert phase.plan(until, met).choice.plans == phase.plan(found, met).choice.plans
    candidates = phase.plan(replace(found, most_iteration=NEWEST - 1), met)
    assert [(each.iteration, each.is_local) for each in candidates.choice.plans] == [(END, False)]
    reason = f"iteration {NEWEST}: not finished on all ranks"
    assert reason in [each.reason for each in candidates.rejected]
    assert candidates.blocked_by.startswith(f"{reason}; iteration {END}: all stages would run")


def test_log_that_a_rank_cannot_read_is_left_out_of_a_new_plan_with_more_stages(
    met: Met, found: Found
) -> None:
    before = phase.plan(found, met)
    unreadable = [log_of(before, 0, 4)]
    known, again = without(unreadable, found, before, met)
    assert known.unreadable == {*unreadable}
    assert [each.stages for each in first_of(again).scopes] == [(0, 1)]
    assert again.blocked_by == "", "the target is the same"
    _, of_all = without([log_of(again, 2, 4)], known, again, met)
    assert kinds(of_all) == [(END, False)], "no stage is left"
    assert "all stages would run the iterations from 3 again" in of_all.blocked_by


def breakpoint_of(found: Found, rank: int) -> Place:
    (version,) = (v for v in found.inventory.versions if (v.rank, v.iteration) == (rank, NEWEST))
    return place_of(version)


def test_stage_whose_breakpoint_cannot_be_read_recovers_with_the_dead_one(
    met: Met, found: Found
) -> None:
    known, again = without([breakpoint_of(found, 0)], found, phase.plan(found, met), met)
    first = first_of(again)
    assert first.iteration == NEWEST
    assert [each.stages for each in first.scopes] == [(0, 1)]
    assert all(
        place_of(source.version) not in known.unreadable
        for rank in range(3)
        for source in first.sources_of(rank)
    )


def test_damage_to_the_state_of_all_stages_leaves_those_alone_that_are_not_damaged(
    met: Met,
) -> None:
    """The best plan is a global one: every rank has left a breakpoint."""
    remains = failure(())
    inventory = Inventory(versions=[*remains.versions], logs=found_logs(remains))
    found = Found(inventory=inventory, wish=wish(), failed={})
    before = phase.plan(found, met)
    assert kinds(before) == [(NEWEST, False), (END, False)]
    _, again = without([breakpoint_of(found, 1)], found, before, met)
    assert kinds(again) == [(NEWEST, True), (END, False)]
    assert [each.stages for each in first_of(again).scopes] == [(1,)]


def test_job_whose_stages_share_weights_says_so_where_all_of_them_run_iterations_again(
    met: Met, found: Found
) -> None:
    tied = report_couplings(SharedWeights(num_stages=3, is_tied=True, mtp_stages=(1, 2)))
    memory = replace(met.config.memory, breakpoints=True, upstream_log=True)
    config = replace(met.config, memory=memory)
    traffic = PipelineTraffic(
        num_stages=3, num_chunks=1, num_microbatches=1, shape=(1, 1, 1), element_bytes=2
    )
    facts = replace(met.facts, couplings=tied, traffic=traffic)
    job = replace(met, pipelines=None, facts=facts, config=config)
    assert phase.plan(found, job).blocked_by == tied.line
    all_left = replace(found.inventory, versions=[*failure(()).versions])
    assert phase.plan(replace(found, inventory=all_left), job).blocked_by == ""
    asked = replace(config, recovery=replace(config.recovery, recovery="global"))
    assert phase.plan(found, replace(job, config=asked)).blocked_by == ""


def test_local_recovery_that_has_failed_for_its_logs_leaves_that_of_all_with_the_reason(
    met: Met, found: Found
) -> None:
    first = first_of(phase.plan(found, met))
    failed = {(first.start.name, NEWEST): "iteration 4: CorruptStateError: a checksum"}
    candidates = phase.plan(replace(found, failed_locally=failed), met)
    assert [(each.iteration, each.is_local) for each in candidates.choice.plans] == [(END, False)]
    assert candidates.blocked_by == (
        "iteration 6: a start failed to recover some stages alone (iteration 4: CorruptStateError: a "
        "checksum)"
    )
