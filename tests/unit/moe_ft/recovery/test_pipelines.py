"""Jobs whose stages can recover alone, and those that are told why theirs cannot."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_ft.config.config import RecoveryConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.couplings import CouplingReport, SharedWeights, report_couplings
from moe_ft.planning.remains import Pipelines
from moe_ft.recovery.meet import meet_pipelines
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, initialized, met_alone

TRAFFIC = PipelineTraffic(
    num_stages=3, num_chunks=1, num_microbatches=1, shape=(1, 1, 1), element_bytes=2
)
UNTIED = SharedWeights(num_stages=3, is_tied=False)
TIED = SharedWeights(num_stages=2, is_tied=True)


def meet_with(tmp_path: Path, weights: SharedWeights | None, **settings: Any) -> Pipelines | None:
    """Return the pipelines of a job of one rank whose model has these weights."""
    report: CouplingReport | None = None if weights is None else report_couplings(weights)
    with initialized(), ExitStack() as opened:
        facts = facts_of()
        groups = SimpleNamespace(**{**vars(facts.groups), "pp": dist.group.WORLD})
        traffic = None if weights is None else TRAFFIC
        facts = replace(facts, groups=groups, traffic=traffic, couplings=report)
        mode = RecoveryConfig(recovery=settings.pop("recovery", "auto"))
        config = replace(config_of(tmp_path, **settings), recovery=mode)
        met = met_alone(config, facts_of(), opened)
        return meet_pipelines(met.site, facts, met.live.built[1], met.live.parameters, met.ranks)


def test_job_that_logs_nothing_recovers_globally_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meet_with(tmp_path, None) is None
    assert capsys.readouterr().err == ""


def test_stages_without_couplings_can_recover_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = meet_with(tmp_path, UNTIED, breakpoints=True, upstream_log=True)
    assert found is not None
    assert (found.stages, found.node_of) == (((0,),), ("node",))
    assert (found.is_ring, found.has_common_records) == (False, True)
    assert capsys.readouterr().err == ""


def test_job_whose_stages_share_weights_is_told_that_its_recoveries_are_global(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meet_with(tmp_path, TIED, breakpoints=True, upstream_log=True) is None
    assert "recoveries that run iterations again are global: all 2 stages share tied" in (
        capsys.readouterr().err
    )


def test_log_without_breakpoints_is_of_no_use_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meet_with(tmp_path, UNTIED, upstream_log=True) is None
    assert "without --moe-ft-breakpoints healthy stages lose their state" in capsys.readouterr().err


def test_global_recovery_is_chosen_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"breakpoints": True, "upstream_log": True, "recovery": "global"}
    assert meet_with(tmp_path, UNTIED, **settings) is None
    assert capsys.readouterr().err == ""


def test_local_recovery_that_can_never_be_refuses_the_start(tmp_path: Path) -> None:
    settings = {"breakpoints": True, "upstream_log": True, "recovery": "local"}
    with pytest.raises(ConfigError, match=r"--moe-ft-recovery=local .*tied.*recovery auto"):
        meet_with(tmp_path, TIED, **settings)
