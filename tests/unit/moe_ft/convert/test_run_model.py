"""The model of a run: what formats see of it. Its tensors are test_tensors.py and test_assembly.py."""

from moe_ft.convert.run_model import RunModel
from moe_ft.convert.source import Source
from tests.unit.moe_ft.convert.models import OBJECT


def test_settings_and_facts_are_those_of_the_run(source: Source) -> None:
    model = RunModel(source)
    assert model.settings["--num-layers"] == 1
    assert (model.facts["iteration"], model.facts["job_id"]) == (4, source.identity.job_id)


def test_random_numbers_belong_to_the_optimizer(source: Source) -> None:
    model = RunModel(source)
    whole = model.megatron_state(with_optimizer=True, for_ep=None)
    weights = model.megatron_state(with_optimizer=False, for_ep=None)
    assert (len(whole.rng), len(weights.rng), whole.master) == (2, 0, "param")
    assert OBJECT in weights.modules
