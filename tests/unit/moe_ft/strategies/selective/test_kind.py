"""The strategy selective in the registry: what it refuses, its memory, and what plan says of it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from moe_ft.config.config import MemoryConfig, RecoveryConfig
from moe_ft.errors import ConfigError
from moe_ft.strategies.interface import Counting, ModelFacts
from moe_ft.strategies.selective.plan import SELECTIVE, SelectivePlan
from moe_ft.strategies.selective.selection import SelectiveConfig
from tests.unit.moe_ft.planning.described import LARGE_OF_8, planned, planned_job, row
from tests.unit.moe_ft.strategies.stage import EXPERTS, OTHERS, build, config_of, facts_of


def test_experts_rotate_and_their_lost_tokens_are_counted() -> None:
    strategy = build(SELECTIVE)
    assert set(strategy.always) == set(OTHERS)
    assert strategy.rotation.units == set(EXPERTS)
    assert not SELECTIVE.is_exact and SELECTIVE.leaves_out_frozen
    assert SELECTIVE.counting(config_of(SELECTIVE)) is Counting.TOKENS


@pytest.mark.parametrize("flag", ["local_budget", "remote_budget"])
def test_budget_without_room_for_an_expert_is_refused_with_the_least_that_is_possible(
    flag: str,
) -> None:
    options: dict[str, Any] = {flag: "10199"}  # three units of 3000 bytes, and an expert of 1200
    message = f"--moe-ft-{flag.replace('_', '-')}=10199 must be at least 10200 bytes"
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(SELECTIVE, SelectiveConfig(**options))
    enough: dict[str, Any] = {flag: "10200"}
    build(SELECTIVE, SelectiveConfig(**enough))


@pytest.mark.parametrize("gradient_bytes", [4, 2])
def test_budget_for_peers_that_follow_needs_room_for_the_gradients_outside_experts(
    gradient_bytes: int,
) -> None:
    followed = replace(config_of(SELECTIVE), memory=MemoryConfig(replicate="gradients"))
    facts = replace(facts_of(), gradient_bytes=gradient_bytes)
    least = 9000 * gradient_bytes // 12 + 1200
    for budget, is_refused in ((f"{least - 1}", True), (f"{least}", False)):
        options = {"selective": SelectiveConfig(remote_budget=budget)}
        config = replace(followed, options=options)
        if not is_refused:
            assert SELECTIVE.build(config, facts).followable
            continue
        message = f"--moe-ft-remote-budget={budget} must be at least {least} bytes .* gradients of"
        with pytest.raises(ConfigError, match=message):
            SELECTIVE.build(config, facts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_budget": "0"}, "--moe-ft-local-budget=0 must be more than 0 bytes"),
        ({"remote_budget": "much"}, "--moe-ft-remote-budget=much must be a size in bytes"),
        ({"age_limit": 0}, "--moe-ft-age-limit=0 must be at least 1"),
        ({"selective_rule": "best"}, "--moe-ft-selective-rule=best"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SelectiveConfig(**options).validate(1)


def test_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-ft-strategy=selective needs a model with experts"):
        SELECTIVE.check(config_of(SELECTIVE), ModelFacts(num_experts=0))


def test_another_layout_is_refused() -> None:
    config = replace(config_of(SELECTIVE), recovery=RecoveryConfig(layout="any"))
    with pytest.raises(ConfigError, match="--moe-ft-layout=any is not supported with"):
        SELECTIVE.check(config, ModelFacts(num_experts=4))


def test_plan_says_what_fits_into_the_budget_and_what_a_failure_loses() -> None:
    # Of 12 bytes for 255.3e6 parameters that are no experts' and 1,611.6e6 that are, a rank has an eighth.
    always, experts = 255.3e6 * 12 / 8, 1611.6e6 * 12 / 8
    text = planned("selective", *LARGE_OF_8, "--moe-ft-local-budget", "1GB")
    assert "1,000.0 MB in memory, none at each peer" in text
    assert "snapshot: at most 1,000.0 MB of a rank, 35.7% of a full one" in text
    lost = (experts / (1e9 - always) - 1) / 2
    assert float(row(text, "memory or peers")[1]) == pytest.approx(lost, abs=0.02)


def test_memory_is_made_for_all_experts_where_the_budget_is_measured() -> None:
    flags = (*LARGE_OF_8, "--moe-ft-strategy", "selective")
    job = planned_job(*flags, iteration_s=1.0, bandwidth=1e9)
    options = (SelectiveConfig(), SelectiveConfig(local_budget="1GB"))
    measured, given = (SelectivePlan(job, each).footprint.share.pool_bytes for each in options)
    # Of 48 experts: each, its version at peers, and two for each in a snapshot, which are all or 12.
    assert pytest.approx(measured / given) == (4 * 48) / (2 * 48 + 2 * 12)


def test_plan_without_a_budget_and_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-ft-local-budget=auto needs --iteration-s"):
        planned("selective", *LARGE_OF_8)
