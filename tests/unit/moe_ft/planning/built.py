"""Models that Megatron builds from flags, without memory for their parameters, rank by rank."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.training import arguments as megatron_arguments
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.vocab_utils import calculate_padded_vocab_size
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.program.model import layer_spec, mtp_spec
from moe_ft.units import UnitId, UnitKind
from tests.stock_program import CPU_FLAGS

# Flags that Megatron needs to build a model on this machine. They change no size.
HERE = (
    *CPU_FLAGS,
    *("--mock-data", "--use-cpu-initialization", "--no-initialization"),
    *("--moe-token-dispatcher-type", "allgather"),
)
_LAYER = re.compile(r"(?P<block>decoder|mtp)\.layers\.(?P<layer>\d+)\.")


@contextmanager
def one_rank_of(world_size: int, rank: int, num_stages: int = 1) -> Iterator[None]:
    """Give Megatron the process groups of a rank whose peers do not exist."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=num_stages, create_gloo_process_groups=False
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def built_units(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, world_size: int = 1
) -> Counter[UnitId]:
    """Return the parameters of the units of the model that Megatron builds on a rank.

    Args:
        flags: of a model that is divided into as many pipeline stages as there are ranks.
    """
    monkeypatch.setattr(sys, "argv", ["x", *flags, *HERE])
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args)
    config = gpt_config_from_args(args)
    vocabulary = args.padded_vocab_size or calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    # Tables of rotary embeddings, which are no parameters, and the values of copied embeddings need a GPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    monkeypatch.setattr(GPTModel, "setup_embeddings_and_output_layer", lambda self: None)
    with one_rank_of(world_size, rank, world_size), torch.device("meta"):
        spec = layer_spec(config)
        model = GPTModel(
            config.transformer,
            spec,
            vocabulary,
            args.max_position_embeddings,
            pre_process=rank == 0,
            post_process=rank == world_size - 1,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            mtp_block_spec=mtp_spec(config, spec),
        )
    modules = dict(model.named_modules())
    found: Counter[UnitId] = Counter()
    for name, parameter in model.named_parameters():
        found[_unit_of(name, modules)] += parameter.numel()
    return found


def _unit_of(name: str, modules: dict[str, torch.nn.Module]) -> UnitId:
    layer = _LAYER.search(name)
    if layer is None:
        (kind,) = (
            kind
            for part, kind in (
                ("embedding.", UnitKind.EMBEDDING),
                ("output_layer.", UnitKind.OUTPUT),
                ("final_layernorm.", UnitKind.FINAL_NORM),
            )
            if part in name
        )
        return UnitId(kind=kind)
    number = int(layer["layer"])
    if layer["block"] == "decoder":
        number = int(modules[name[: layer.end() - 1]].layer_number) - 1  # type: ignore[arg-type]
    block = "mtp" if layer["block"] == "mtp" else "layer"
    if expert := re.search(r"\.local_experts\.(\d+)\.", name):
        return UnitId(kind=UnitKind.EXPERT, block=block, layer=number, expert=int(expert[1]))
    kind = UnitKind.ROUTER if ".router." in name else UnitKind.NON_EXPERT
    return UnitId(kind=kind, block=block, layer=number)
