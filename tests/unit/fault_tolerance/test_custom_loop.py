"""A custom loop is where it says that it is, or where a recovery has put it; its facts are checked."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.custom_loop import (
    CustomLoop,
    Position,
    RunFacts,
    checked_config,
    checked_groups,
    copy_of_json,
)
from megatron.fault_tolerance.seams.flag_classes import settings_of
from moe_ft.config.flag_table import Kind
from moe_ft.errors import ConfigError
from moe_ft.loop.training_loop import LoopParts
from tests.unit.moe_ft.builders import make_record

MODEL = Namespace(
    num_experts=4, moe_router_topk=2, num_layers=2, hidden_dropout=0.1, deterministic_mode=False
)


class _Group:
    """A process group: this rank's place in it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


ONE = _Group(0, 1)
GROUPS = Namespace(
    pp=ONE, tp=ONE, expt_tp=ONE, expt_dp=ONE, dp=_Group(1, 2), dp_cp=_Group(1, 2), ep=_Group(1, 2)
)


def facts(**changes: Any) -> RunFacts:
    numbers = {"train_iterations": 10, "samples_per_iteration": 8, "sequence_length": 32}
    return RunFacts(**{"settings": {"seed": 1}, **numbers, "iteration": 3, **changes})


def loop_of(**changes: Any) -> CustomLoop:
    return CustomLoop(facts(**changes), MODEL, GROUPS)


def test_loop_begins_where_it_says() -> None:
    loop = loop_of(consumed_samples=24, began_with="--finetune /old")
    assert (loop.first_iteration, loop.train_iterations) == (3, 10)
    assert loop.position == Position(iteration=3, consumed_samples=24)
    assert loop.began_with() == "--finetune /old"


def test_counters_of_a_state_are_those_that_the_loop_gave() -> None:
    loop = loop_of()
    state = {"epoch": 1}
    loop.end_iteration(Position(iteration=4, consumed_samples=32, state=state), 2)
    counters = loop.counters(8)
    assert (counters.consumed_train_samples, counters.num_microbatches) == (32, 2)
    assert counters.loop_state == state
    assert loop.sample_counters(0) == {"consumed_train_samples": 32}


def test_recovered_loop_is_at_the_position_of_its_record() -> None:
    loop = loop_of()
    loop.resume(make_record(5))
    position = loop.position
    assert (position.iteration, position.consumed_samples, position.is_recovered) == (5, 40, True)
    assert position.state == make_record(5).loop_state
    assert loop.first_iteration == 5
    assert loop.counters(0).num_microbatches == make_record(5).num_microbatches


def test_replay_gets_the_position_before_the_iteration_and_its_micro_batches() -> None:
    calls: list[tuple[Position, int]] = []
    parts = LoopParts(
        model=[],
        optimizer=None,
        config=None,
        forward_backward=lambda position, number: calls.append((position, number)),
    )
    before, after = make_record(5), msgspec.structs.replace(make_record(6), num_microbatches=3)
    loop_of().run_forward_backward(parts, before, after)
    ((position, num_microbatches),) = calls
    assert (position.iteration, position.consumed_samples, num_microbatches) == (5, 40, 3)
    assert position.state == before.loop_state


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be rank 1 of two."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def test_facts_of_the_job_hold_the_settings_of_model_and_loop(world: None) -> None:
    facts = loop_of(replay_settings={"micro_batch": 2}).job_facts("")
    expected = {"--num-layers": 2, "--num-experts": 4, "seed": 1, "sequence_length": 32}
    assert expected.items() <= facts.fingerprint.items()
    assert {"--hidden-dropout": 0.1, "micro_batch": 2}.items() <= facts.replay_settings.items()
    assert (facts.rank, facts.world_size, facts.stage, facts.iteration) == (1, 2, 0, 3)
    places = facts.places
    found = [(each.rank, each.size) for each in (places.dp, places.expt_dp, places.tp)]
    assert (found, places.expt_tp.rank) == ([(1, 2), (0, 1), (0, 1)], 0)
    assert facts.timeout_s == 600
    experts = facts.experts
    assert (experts.num_experts, experts.ep_rank, experts.ep_size) == (4, 1, 2)
    assert experts.planned_tokens == 10 * 8 * 32 * 2
    assert experts.tokens_per_iteration == 8 * 32 * 2


@pytest.mark.parametrize(
    ("given", "by_model", "expected"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_replay_is_exact_if_the_loop_or_else_its_model_says_so(
    given: bool | None,
    by_model: bool,
    expected: bool,
    world: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_device, "_installed", False)
    monkeypatch.setattr(MODEL, "deterministic_mode", by_model)
    assert loop_of(is_deterministic=given).job_facts("").is_deterministic is expected


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("train_iterations", 0, 1),
        ("samples_per_iteration", 1.5, 1),
        ("sequence_length", True, 1),
        ("iteration", -1, 0),
        ("consumed_samples", None, 0),
    ],
)
def test_number_out_of_its_range_is_refused(name: str, value: Any, least: int) -> None:
    with pytest.raises(ConfigError, match=f"RunFacts.{name}={value} must be .* at least {least}"):
        facts(**{name: value}).check()


@pytest.mark.parametrize("name", ["settings", "replay_settings"])
def test_settings_that_no_file_can_hold_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"RunFacts.{name} cannot be kept as JSON: Object of"):
        facts(**{name: {"data": {1, 2}}}).check()


def test_copy_shares_nothing_with_the_original() -> None:
    values: dict[str, Any] = {"epoch": 1, "shards": ["a", None, True], "rates": {"x": 0.5}}
    copied = copy_of_json("state", values)
    assert copied == values
    values["shards"].append("b")
    assert copied["shards"] == ["a", None, True]


@pytest.mark.parametrize("values", [{"tuple": (1, 2)}, {1: "a"}])
def test_values_that_would_change_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="state would not come back from JSON as it is. Use"):
        copy_of_json("state", values)


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_values_that_json_lacks_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="state cannot be kept as JSON: "):
        copy_of_json("state", {"value": value})


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
