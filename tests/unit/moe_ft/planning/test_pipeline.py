"""Layers of pipeline stages are those that Megatron puts there."""

from typing import Any

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from moe_ft.commands.command_line import read_command
from moe_ft.errors import ConfigError
from moe_ft.planning.described_job import shape_of
from moe_ft.planning.model_size import stage_units
from moe_ft.planning.pipeline import layers_of_stages, parse_layout
from tests.demo_model import deepseek_flags, model_flags
from tests.unit.moe_ft.planning.built import built_units

LETTERS = {
    LayerType.embedding: "E",
    LayerType.decoder: "t",
    LayerType.mtp: "m",
    LayerType.loss: "L",
}
FOUR: dict[str, Any] = {"num_layers": 4, "moe_layer_freq": "([0]*1+[1]*3)"}
STAGES = {
    "equal stages": model_flags(pipeline_model_parallel_size=2),
    "tied": model_flags(pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False),
    "a further token": deepseek_flags(**FOUR, pipeline_model_parallel_size=2),
    "a further token, tied": deepseek_flags(
        **FOUR, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False
    ),
    "a layout": deepseek_flags(
        **FOUR, pipeline_model_parallel_size=3, pipeline_model_parallel_layout="Et*2|(t|)*1tmL"
    ),
    "few first layers": model_flags(
        num_layers=5, pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=1
    ),
    "few last layers": model_flags(
        num_layers=5, pipeline_model_parallel_size=3, decoder_last_pipeline_num_layers=1
    ),
    "few first and last layers": model_flags(
        num_layers=5,
        pipeline_model_parallel_size=3,
        decoder_first_pipeline_num_layers=1,
        decoder_last_pipeline_num_layers=2,
    ),
    "embedding and loss in place of layers": model_flags(
        pipeline_model_parallel_size=3,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_units_of_every_stage_are_those_that_megatron_builds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = read_command(STAGES[name]).args
    layers = layers_of_stages(args)
    planned = stage_units(shape_of(args), len(layers), layers)
    world_size = args.pipeline_model_parallel_size
    assert planned == [
        built_units(STAGES[name], monkeypatch, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    "text", ["Et|tL", "Et*4|(t*4|)*14tmL", "Ettt,|(tt|)*29,m|L", "E|(t|)*2(tt)*2|L", "E(|t)*3|mL"]
)
def test_layout_is_read_as_megatron_reads_it(text: str) -> None:
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert parse_layout(text) == ["".join(LETTERS[layer] for layer in stage) for stage in theirs]


def test_virtual_stages_of_a_rank_are_one_stage() -> None:
    flags = model_flags(
        num_layers=6, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt|tt|tL"
    )
    theirs = PipelineParallelLayerLayout("Et|tt|tt|tL", 2).layout
    counts = [sum(chunk.count(LayerType.decoder) for chunk in stage) for stage in theirs]
    layers = layers_of_stages(read_command(flags).args)
    assert layers == [[0, 3, 4], [1, 2, 5]]
    assert [len(stage) for stage in layers] == counts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"--pipeline-model-parallel-size=3 must divide --num-layers=4. Change .*-layout\."),
        (
            {"decoder_first_pipeline_num_layers": 1},
            "must divide --num-layers=4, as --decoder-first-pipeline-num-layers leave them",
        ),
        ({"decoder_first_pipeline_num_layers": 5}, "must divide --num-layers=4, as --decoder-f"),
        ({"account_for_loss_in_pipeline_split": True}, "as --account-for-loss-in-pipeline-split"),
        ({"pipeline_model_parallel_layout": "Ett|x|ttL"}, "-layout has 'x', which is none of"),
        (
            {"pipeline_model_parallel_layout": "Ett|ttL"},
            "-layout=Ett.ttL has 2 stages, which must be a multiple of .*-size=3. Change one",
        ),
        (
            {"pipeline_model_parallel_layout": "Ett|t|L"},
            "has 3 t and 0 m, which must be --num-layers=4 and --mtp-num-layers=0. Change one",
        ),
        ({"pipeline_model_parallel_layout": "tt|tt|L"}, "cannot be planned: E must come first"),
        (
            {"pipeline_model_parallel_layout": "Ett|ttm|L", "mtp_num_layers": 1},
            "cannot be planned: .* every m must be on the last stage. Change it",
        ),
    ],
)
def test_stages_that_cannot_be_planned_are_refused(
    flags: dict[str, str | int], message: str
) -> None:
    line = model_flags(pipeline_model_parallel_size=3, **flags)
    with pytest.raises(ConfigError, match=message):
        layers_of_stages(read_command(line).args)
