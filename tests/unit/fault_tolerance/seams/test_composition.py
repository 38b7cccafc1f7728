"""A run of Megatron's own loop has all listeners, and they look at that loop."""

import pytest

from megatron.fault_tolerance.seams.composition import listeners_for
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import MoeFtConfig
from moe_ft.loop.listener_order import listeners_of


@pytest.mark.parametrize("on_sigterm", [True, False])
def test_run_of_megatrons_loop_has_the_listeners_of_any_loop(on_sigterm: bool) -> None:
    found = listeners_for(MoeFtConfig(), 3, on_sigterm=on_sigterm)._listeners
    expected = listeners_of(MoeFtConfig(), MegatronLoop(), 3, on_sigterm=on_sigterm)._listeners
    assert [type(each) for each in found] == [type(each) for each in expected]
    loops = {type(vars(each)["_training"]) for each in found if "_training" in vars(each)}
    assert loops == {MegatronLoop}
