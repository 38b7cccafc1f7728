"""The registry: the list of strategies, and what each of them asks of settings and model."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig
from moe_ft.config.fields import ConfigPart
from moe_ft.config.strategy import PrecisionConfig, StrategyConfig
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts, RankFacts, Strategy, StrategyKind
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.strategies.sparse.strategy import SparseConfig

MODEL = ModelFacts(num_experts=8, num_iterations=10)


def config_of(name: str, options: ConfigPart | None = None, **strategy: Any) -> MoeFtConfig:
    return MoeFtConfig(
        strategy=StrategyConfig(strategy=name, **strategy),
        options={} if options is None else {name: options},
    )


def test_name_that_no_strategy_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="--moe-ft-strategy=hope must be one of none, dense, pa"):
        registry.check(config_of("hope"), MODEL)


def test_no_strategy_asks_for_anything_by_default() -> None:
    for name in registry.names():
        registry.check(config_of(name), MODEL)


@pytest.mark.parametrize(
    "config",
    [
        config_of("none", sharding="adaptive"),
        config_of("dense", sharding="adaptive"),
        config_of("sparse", sharding="adaptive"),
        config_of("partial", PartialConfig(selection="load-aware"), sharding="adaptive"),
    ],
)
def test_adaptive_sharding_without_a_selection_that_is_known_is_refused(
    config: MoeFtConfig,
) -> None:
    needs = "--moe-ft-strategy partial and --moe-ft-selection sequential"
    with pytest.raises(ConfigError, match=f"--moe-ft-sharding=adaptive needs {needs}.*Use equal"):
        registry.check(config, MODEL)


@pytest.mark.parametrize(
    "config",
    [
        config_of("partial", sharding="adaptive"),
        config_of("dense", sharding="none"),
        config_of("dense", interval="10"),
        config_of("partial", PartialConfig(k_snapshot="8", k_persist=8)),
        config_of("sparse", SparseConfig(window="10")),
    ],
)
def test_settings_that_go_together_are_accepted(config: MoeFtConfig) -> None:
    registry.check(config, MODEL)


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (
            config_of("partial"),
            ModelFacts(num_experts=0),
            "--moe-ft-strategy=partial needs a model with experts.*Use dense",
        ),
        (
            config_of("partial", PartialConfig(k_snapshot="9")),
            MODEL,
            "--moe-ft-k-snapshot=9 must be at most --num-experts=8. Lower it",
        ),
        (
            config_of("partial", PartialConfig(k_persist=9)),
            MODEL,
            "--moe-ft-k-persist=9 must be at most --num-experts=8. Lower it",
        ),
        (
            replace(config_of("partial"), memory=MemoryConfig(upstream_log=True)),
            MODEL,
            "--moe-ft-upstream-log cannot be used with --moe-ft-strategy=partial: .* Use dense or sparse",
        ),
        (
            replace(config_of("sparse"), memory=MemoryConfig(replicate="gradients")),
            MODEL,
            "--moe-ft-replicate=gradients cannot be used with --moe-ft-strategy=sparse: .* Use dense or par",
        ),
        (
            replace(
                config_of("partial", PartialConfig(master_always_full=True)),
                memory=MemoryConfig(replicate="gradients"),
            ),
            MODEL,
            "--moe-ft-replicate=gradients cannot be used with --moe-ft-master-always-full: .*Leave one",
        ),
        (
            replace(config_of("dense"), recovery=RecoveryConfig(capacity_boost=0.1)),
            MODEL,
            "--moe-ft-capacity-boost=0.1 cannot be used with --moe-ft-strategy=dense: .*or use partial",
        ),
        (
            config_of("sparse", SparseConfig(window="11")),
            MODEL,
            "--moe-ft-window=11 must be at most --train-iters=10: .* Lower it, or use auto",
        ),
        *(
            (
                config_of("sparse", interval=interval),
                MODEL,
                f"--moe-ft-interval={interval} must be 1 with --moe-ft-strategy sparse.*Leave it",
            )
            for interval in ("2", "10", "auto")
        ),
    ],
)
def test_strategy_refuses_settings_and_models_that_it_cannot_work_with(
    config: MoeFtConfig, model: ModelFacts, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.check(config, model)


def test_length_of_training_is_not_checked_before_it_is_known() -> None:
    config = config_of("sparse", SparseConfig(window="11"))
    registry.check(config, ModelFacts(num_experts=8, num_iterations=None))


def precise(name: str, state_dtype: str, *, allow_lossy: bool = False) -> MoeFtConfig:
    return MoeFtConfig(
        strategy=StrategyConfig(strategy=name),
        precision=PrecisionConfig(state_dtype=state_dtype, allow_lossy=allow_lossy),
    )


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_exact_strategies_refuse_lossy_formats_unless_they_are_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"loses precision, and --moe-ft-strategy={name} promis"):
        registry.check(precise(name, "exp_avg=bf16"), MODEL)
    registry.check(precise(name, "exp_avg=bf16", allow_lossy=True), MODEL)


@pytest.mark.parametrize("name", ["none", "partial"])
def test_strategies_that_promise_nothing_take_lossy_formats(name: str) -> None:
    registry.check(precise(name, "master=bf16,exp_avg_sq=fp8-e5m2"), MODEL)


@pytest.mark.parametrize("state_dtype", ["master=split", "exp_avg=exact"])
def test_no_strategy_refuses_formats_that_lose_nothing(state_dtype: str) -> None:
    for name in registry.names():
        registry.check(precise(name, state_dtype), MODEL)


def test_strategy_without_a_plan_says_so() -> None:
    class Silent(StrategyKind):
        def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
            raise NotImplementedError

    with pytest.raises(
        ConfigError, match="--moe-ft-strategy=silent cannot be planned.*Name another"
    ):
        Silent(name="silent").plan(None)  # type: ignore[arg-type]


# Nothing else knows a strategy by name

ROOT = Path(__file__).resolve().parents[4]
# The names are words, too. Command lines of help are to be pasted.
# The flag --moe-ft-persist-dense-interval has its name from what others call such a checkpoint.
ORDINARY = re.compile(
    r"--moe-ft-strategy dense|sparse-to-dense|dense[-_]interval|persists_dense|partial_activation|"
    r"dense[ _](FFN|MLP|data-parallel)|sparse attention",
    re.I,
)


def product_files() -> list[Path]:
    found = [path for top in ("moe_ft", "megatron") for path in (ROOT / top).rglob("*.py")]
    apart = (
        "moe_ft/strategies",
        "moe_ft/config/flag_table.py",  # flags of Megatron
        "megatron/fault_tolerance/bridge/fields.py",  # fields of Megatron-Bridge
        "moe_ft/convert/huggingface",  # layers without experts are dense there
        "moe_ft/commands/model_config.py",  # and here
    )
    return [
        *(path for path in found if not any(path.is_relative_to(ROOT / each) for each in apart)),
        ROOT / "pretrain_gpt_moe.py",
    ]


def words_in(path: Path) -> Iterator[str]:
    """Yield all that a file names or says: identifiers, imported modules, strings, docstrings, comments."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        for field in ("name", "id", "attr", "arg", "asname", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name != "partial":  # functools.partial
                yield re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_no_file_outside_of_the_strategies_knows_one_by_name() -> None:
    names = "|".join(kind.name for kind in registry.kinds())
    named = re.compile(rf"(?<![a-z])({names})(?![a-z])", re.I)
    found = [
        f"{path.relative_to(ROOT)}: {words}"
        for path in product_files()
        for words in words_in(path)
        if named.search(ORDINARY.sub("", words))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (config_of("dense"), 1),
        (config_of("sparse", SparseConfig(window="3")), 3),
        (config_of("sparse", SparseConfig(max_window=6)), 6),
    ],
)
def test_longest_window_is_that_for_which_memory_is_reserved(
    config: MoeFtConfig, longest: int
) -> None:
    assert registry.chosen(config).longest_window(config) == longest
