"""The list of families."""

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_ft.convert.huggingface.families.registry import FAMILIES


def test_families_have_the_names_of_transformers() -> None:
    for model_type, family in FAMILIES.items():
        assert AutoConfig.for_model(model_type).model_type == family.model_type
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == family.architecture
