"""Seams are taken out again."""

import pytest
from megatron.training import training

from megatron.fault_tolerance import hooks
from megatron.fault_tolerance.patching import Patches
from megatron.fault_tolerance.run import TrainingRun
from moe_ft.config import MoeFtConfig

SEAMS = ("setup_model_and_optimizer", "train_step", "train")


def test_originals_are_back_after_an_error() -> None:
    originals = [getattr(training, name) for name in SEAMS]
    with pytest.raises(ZeroDivisionError), hooks.installed(TrainingRun(MoeFtConfig(), rank=0)):
        assert all(
            getattr(training, name) is not original
            for name, original in zip(SEAMS, originals, strict=True)
        )
        raise ZeroDivisionError
    assert [getattr(training, name) for name in SEAMS] == originals


def test_restoring_removes_what_an_object_only_inherited() -> None:
    patches = Patches()
    owner = type("Owner", (), {"method": lambda self: "inherited"})()
    patches.set(owner, "method", lambda: "replaced")
    assert owner.method() == "replaced"
    patches.restore()
    assert owner.method() == "inherited"
    assert "method" not in vars(owner)
    assert not patches
