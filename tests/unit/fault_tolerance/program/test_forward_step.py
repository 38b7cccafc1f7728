"""The loss counts the tokens of its mask, and a result that is not finite ends training."""

from argparse import Namespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.fault_tolerance.program.forward_step import loss_function, needs_batch

LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


@pytest.fixture
def args(loop_args: Namespace) -> Namespace:
    loop_args.check_for_nan_in_loss_and_grad = False
    loop_args.mtp_num_layers = None
    return loop_args


def test_loss_is_summed_over_the_tokens_that_count(args: Namespace) -> None:
    total, num_tokens, logged = loss_function(MASK, LOSSES)
    assert float(total) == 1.0 + 4.0 + 32.0
    assert num_tokens.dtype is torch.int32
    assert int(num_tokens) == 3
    assert logged["lm loss"].tolist() == [37.0, 3.0]


def test_gradient_reaches_only_the_tokens_that_count(args: Namespace) -> None:
    losses = LOSSES.clone().requires_grad_()
    total, _, logged = loss_function(MASK, losses)
    total.backward()
    assert torch.equal(losses.grad, MASK)  # type: ignore[arg-type]
    assert not logged["lm loss"].requires_grad


@pytest.mark.parametrize(("value", "words"), [("nan", "is NaN"), ("inf", "is infinite")])
def test_loss_that_is_not_finite_ends_training_where_it_is_checked(
    value: str, words: str, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # without a GPU
    bad = LOSSES.clone()
    bad[0, 0] = float(value)
    loss_function(MASK, bad)
    args.check_for_nan_in_loss_and_grad = True
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    try:
        with pytest.raises(RuntimeError, match=words):
            loss_function(MASK, bad)
    finally:
        destroy_rerun_state_machine()


@pytest.mark.parametrize(("rank", "needs"), [(0, True), (1, False), (2, True)])
def test_first_and_last_stage_read_data(
    rank: int, needs: bool, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 3)
    assert needs_batch(None) is needs
