"""The list of strategies: the only place outside a strategy's own folder that names it."""

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import ConfigPart, one_of
from moe_ft.config.strategy import NO_STRATEGY
from moe_ft.errors import ConfigError
from moe_ft.strategies.dense import DENSE
from moe_ft.strategies.interface import ModelFacts, StrategyKind
from moe_ft.strategies.partial.plan import PARTIAL
from moe_ft.strategies.selective.plan import SELECTIVE
from moe_ft.strategies.sparse.plan import SPARSE

_kinds: dict[str, StrategyKind] = {}


def register(kind: StrategyKind) -> None:
    """Add a strategy; afterwards --moe-ft-strategy offers it, and its options are flags."""
    assert kind.name not in (*_kinds, NO_STRATEGY), f"there is a strategy {kind.name} already"
    _kinds[kind.name] = kind


for _kind in (DENSE, PARTIAL, SPARSE, SELECTIVE):
    register(_kind)


def kinds() -> tuple[StrategyKind, ...]:
    """Return all strategies, in the order in which they were registered."""
    return tuple(_kinds.values())


def simplest() -> str:
    """Return the name of the strategy for jobs that name none, and want one: exact, without a setting."""
    return DENSE.name


def names() -> tuple[str, ...]:
    """Return the values of --moe-ft-strategy, the one for no strategy first."""
    return (NO_STRATEGY, *_kinds)


def option_types() -> dict[str, type[ConfigPart]]:
    """Return the type of the options of each strategy that has some, by name of the strategy."""
    return {kind.name: kind.options for kind in kinds() if kind.options is not None}


def kind_of(name: str) -> StrategyKind | None:
    """Return the strategy of a name, None for no strategy.

    Raises:
        ConfigError: if there is none of that name.
    """
    one_of("strategy", name, names())
    return _kinds.get(name)


def chosen(config: MoeFtConfig) -> StrategyKind:
    """Return the strategy of a job that has one."""
    return _kinds[config.strategy.strategy]


def check(config: MoeFtConfig, model: ModelFacts) -> None:
    """Check the settings against the chosen strategy, and the strategy against the model.

    Raises:
        ConfigError: names the flag, its value, the rule and the remedy.
    """
    kind = kind_of(config.strategy.strategy)
    is_adaptive = config.strategy.sharding == "adaptive"
    if is_adaptive and (kind is None or not kind.can_shard_adaptively(config)):
        able = " or ".join(each.adaptive_with for each in kinds() if each.adaptive_with)
        raise ConfigError(
            f"--moe-ft-sharding=adaptive needs {able}: with anything else it is not known in advance "
            "how many of the selected experts a rank will have. Use equal."
        )
    if kind is None:
        return
    if config.memory.upstream_log and not kind.is_exact:
        exact = " or ".join(each.name for each in kinds() if each.is_exact)
        raise ConfigError(
            f"--moe-ft-upstream-log cannot be used with --moe-ft-strategy={kind.name}: a stage can be "
            f"replayed alone only from exact state. Use {exact}, or leave it out."
        )
    if config.memory.sends_gradients and not kind.follows_gradients:
        able = " or ".join(each.name for each in kinds() if each.follows_gradients)
        raise ConfigError(
            f"--moe-ft-replicate=gradients cannot be used with --moe-ft-strategy={kind.name}: a gradient "
            "leads from a whole state to the next one, and its snapshots do not follow each other so. "
            f"Use {able}, or --moe-ft-replicate state."
        )
    if config.memory.parity_nodes is not None and not kind.fills_regions:
        able = " or ".join(each.name for each in kinds() if each.fills_regions)
        raise ConfigError(
            f"--moe-ft-replicas={config.memory.replicas} cannot be used with --moe-ft-strategy={kind.name}: "
            "its peers keep versions of experts of several iterations, of which no XOR is kept. "
            f"Use {able}, or --moe-ft-replicas copies."
        )
    if config.recovery.capacity_boost and kind.is_exact:
        lossy = " or ".join(each.name for each in kinds() if not each.is_exact)
        raise ConfigError(
            f"--moe-ft-capacity-boost={config.recovery.capacity_boost} cannot be used with "
            f"--moe-ft-strategy={kind.name}: its recoveries lose no tokens. Leave it out, "
            f"or use {lossy}."
        )
    if kind.is_exact:
        config.precision.check_is_exact(kind.name)
    kind.check(config, model)
