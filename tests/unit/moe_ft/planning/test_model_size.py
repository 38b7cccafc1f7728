"""Parameters of models that others have counted, and the sums that must hold for all."""

from dataclasses import replace

from hypothesis import given

from moe_ft.planning.model_size import (
    ByteModel,
    LatentAttention,
    ModelShape,
    stage_units,
    unit_parameters,
)
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.planning.shapes import any_shapes

# One layer, width 2, 3 experts of width 5 with biases, vocabulary 7, 4 positions.
TINY = ModelShape(
    num_layers=1,
    hidden_size=2,
    num_experts=3,
    moe_layers=(0,),
    moe_ffn_hidden_size=5,
    vocab_size=7,
    num_positions=4,
)


def test_units_of_a_tiny_model_have_the_parameters_counted_by_hand() -> None:
    expert = 2 * 5 + 5 + 5 * 2 + 2
    attention = 4 * 2 * 2 + 4 * 2  # query, key, value and output projection with biases
    assert unit_parameters(TINY) == {
        UnitId(kind=UnitKind.EMBEDDING): 7 * 2 + 4 * 2,
        UnitId(kind=UnitKind.NON_EXPERT, layer=0): attention + 2 * (2 + 2),
        UnitId(kind=UnitKind.ROUTER, layer=0): 2 * 3,
        **{UnitId(kind=UnitKind.EXPERT, layer=0, expert=index): expert for index in range(3)},
        UnitId(kind=UnitKind.FINAL_NORM): 4,
    }


def test_gate_doubles_the_way_into_an_expert() -> None:
    assert replace(TINY, is_gated=True).expert_parameters == 2 * (2 * 5 + 5) + 5 * 2 + 2


def test_grouped_queries_shrink_keys_and_values_only() -> None:
    shape = replace(TINY, num_attention_heads=4, kv_channels=3, num_query_groups=2, has_bias=False)
    assert shape.attention_parameters == 2 * (4 * 3) + 2 * 2 * (2 * 3) + (4 * 3) * 2


def test_output_layer_of_its_own_is_as_large_as_the_word_embeddings() -> None:
    units = unit_parameters(replace(TINY, has_output_layer=True))
    assert units[UnitId(kind=UnitKind.OUTPUT)] == 7 * 2


@given(any_shapes())
def test_units_add_up_to_the_model(shape: ModelShape) -> None:
    assert sum(unit_parameters(shape).values()) == shape.num_parameters


@given(any_shapes())
def test_stages_together_have_the_units_of_the_model(shape: ModelShape) -> None:
    for num_stages in (n for n in range(2, 6) if shape.num_layers % n == 0):
        stages = stage_units(shape, num_stages)
        expected = unit_parameters(shape)
        expected.setdefault(UnitId(kind=UnitKind.OUTPUT), shape.vocab_size * shape.hidden_size)
        together = {unit: count for stage in stages for unit, count in stage.items()}
        assert together == expected
        assert sum(map(len, stages)) == len(expected) + (shape.num_mtp_layers > 0)


def test_embedding_is_on_the_first_stage_and_its_tied_copy_on_the_last() -> None:
    first, last = stage_units(replace(TINY, num_layers=2, moe_layers=(0, 1)), 2)
    assert [str(unit) for unit in first if unit.layer < 0] == ["embedding"]
    assert [str(unit) for unit in last if unit.layer < 0] == ["final-norm", "output"]
    assert {unit.layer for unit in last if unit.layer >= 0} == {1}


def test_layers_that_predict_further_tokens_are_on_the_last_stage_with_embeddings_of_their_own() -> (
    None
):
    shape = replace(TINY, num_layers=2, moe_layers=(1,), num_mtp_layers=1)
    first, last = stage_units(shape, 2)
    further = {str(unit): count for unit, count in last.items() if unit.block == "mtp"}
    layer = {str(unit): count for unit, count in last.items() if str(unit).startswith("layer.1")}
    projection = 2 * (2 * 2) + 3 * (2 + 2)
    assert further.pop("mtp.0.non-expert") == layer.pop("layer.1.non-expert") + projection
    assert list(further.values()) == list(layer.values())
    assert last[UnitId(kind=UnitKind.EMBEDDING)] == first[UnitId(kind=UnitKind.EMBEDDING)]


def test_latent_attention_has_the_parameters_counted_by_hand() -> None:
    latent = LatentAttention(
        query_rank=3, key_value_rank=5, head_width=7, position_width=11, value_width=13
    )
    shape = replace(
        TINY, num_attention_heads=2, latent_attention=latent, has_bias=False, has_qk_norm=True
    )
    queries = 2 * 3 + 2 * 3 + 3 * 2 * (7 + 11)
    keys_values = 2 * (5 + 11) + 2 * 5 + 5 * 2 * (7 + 13)
    assert shape.attention_parameters == queries + keys_values + 2 * 13 * 2
    plain = replace(shape, latent_attention=replace(latent, query_rank=0), has_qk_norm=False)
    assert plain.attention_parameters == 2 * 2 * 18 + keys_values - 2 * 5 + 2 * 13 * 2


def test_bytes_are_divided_by_whether_experts_may_be_left_out() -> None:
    model = ByteModel(master_always_full=True)
    assert model.optimizer_by_rule == (8, 4)
    assert (model.optimizer, model.total) == (12, 14)
