"""Guests and their hosts, as a rank of a job that shares micro-batches learns of them."""

from dataclasses import replace

import pytest

from megatron.fault_tolerance.repair.seam import _sharing
from moe_ft.cluster.member import Member
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.loop.listeners import Listeners, LoopState
from tests.unit.fault_tolerance.degraded.test_rules import job
from tests.unit.signed import member_of


@pytest.mark.parametrize(("answer", "host_rank"), [("share", 1), ("crowd", None)])
def test_guest_of_a_job_that_crowds_runs_its_own_micro_batches_where_gradients_wait(
    answer: str, host_rank: int | None
) -> None:
    config = MoeFtConfig(recovery=RecoveryConfig(without_spare=answer, late_gradients="always"))
    member = Member(replace(member_of().assignment, host_rank=1))
    listeners = Listeners(LoopState(), [])
    with _sharing(config, job(), listeners, member, answer) as (_, sharing):
        assert sharing is not None
        assert sharing._host_rank == host_rank
