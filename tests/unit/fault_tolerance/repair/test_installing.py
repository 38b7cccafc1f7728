"""Without the flag a call of `pretrain` is what it was."""

from argparse import Namespace

import pytest
from megatron.training import training

from megatron.fault_tolerance.repair.installing import checked_heartbeat_s, repairing
from megatron.fault_tolerance.seams.listeners import Listeners, LoopState
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.errors import ConfigError


def test_nothing_changes_while_repairs_are_off() -> None:
    before = training.train_step
    repair = repairing(MoeFtConfig(), Namespace(), Listeners(LoopState(), []))
    with repair.below_hooks(), repair.above_hooks():
        assert training.train_step is before
    assert repair.seam is None and repair.arguments == {}


def test_process_without_a_zygote_is_refused() -> None:
    config = MoeFtConfig(recovery=RecoveryConfig(repair="auto"))
    with pytest.raises(ConfigError, match="--moe-ft-repair=auto needs ranks that are forked"):
        repairing(config, Namespace(), Listeners(LoopState(), []))


def test_silence_is_a_hang_before_the_other_ranks_give_up() -> None:
    args = Namespace(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=None)
    config = MoeFtConfig(recovery=RecoveryConfig(repair="auto", repair_heartbeat_s=59.5))
    assert checked_heartbeat_s(config, args) == 59.5
    for after_init_s in (10, 59):
        args.distributed_timeout_seconds_after_init = after_init_s
        with pytest.raises(ConfigError, match=f"=59.5 must be less than {after_init_s}, .* Lower"):
            checked_heartbeat_s(config, args)
