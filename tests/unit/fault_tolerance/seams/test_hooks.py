"""Seams are taken out again."""

import pytest
from megatron.training import training

from megatron.fault_tolerance.seams import hooks
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.watch.run import TrainingRun
from moe_ft.config.config import MoeFtConfig

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


def test_every_attempt_at_an_iteration_begins_with_no_tokens_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, optimizer = TrainingRun(MoeFtConfig(), rank=0), _Optimizer()
    begun: list[str] = []
    monkeypatch.setattr(run, "before_setup", lambda: None)
    monkeypatch.setattr(run, "after_setup", lambda *built: None)
    monkeypatch.setattr(run, "end", lambda *reason: None)
    monkeypatch.setattr(run._router_load, "begin", lambda: begun.append("counts"))
    monkeypatch.setattr(training, "setup_model_and_optimizer", lambda: ([], optimizer, None))
    with hooks.installed(run):
        training.setup_model_and_optimizer()
        optimizer.zero_grad()  # train_step
        optimizer.zero_grad()  # train_step again, or the paged stash
        assert begun == ["counts"] * 2
    assert optimizer.num_calls == 2


class _Optimizer:
    """As much of Megatron's as the seams look at."""

    chained_optimizers = ()

    def __init__(self) -> None:
        self.num_calls = 0

    def zero_grad(self) -> None:
        self.num_calls += 1

    def step_with_ready_grads(self) -> bool:
        return True
