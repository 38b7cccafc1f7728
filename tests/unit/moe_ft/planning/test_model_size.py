"""Parameters of models that others have counted, and the sums that must hold for all."""

from dataclasses import replace

from hypothesis import given

from moe_ft.planning.model_size import ByteModel, ModelShape, stage_units, unit_parameters
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
        assert sum(map(len, stages)) == len(expected)


def test_embedding_is_on_the_first_stage_and_its_tied_copy_on_the_last() -> None:
    first, last = stage_units(replace(TINY, num_layers=2, moe_layers=(0, 1)), 2)
    assert [str(unit) for unit in first if unit.layer < 0] == ["embedding"]
    assert [str(unit) for unit in last if unit.layer < 0] == ["final-norm", "output"]
    assert {unit.layer for unit in last if unit.layer >= 0} == {1}


def test_bytes_are_divided_by_whether_experts_may_be_left_out() -> None:
    model = ByteModel(master_always_full=True)
    assert model.optimizer_by_rule == (8, 4)
    assert (model.optimizer, model.total) == (12, 14)
