"""Optimizers whose steps peers can repeat, and those that are refused."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.errors import ConfigError
from moe_ft.format.entries import ParameterEntry
from moe_ft.state.gradients import check_repeatable, gradients, is_lossy
from moe_ft.state.parameters import GroupPlace, LocalParameter, StatePlaces
from moe_ft.units import UnitId, UnitKind

ONE, TWO = GroupPlace(rank=0, size=1), GroupPlace(rank=0, size=2)
PLACES = StatePlaces(dp=TWO, expt_dp=TWO, tp=ONE, expt_tp=ONE)


def owned(
    stepped: Any, *, dtype: torch.dtype = torch.float32, **config: Any
) -> list[LocalParameter]:
    """Return a parameter with the first master of an optimizer of torch, and a frozen one."""
    master = stepped.param_groups[0]["params"][0]
    parameter: Any = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    parameter.main_grad = torch.zeros(4, dtype=dtype)
    inner = SimpleNamespace(
        optimizer=stepped,
        config=SimpleNamespace(**{"optimizer": "adam", "clip_grad": 1.0, **config}),
    )
    local = LocalParameter(
        unit=UnitId(kind=UnitKind.EMBEDDING),
        name="embedding",
        entry=ParameterEntry(shape=(4,)),
        parameter=parameter,
        start=0,
        end=4,
        optimizer=inner,
        master=master,
        is_sharded=False,
        is_expert=False,
    )
    return [local, replace(local, name="frozen", optimizer=None, master=None)]


def masters() -> list[torch.Tensor]:
    return [torch.zeros(4)]


class OtherAdam(torch.optim.Adam):
    """An optimizer that may compute anything."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_plain_adam_of_torch_is_repeatable(kind: Any) -> None:
    check_repeatable(owned(kind(masters())), PLACES)


def on_a_gpu(parameters: list[LocalParameter]) -> list[LocalParameter]:
    return [replace(parameters[0], parameter=SimpleNamespace(is_cuda=True))]  # type: ignore[arg-type]


def with_its_own_norm(parameters: list[LocalParameter]) -> list[LocalParameter]:
    parameters[0].parameter.grad_norm_group = "mtp"  # type: ignore[attr-defined]
    return parameters


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            on_a_gpu(owned(torch.optim.AdamW(masters()))),
            "is not exact .* on a GPU .*: .*replicate state, or add --moe-ft-allow-lossy",
        ),
        (
            owned(torch.optim.SGD(masters()), optimizer="sgd"),
            r"needs torch's Adam, and parameter embedding has SGD \(sgd\): .*replicate state",
        ),
        (owned(OtherAdam(masters())), "needs torch's Adam, and parameter embedding has OtherAdam"),
        (
            owned(torch.optim.AdamW(masters()), use_precision_aware_optimizer=True),
            "cannot be used with --use-precision-aware-optimizer: .*Leave one of them out",
        ),
        (
            owned(torch.optim.AdamW(masters(), amsgrad=True, maximize=True)),
            "needs torch's plain Adam, and this one has amsgrad, maximize: it computes something else",
        ),
        (
            owned(torch.optim.AdamW(masters(), fused=True)),
            "is not exact with fused Adam .* add --moe-ft-allow-lossy",
        ),
        (
            with_its_own_norm(owned(torch.optim.AdamW(masters()), dtype=torch.bfloat16)),
            "with gradients that .* cannot follow parameter embedding, which is clipped by a norm of its own",
        ),
    ],
)
def test_optimizer_whose_step_cannot_be_repeated_is_refused(
    parameters: list[LocalParameter], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--moe-ft-replicate=gradients {message}"):
        check_repeatable(parameters, PLACES)


class FusedAdam(torch.optim.SGD):
    """Stands for those of libraries: they count steps in the group, and have a mode instead of a flag."""

    adam_w_mode = 1
    __module__ = "apex.optimizers.fused_adam"


def test_fused_adam_is_followed_where_that_is_allowed_and_no_other_rank_has_the_same_state() -> (
    None
):
    master = torch.zeros(4)
    optimizer = FusedAdam([master])
    parameters = owned(optimizer)[:1]
    assert is_lossy(parameters[0])
    with pytest.raises(
        ConfigError, match="not exact needs --use-distributed-optimizer: .*embedding"
    ):
        check_repeatable(parameters, PLACES, allows_lossy=True)
    check_repeatable([replace(parameters[0], is_sharded=True)], PLACES, allows_lossy=True)
    optimizer.param_groups[0] |= {"betas": (0.9, 0.99), "eps": 1e-8, "step": 6}
    optimizer.state[master] = {"exp_avg": master, "exp_avg_sq": master}
    master.grad = torch.ones(4)
    ((_, _, step),) = gradients(parameters, {}, 1.0)
    assert (step.number, step.is_decoupled) == (7, True)


def tied(local: LocalParameter) -> LocalParameter:
    local.parameter.shared_embedding = True  # type: ignore[attr-defined]
    return local


def divided(local: LocalParameter) -> LocalParameter:
    return replace(local, entry=ParameterEntry(shape=(4,), tp_dim=0, tp_size=2))


def of_an_expert(local: LocalParameter) -> LocalParameter:
    return replace(local, is_expert=True)


_TP, _ETP = replace(PLACES, tp=TWO), replace(PLACES, expt_tp=TWO)


@pytest.mark.parametrize(
    ("change", "places", "message"),
    [
        (replace, _TP, "--tensor-model-parallel-size=2: .*embedding.* Give 1, or: .*replicate"),
        (of_an_expert, _ETP, "--expert-tensor-parallel-size=2: .* Give 1, or: .*replicate"),
        (tied, PLACES, ".*without --untie-embeddings-and-output-weights.* Untie them, .*replicate"),
        (divided, _TP, ""),
        (of_an_expert, _TP, ""),
        (replace, _ETP, ""),
    ],
)
def test_fused_adam_is_not_followed_where_tensor_parallel_ranks_or_stages_have_the_same_state(
    change: Any, places: StatePlaces, message: str
) -> None:
    fused = torch.optim.AdamW(masters(), fused=True)
    local = change(replace(owned(fused)[0], is_sharded=True))
    refusal = pytest.raises(ConfigError, match=f"not exact cannot be used with {message}")
    with refusal if message else nullcontext():
        check_repeatable([local], places, allows_lossy=True)
    exact = replace(local, optimizer=owned(torch.optim.AdamW(masters()))[0].optimizer)
    check_repeatable([exact], places)


def test_gradients_of_a_first_step_are_not_given_and_no_state_is_made() -> None:
    optimizer = torch.optim.AdamW(masters())
    parameters = owned(optimizer)[:1]
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    with pytest.raises(KeyError):
        [*gradients(parameters, {}, 1.0)]
    assert not optimizer.state
