"""The ranks meet: names, places and checks, on the only rank of a job whose model has no parameters."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.exchange import TEXT
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.errors import ConfigError, StorageAwayError
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.couplings import CouplingReport, SharedWeights, report_couplings
from moe_ft.planning.remains import PipelineLayout
from moe_ft.recovery.meet import Met, Ranks, join_ranks, meet, meet_pipelines
from tests.unit.moe_ft.recovery.meetings import (
    FINGERPRINT,
    config_of,
    facts_of,
    initialized,
    met_alone,
)
from tests.unit.moe_ft.together import run_together


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MOE_FT_NODE_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as opened:
        yield opened


def meet_alone(config: MoeFtConfig, opened: ExitStack) -> Met:
    optimizer: Any = SimpleNamespace(chained_optimizers=[])
    built: Any = ([], optimizer, None)
    return meet(config, facts_of(), built, lambda phase, iteration: None, opened)


@pytest.mark.parametrize("name", ["a/b", ".."])
def test_node_whose_name_cannot_be_a_directory_is_refused(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = config_of(tmp_path)
    config = replace(config, memory=replace(config.memory, node_id=None))
    monkeypatch.setenv("MOE_FT_NODE_ID", name)
    with pytest.raises(ConfigError, match="MOE_FT_NODE_ID"):
        meet_alone(config, opened)


def test_setting_for_replicas_is_named_where_one_node_is_why_there_are_none(
    tmp_path: Path, opened: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    meet_alone(replace(config, memory=replace(config.memory, streams=3)), opened)
    line = (
        "--moe-ft-replication-factor=auto is 0 on one node: --moe-ft-streams=3 changes nothing with"
    )
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("node", ["gpu-1", "gpu-2"])
def test_rank_knows_the_failure_domain_of_each_node_or_the_job_is_refused(
    tmp_path: Path, opened: ExitStack, node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "racks").write_text("gpu-1 rack-a\n")
    config = config_of(tmp_path)
    memory = replace(config.memory, node_id=node, failure_domain=str(tmp_path / "racks"))
    config = replace(config, memory=memory)
    if node == "gpu-2":
        with pytest.raises(ConfigError, match=r"failure-domain=.*racks .* know gpu-2 \(1 of 1\)"):
            meet_alone(config, opened)
        return
    assert meet_alone(config, opened).site.topology.domains == ("rack-a",)
    said = capsys.readouterr().err
    assert "moe_ft: 1 node in 1 failure domain: no replicas; memory survives the loss of" in said


def test_cuts_of_the_state_are_a_setting_that_it_depends_on(
    tmp_path: Path, opened: ExitStack
) -> None:
    fingerprint = meet_alone(config_of(tmp_path), opened).fingerprint
    (added,) = set(fingerprint) - set(FINGERPRINT)
    assert added.startswith("cuts of the state")
    assert {name: fingerprint[name] for name in FINGERPRINT} == FINGERPRINT


def test_server_answers_those_who_know_the_secret_until_the_start_is_closed(
    tmp_path: Path, opened: ExitStack
) -> None:
    met = meet_alone(config_of(tmp_path), opened)
    met.site.node_dir.mkdir(parents=True, mode=0o700)
    (met.site.node_dir / "file").write_bytes(b"content")
    (met.site.node_dir / "file").chmod(0o600)
    address = met.site.topology.ranks[0].address
    assert address is not None
    connection = PeerConnection(address, met.token)
    assert bytes(connection.get("file")) == b"content"
    connection.close()
    opened.close()
    with pytest.raises(OSError):  # noqa: PT011  # refused or reset
        PeerConnection(address, met.token).get("file")


def test_more_replicas_than_other_nodes_are_refused_with_flag_and_remedy(
    tmp_path: Path, opened: ExitStack
) -> None:
    with pytest.raises(ConfigError, match=r"--moe-ft-replication-factor=1: .*start more nodes"):
        meet_alone(config_of(tmp_path, replication_factor="1"), opened)


def test_parity_needs_other_nodes(tmp_path: Path, opened: ExitStack) -> None:
    with pytest.raises(
        ConfigError, match=r"--moe-ft-replicas=parity:3: .* the job has 1\. .* copies"
    ):
        meet_alone(config_of(tmp_path, replicas="parity:3"), opened)


NUM_RANKS = 3
Gather = Callable[[Any, Any], list[Any]]


class _Threads(Agreement):
    """Agreement among ranks that are threads."""

    def __init__(self, gather: Gather) -> None:
        super().__init__(1.0)
        self._gather = gather

    def gather(self, value: Any, decoder: Any) -> list[Any]:
        return self._gather(value, decoder)


def check_on_all(check: Callable[[int], str]) -> list[str]:
    """Return what each rank gets of a check: its answer, or the message of a refusal."""

    def run(rank: int, gather: Gather) -> str:
        ranks = Ranks(everyone=_Threads(gather), stage=StageSum(1.0))
        try:
            return ranks.check_together(lambda: check(rank))
        except ConfigError as error:
            return f"refused: {error}"

    return run_together(NUM_RANKS, run)


def test_check_that_fails_on_one_rank_is_refused_by_all_with_its_message() -> None:
    def check(rank: int) -> str:
        if rank == 1:
            raise ConfigError("--flag=1 is wrong")
        return "answer"

    assert check_on_all(check) == ["refused: --flag=1 is wrong"] * NUM_RANKS


def test_check_that_fails_for_storage_on_one_rank_is_refused_as_such_by_all() -> None:
    def run(rank: int, gather: Gather) -> None:
        def check() -> None:
            if rank == 2:
                raise StorageAwayError("full")

        with pytest.raises(StorageAwayError, match="full"):
            Ranks(everyone=_Threads(gather), stage=StageSum(1.0)).check_together(check)

    run_together(NUM_RANKS, run)


def test_only_rank_of_a_job_exchanges_values_with_itself_until_the_groups_are_closed() -> None:
    with ExitStack() as opened:
        ranks = join_ranks(facts_of(), opened)
        ranks.stage.start([0], 0)
        assert ranks.everyone.gather("value", TEXT) == ["value"]
        assert ranks.stage.gather("value", TEXT) == ["value"]
        assert ranks.check_together(lambda: 7) == 7
    for group in (ranks.everyone, ranks.stage):
        with pytest.raises(AssertionError):
            group.gather("value", TEXT)


TRAFFIC = PipelineTraffic(
    num_stages=3, num_chunks=1, num_microbatches=1, shape=(1, 1, 1), element_bytes=2
)
UNTIED = SharedWeights(num_stages=3, is_tied=False)
TIED = SharedWeights(num_stages=2, is_tied=True)


def meet_with(
    tmp_path: Path, weights: SharedWeights | None, **settings: Any
) -> PipelineLayout | None:
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


def test_local_recovery_that_can_never_be_refuses_the_start(tmp_path: Path) -> None:
    settings = {"breakpoints": True, "upstream_log": True, "recovery": "local"}
    with pytest.raises(ConfigError, match=r"--moe-ft-recovery=local .*tied.*recovery auto"):
        meet_with(tmp_path, TIED, **settings)
