"""Facts that follow from what the engine is given."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ft.engine.engine import EngineContext
from moe_ft.engine.memory.restored import Handover
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_history, make_parameter
from tests.unit.moe_ft.engine.engine_job import Job, Setup


def test_restored_state_is_that_of_the_last_start_of_its_family() -> None:
    history = make_history([(0, 0), (1, 5)])
    restored = Handover(
        indexes=frozenset(), rotating={}, persisted_index="", family=(7, 1, *history)
    )
    assert restored.start == history[-1]


def context(tmp_path: Path) -> EngineContext:
    return Job(tmp_path, Setup(), is_started=False).ranks[0].context


def test_requests_to_the_writer_are_in_the_memory_of_the_node(tmp_path: Path) -> None:
    assert context(tmp_path).persist_dir == tmp_path / "node-0" / "persist"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_elsewhere_are_not_on_a_gpu(tmp_path: Path, device: str) -> None:
    parameter = torch.zeros(4, device=device)
    local = make_parameter(UnitId(kind=UnitKind.EMBEDDING), parameter=parameter)
    assert not replace(context(tmp_path), parameters=[local]).is_on_gpu
