"""Without the flag a call of `pretrain` is what it was."""

import os
from argparse import Namespace

import pytest
from megatron.training import training

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair import installing
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.installing import checked_heartbeat_s, repairing
from megatron.fault_tolerance.repair.nccl import Nccl
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.errors import ConfigError
from moe_ft.loop.listeners import Listeners, LoopState


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


def test_groups_of_a_job_on_cpus_are_all_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)
    (transport,) = installing._transports(Namespace(rank=0))
    assert isinstance(transport, Gloo)


def test_first_rank_on_gpus_says_that_this_is_untried_and_what_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ENABLE_MONITORING": "0"})
    of_gloo, of_nccl = installing._transports(Namespace(rank=0))
    assert isinstance(of_gloo, Gloo) and isinstance(of_nccl, Nccl)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    said = capsys.readouterr()
    line = said.out + said.err
    assert "--moe-ft-repair=auto has never run on a GPU" in line
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in line
    assert "TORCH_NCCL_ENABLE_MONITORING=0" not in line
    installing._transports(Namespace(rank=1))
    assert capsys.readouterr().out == ""


def test_silence_is_a_hang_before_the_other_ranks_give_up() -> None:
    args = Namespace(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=None)
    config = MoeFtConfig(recovery=RecoveryConfig(repair="auto", repair_heartbeat_s=59.5))
    assert checked_heartbeat_s(config, args) == 59.5
    for after_init_s in (10, 59):
        args.distributed_timeout_seconds_after_init = after_init_s
        with pytest.raises(ConfigError, match=f"=59.5 must be less than {after_init_s}, .* Lower"):
            checked_heartbeat_s(config, args)
