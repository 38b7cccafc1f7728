"""Costs of a strategy as numbers: what a failure takes, and what is left of the time."""

from dataclasses import replace

import pytest

from moe_ft.planning.costs import Costs, RecoveryCosts, RecoveryKind, ettr

WINDOW_OF_3 = Costs(
    strategy="sparse",
    iteration_s=2.0,
    blocked_s=0.5,
    interval=4.0,
    window=3,
    lag=2.0,
    snapshot_bytes=40.0,
    peer_bytes=80.0,
    storage_bytes=0.0,
    host_bytes=200.0,
    lost_token_share=0.5,
    recoveries={
        RecoveryKind.RESTART: RecoveryCosts(processes_s=60.0, state_s=5.0, replay_s=4.0),
        RecoveryKind.LOCAL: RecoveryCosts(
            notice_s=1.0, processes_s=2.0, groups_s=3.0, state_s=5.0, replay_s=2.0, redo_share=0.5
        ),
    },
)


def test_replays_of_a_window_are_counted_once() -> None:
    # 6 iterations run again, 2 of them as replays of the window.
    assert WINDOW_OF_3.mean_redone == 6
    assert WINDOW_OF_3.redo_s(RecoveryKind.RESTART) == 4 * 2.5
    assert WINDOW_OF_3.failure_s(RecoveryKind.RESTART) == 60 + 5 + 4 + 10


def test_stage_that_recovers_alone_runs_its_iterations_faster() -> None:
    assert WINDOW_OF_3.failure_s(RecoveryKind.LOCAL) == 13 + 5
    assert WINDOW_OF_3.fastest is RecoveryKind.LOCAL


def test_lost_tokens_are_a_share_of_the_iterations_that_run_again() -> None:
    assert WINDOW_OF_3.lost_iterations == 3
    assert replace(WINDOW_OF_3, lost_token_share=0.0).lost_iterations == 0


def test_ettr_is_the_product_of_overhead_and_recovery() -> None:
    assert ettr(0.0, 0.0, 600) == 1
    assert ettr(0.25, 200, 600) == pytest.approx(0.8 * 0.75)
