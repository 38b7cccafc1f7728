"""Costs that strategies report of a job, worked out by hand from the bytes of its heaviest rank."""

from typing import Any

import pytest

from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs, RecoveryKind, StoredStates
from moe_ft.planning.job_costs import places
from moe_ft.strategies import registry
from tests.unit.moe_ft.planning.described import FULL, SMALL, planned_job

TWO_NODES: dict[str, Any] = {"world_size": 4, "ranks_per_node": 2}
LINKS: dict[str, Any] = {"iteration_s": 1.0, "bandwidth": 20e6, "network_bandwidth": 20e6}
STORAGE = ("--moe-ft-persist-dir", "/x", "--moe-ft-persist-interval", "2")


def costs(strategy: str, *flags: str, **facts: Any) -> Costs:
    """Return what a strategy costs the small model on two nodes."""
    job = planned_job(*SMALL, "--moe-ft-strategy", strategy, *flags, **{**TWO_NODES, **facts})
    return registry.chosen(job.config).plan(job).costs()


def test_dense_snapshots_at_peers_are_there_an_iteration_after_their_copy() -> None:
    found = costs("dense", **LINKS)
    # 0.52 s for the copy, and as long for the peer: behind the optimizer step.
    assert (found.interval, found.window, found.lag) == (2, 1, 2)
    assert found.blocked_s == 0
    assert found.peer_bytes == found.snapshot_bytes == FULL / 2
    assert found.mean_redone == 3
    assert found.recoveries[RecoveryKind.RESTART].state_s == FULL / 20e6
    assert found.lost_token_share == found.storage_bytes == 0
    assert (found.nodes_lost, found.stored) == (1, None)
    stored = costs("dense", *STORAGE, storage_bandwidth=2e6, **LINKS).stored
    # Written in 5.2 s: every third one of the states at peers, which come every 2 iterations.
    assert stored == StoredStates(interval=6, lag=1 + FULL / 2e6, state_s=FULL / 2e6)


def test_copy_that_is_not_hidden_blocks_its_share_of_each_iteration() -> None:
    found = costs("dense", "--moe-ft-interval", "4", **{**LINKS, "bandwidth": 5e6})
    assert found.blocked_s == pytest.approx((FULL / 5e6 - 1) / 4)
    assert found.overhead == found.blocked_s / found.iteration_s


def test_state_of_a_lost_node_comes_from_storage_without_replicas() -> None:
    flags = (*STORAGE, "--moe-ft-replication-factor", "0")
    found = costs("dense", *flags, storage_bandwidth=2e6, **LINKS)
    # Written in 5.2 s: only every sixth snapshot can be.
    assert found.interval == 6
    assert found.lag == pytest.approx(1 + FULL / 2e6)
    assert found.storage_bytes == FULL / 6
    assert (found.nodes_lost, found.stored) == (None, None)
    assert found.recoveries[RecoveryKind.RESTART].state_s == FULL / 2e6
    with pytest.raises(ConfigError, match="--moe-ft-replication-factor=0 needs --storage-bandw"):
        costs("dense", *flags, **LINKS)


def test_sparse_windows_make_one_and_a_half_of_them_run_again() -> None:
    found = costs("sparse", "--moe-ft-window", "3", **{**LINKS, "network_bandwidth": 4.6e6})
    assert (found.interval, found.window, found.lag) == (4, 3, 2)
    assert found.mean_redone == 1.5 * 4
    assert found.recoveries[RecoveryKind.RESTART].replay_s == 2


def test_partial_experts_lose_tokens_of_half_a_round() -> None:
    found = costs("partial", "--moe-ft-k-snapshot", "2", "--moe-ft-interval", "3", **LINKS)
    # 8 experts, 2 in each snapshot: 0 to 3 snapshots old, 1.5 on average.
    assert found.lost_iterations == pytest.approx(3 * 1.5)
    assert found.snapshot_bytes < FULL / 3


def test_repair_is_a_recovery_where_it_is_on_and_its_time_known() -> None:
    assert [*costs("dense", repair_s=2.0, **LINKS).recoveries] == [RecoveryKind.RESTART]
    flags = ("--moe-ft-repair", "auto")
    found = costs("dense", *flags, repair_s=2.0, restart_s=9.0, keep_s=4.0, **LINKS)
    assert found.recoveries[RecoveryKind.KEEP].ready_s == pytest.approx(4 + FULL / 20e6)
    assert found.fastest is RecoveryKind.REPAIR
    assert found.recoveries[RecoveryKind.REPAIR].fixed_s == pytest.approx(2 + FULL / 20e6)
    log = ("--moe-ft-upstream-log", "--seq-length", "16", "--micro-batch-size", "1")
    local = costs("dense", *flags, *log, "--global-batch-size", "8", repair_s=2.0, **LINKS)
    # 4 micro-batches of 2 stages: alone, a stage needs 4 of 5 turns.
    assert local.recoveries[RecoveryKind.LOCAL].redo_share == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "--iteration-s or --bandwidth not given: .* or --cluster NAME, or --from-run DIR"),
        (
            {"iteration_s": 1.0, "bandwidth": 1e9},
            "--moe-ft-replication-factor=auto, that is 1, needs --network-bandwidth",
        ),
    ],
)
def test_value_that_costs_need_is_named(facts: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        costs("dense", **facts)


@pytest.mark.parametrize(
    ("facts", "flags", "found"),
    [
        ({}, (), {"at peers": True}),
        ({"storage_bandwidth": 1e6}, (), {"at peers": True, "on storage": False}),
        ({"storage_bandwidth": 1e6}, ("0",), {"on storage": False}),
        ({"storage_bandwidth": 1e6, "ranks_per_node": 4}, (), {"in memory": True}),
    ],
)
def test_recoveries_find_the_state_where_the_job_can_keep_it(
    facts: dict[str, Any], flags: tuple[str, ...], found: dict[str, bool]
) -> None:
    words = ("--moe-ft-replication-factor", *flags) if flags else ()
    assert places(planned_job(*SMALL, *words, **{**TWO_NODES, **LINKS, **facts})) == found
