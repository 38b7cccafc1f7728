"""Settings of the objects that Megatron has built are compared and checked like those of a command line."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.fault_tolerance.custom_loop import checked_config, checked_groups
from megatron.fault_tolerance.seams.flag_classes import settings_of
from moe_ft.config.flag_table import Kind
from moe_ft.errors import ConfigError

MEGATRON = Namespace(
    num_experts=4,
    num_layers=2,
    hidden_dropout=0.1,
    pipeline_dtype="bf16",
    window_size=(4, 0),
    optimizer="adam",
    cuda_graph_impl="none",
    optimizer_cpu_offload=False,
    main_params_dtype="fp32",
    exp_avg_dtype="fp32",
    exp_avg_sq_dtype="fp32",
    use_precision_aware_optimizer=False,
    bf16=True,
)
JOB = {"strategy": "dense", "job_id": "test"}


def check(megatron: Namespace = MEGATRON, **settings: Any) -> Any:
    return checked_config({**JOB, **settings}, megatron, 2, 100)


def changed(**changes: Any) -> Namespace:
    return Namespace(**{**vars(MEGATRON), **changes})


def test_settings_reach_their_fields() -> None:
    graphs = changed(cuda_graph_impl="local")
    config = check(graphs, interval=5, persist_dir="/x", allow_untested="cuda-graphs")
    assert config.strategy.interval == "5"
    assert config.memory.job_id == "test"
    assert config.storage.persist_dir == "/x"


def test_settings_are_divided_by_what_depends_on_them() -> None:
    state, replay = (settings_of(MEGATRON, kind) for kind in (Kind.FINGERPRINT, Kind.REPLAY))
    assert state["--num-layers"] == 2
    assert state["--window-size"] == [4, 0]
    assert replay["--hidden-dropout"] == 0.1
    assert not state.keys() & replay.keys()
    assert "--pipeline-dtype" not in state | replay


@pytest.mark.parametrize(
    ("megatron", "settings", "message"),
    [
        (
            changed(optimizer_cpu_offload=True),
            {"state_dtype": "exp_avg=bf16", "allow_lossy": True},
            "--moe-ft-state-dtype=exp_avg=bf16: with --optimizer-cpu-offload the state lies in memory",
        ),
        (
            changed(offload_optimizer_states=True, exp_avg_dtype="fp8"),
            {},
            "--offload-optimizer-states with FP8 moments or another optimizer is not supported",
        ),
        (
            changed(cuda_graph_impl="local"),
            {"strategy": "partial"},
            "--cuda-graph-impl=local is not supported with --moe-ft-strategy=partial: none has been",
        ),
        (
            changed(cuda_graph_impl="local"),
            {"allow_untested": "megatron"},
            "--cuda-graph-impl=local is not supported with --moe-ft-strategy=dense: none has been",
        ),
        (
            changed(exp_avg_dtype="bf16"),
            {"strategy": "partial", "state_dtype": "exp_avg=bf16"},
            "the optimizer itself keeps exp_avg in bf16",
        ),
        (MEGATRON, {"inject_fault": ["kill:7@1"]}, "rank 7 must be less than the world size 2"),
        (
            MEGATRON,
            {"strategy": "partial", "k_snapshot": 5},
            "--moe-ft-k-snapshot=5 must be",
        ),
        (changed(num_experts=0), {"strategy": "partial"}, "--moe-ft-strategy=partial"),
        (
            MEGATRON,
            {"upstream_log": True},
            "--moe-ft-upstream-log needs Megatron's own training loop",
        ),
        (
            MEGATRON,
            {"strategy": "dense", "repair": "auto"},
            "--moe-ft-repair=auto needs Megatron's own training loop",
        ),
        (
            MEGATRON,
            {"strategy": "dense", "layout": "any", "elastic": True},
            "--moe-ft-elastic needs Megatron's own training loop",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    megatron: Namespace, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(megatron, **settings)


def test_event_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--moe-ft-event-log=.*file cannot be written"):
        check(event_log=str(tmp_path / "file"))


def test_groups_that_are_given_are_used() -> None:
    names = ("dp", "dp_cp", "expt_dp", "tp", "expt_tp", "ep", "pp")
    groups = Namespace(**dict.fromkeys(names, "a group"))
    assert checked_groups(groups) is groups


def test_groups_that_are_missing_are_named() -> None:
    groups = Namespace(dp="a group", dp_cp="a group", tp="a group", ep=None, pp="a group")
    with pytest.raises(ConfigError, match="groups= lacks expt_dp, expt_tp, ep: state is divided"):
        checked_groups(groups)


def test_loop_that_has_made_no_groups_is_told_to_make_them() -> None:
    with pytest.raises(ConfigError, match="there are none. Call megatron.core.parallel_state.init"):
        checked_groups(None)
