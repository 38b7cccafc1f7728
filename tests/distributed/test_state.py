"""Every parameter and optimizer tensor belongs to one unit and one rank's slice, on many models."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pretrain_gpt_moe
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.recovery.meet import Met
from moe_ft.state.slices import describe, live_tensor
from moe_ft.state.tensors import named_optimizer_tensors, named_parameters
from moe_ft.units import Level, UnitKind, parse_unit
from tests.demo_model import DEEPSEEK, NO_EXPERTS, event_flags, layout_flags, model_flags
from tests.harness import run_ranks
from tests.shares import share_of

MODELS: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "ep2-dp2": ({}, {"ep": 2}, 4),
    "pp2-ep2": ({}, {"pp": 2, "ep": 2}, 4),
    "ep2-replicated": ({"use_distributed_optimizer": False}, {"ep": 2}, 4),
    "fp32-replicated": ({"use_distributed_optimizer": False, "bf16": False}, {"ep": 2}, 2),
    "fp32": ({"bf16": False}, {"ep": 2}, 2),
    "virtual-stages": ({"num_layers_per_virtual_pipeline_stage": 1}, {"pp": 2}, 2),
    "tied-embedding": ({"untie_embeddings_and_output_weights": False}, {"pp": 2}, 4),
    # Latent attention, shared experts, multi-token prediction, and sequences that two ranks share.
    "deepseek": (DEEPSEEK, {"cp": 2, "ep": 2}, 2),
    "every-other-layer": ({"moe_layer_freq": 2}, {"pp": 2}, 2),
    "tp2-etp2": ({"sequence_parallel": True}, {"tp": 2, "etp": 2}, 4),
    "tp2-ep2": ({"sequence_parallel": True}, {"tp": 2, "ep": 2, "etp": 1}, 2),
    "no-experts": (NO_EXPERTS, {"pp": 2}, 4),
}


def check_ownership(flags: list[str]) -> None:
    """Train two iterations, then compare the state that ranks own with what they hold. Runs on every rank."""
    original = Checkpoints.end_training

    def end_training(checkpoints: Checkpoints) -> None:
        original(checkpoints)
        assert checkpoints._running is not None
        check_ownership_of(checkpoints._running.met)

    Checkpoints.end_training = end_training  # type: ignore[method-assign,assignment]  # this process only
    pretrain_gpt_moe.main(flags)


def check_ownership_of(met: Met) -> None:
    parameters = met.live.parameters
    live = [parameter for _, parameter in named_parameters(met.live.built[0])]
    assert {id(each.parameter) for each in parameters} == {id(each) for each in live}
    assert len(parameters) == len(live)
    assert len({each.name for each in parameters}) == len(parameters)
    for each in parameters:
        assert str(parse_unit(str(each.unit))) == str(each.unit)
        has_expert_name = ".experts." in each.name and ".shared_experts." not in each.name
        assert (each.unit.kind is UnitKind.EXPERT) == has_expert_name, each.name
    owned_elements = sum(
        tensor.numel()
        for each in parameters
        for entry in describe(each, Level.FULL)
        if (tensor := live_tensor(each, entry.key)) is not None
    )
    if all(each.is_sharded for each in parameters):
        held = [
            tensor
            for name, tensor in named_optimizer_tensors(*met.live.built[:2])
            if not name.endswith("/step")
        ]
        assert owned_elements == sum(tensor.numel() for tensor in held)
    check_slices(met)


def check_slices(met: Met) -> None:
    """Check that ranks which hold the same part of a parameter own disjoint slices that cover it."""
    places = met.facts.places
    own = [
        (
            (each.name, places.expt_tp.rank if ".local_experts." in each.name else places.tp.rank),
            (each.start, each.end),
            each.parameter.numel(),
        )
        for each in met.live.parameters
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    slices = defaultdict(list)
    sizes = {}
    for key, slice_, size in (line for lines in gathered for line in lines):
        slices[key].append(slice_)
        sizes[key] = size
    for key, found in slices.items():
        ends = sorted(slice_ for slice_ in found if slice_[0] < slice_[1])
        assert ends[0][0] == 0, key
        assert ends[-1][1] == sizes[key], key
        assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False)), (key, ends)


@pytest.mark.parametrize("name", share_of(MODELS, "fp32-replicated", "deepseek", "tp2-ep2"))
def test_every_tensor_belongs_to_one_unit_and_one_slice(
    name: str, dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    changes, layout, num_ranks = MODELS[name]
    flags = [
        *model_flags(train_iters=2, **changes),
        *layout_flags(layout),
        *dataset_flags,
        *event_flags(tmp_path),
        *("--moe-ft-strategy", "dense", "--moe-ft-job-id", "test"),
        *("--moe-ft-memory-dir", str(memory_dir)),
    ]
    run_ranks(check_ownership, num_ranks, flags, log_dir=tmp_path).check()
