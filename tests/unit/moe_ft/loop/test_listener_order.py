"""The listeners of a run are all there, and in the order that their tasks need."""

from pathlib import Path

import pytest

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.faults import Phase
from moe_ft.loop.checkpoints import Checkpoints, PipelineLog
from moe_ft.loop.failure_report import FailureReport
from moe_ft.loop.faults import Faults
from moe_ft.loop.hangs import Hangs
from moe_ft.loop.listener_order import listeners_of
from moe_ft.loop.metrics import Metrics
from moe_ft.loop.progress import Digests, ProgressListener, ReportsTraining
from moe_ft.loop.protects import Protects
from moe_ft.loop.routers import Routers, SlotTables
from moe_ft.loop.weight_check import WeightCheck

pytestmark = pytest.mark.usefixtures("loop_args")
ALL = (
    *(
        Hangs,
        Metrics,
        ProgressListener,
        Protects,
        Faults,
        Routers,
        SlotTables,
        Digests,
        WeightCheck,
    ),
    *(PipelineLog, Checkpoints, ReportsTraining, FailureReport),
)


def test_log_is_opened_first_and_closed_last_and_checkpoints_follow_what_reads_their_states() -> (
    None
):
    listeners = listeners_of(MoeFtConfig(), MegatronLoop(), 3, on_sigterm=False)
    assert tuple(type(each) for each in listeners._listeners) == ALL


def test_all_listeners_look_at_one_loop_and_write_one_log(tmp_path: Path) -> None:
    config = MoeFtConfig(observability=ObservabilityConfig(event_log=str(tmp_path)))
    listeners = listeners_of(config, MegatronLoop(), 3, on_sigterm=False)
    states = [vars(each).get("_loop", listeners.loop) for each in listeners._listeners]
    assert all(state is listeners.loop for state in states)
    logs = [vars(each).get("_log") or vars(each).get("_event_log") for each in listeners._listeners]
    (log,) = {log for log in logs if log is not None}
    assert (log.directory, log.rank) == (tmp_path, 3)


def test_run_without_settings_passes_all_phases_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with listeners_of(MoeFtConfig(), MegatronLoop(), 3, on_sigterm=True) as listeners:
        for phase in Phase:
            assert not listeners.is_awaited(phase)
            listeners.enter(phase)
    assert list(tmp_path.iterdir()) == []
