"""A replacement is set up alone: its groups are fake until it meets the others."""

from argparse import Namespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.training import training
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.joining import Joining
from megatron.fault_tolerance.repair.recipes import Recipe, Recipes


def test_replacement_makes_fake_groups_and_loads_nothing_until_it_meets_the_others(
    loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(training, "setup_model_and_optimizer", lambda: calls.append(loop_args.load))
    monkeypatch.setattr(
        training, "training_log", lambda **kwargs: calls.append(kwargs["is_first_iteration"])
    )
    loop_args.load, loop_args.fake_process_group = "checkpoints", False
    loop_args.distributed_backend = "nccl"
    recipes, make_group = Recipes(), dist.new_group
    joining = Joining(recipes)
    assert joining.is_alone
    with joining.installed():
        assert loop_args.fake_process_group
        # As Megatron does then.
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        group = dist.new_group([0, 1], backend="gloo")
        assert (dist.get_backend(), dist.get_backend(group)) == ("fake", "fake")
        assert recipes.of_default() == Recipe(backend="nccl")
        assert recipes.of(group) == Recipe(backend="gloo")
        training.setup_model_and_optimizer()
        assert loop_args.load == "checkpoints", "it identifies the run"
        joining.meet()
        assert not joining.is_alone
        assert dist.new_group is make_group
        training.training_log(is_first_iteration=True)
    dist.destroy_process_group()
    assert calls == [None, False]
    assert loop_args.fake_process_group is False


def test_replacement_leaves_out_the_log_line_that_the_others_have_written(
    loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(training, "training_log", lambda *args, **kwargs: calls.append(args[3]))
    joining = Joining(Recipes())
    loop_args.fake_process_group, joining.leaves_out_log = False, True
    with joining.installed():
        joining.meet()
        assert training.training_log({}, {}, 1e-3, 4, 1.0, "memory is to be reported", 0) == (
            "memory is to be reported"
        )
        training.training_log({}, {}, 1e-3, 5, 1.0, False, 0)
    assert calls == [5]


class _Chunk:
    """A part of a model whose modules gather their weights before they run."""

    def __init__(self) -> None:
        self.config = Namespace(param_sync_func="gather")
        self.remove_forward_pre_hook_handles = {"module": "hook"}

    def start_param_sync(self) -> None: ...

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles = {"module": "hook"}

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        del self.remove_forward_pre_hook_handles["module"]


@pytest.mark.parametrize("gathers", [False, True])
def test_replacement_gathers_weights_in_its_first_iteration_if_the_others_do(
    gathers: bool, loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def step(*args: Any) -> None:
        seen.append((args[5].param_sync_func, bool(chunk.remove_forward_pre_hook_handles)))

    monkeypatch.setattr(training, "train_step", step)
    chunk, joining = _Chunk(), Joining(Recipes())
    loop_args.fake_process_group = False
    with joining.installed():
        joining.gathers_weights = gathers
        training.disable_forward_pre_hook([chunk], param_sync=False)  # as Megatron's loop begins
        chunk.config.param_sync_func = None
        joining.meet()
        training.train_step(*range(5), chunk.config)
        training.enable_forward_pre_hook([chunk])
        assert chunk.remove_forward_pre_hook_handles
        training.disable_forward_pre_hook([chunk], param_sync=False)  # before an evaluation
        assert not chunk.remove_forward_pre_hook_handles
    assert seen == [("gather", True) if gathers else (None, False)]
