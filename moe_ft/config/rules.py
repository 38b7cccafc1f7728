"""Rules on settings: when one is broken, and the message with the reason and the remedy.

Rooms hold tuples of them. Choices and ranges of single values are with the fields, see fields.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moe_ft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that settings break by a flag, by some values of it, or by flags together.

    Its message reads `FLAG=VALUE PROBLEM: REASON. REMEDY.`

    Attributes:
        dest: the attribute of the settings with the value that the message shows; empty if it shows none.
        flag: as messages name it; one with a space says the value itself.
        remedy: {others} stands for the strategies with which the rule does not hold.
        strategies: says of a `StrategyKind` whether the rule holds with it; None for always, also without
            a strategy.
    """

    dest: str
    flag: str
    is_broken: Callable[[Any], bool]
    reason: str = ""
    remedy: str = "Leave it out"
    strategies: Callable[[Any], bool] | None = None
    problem: str = "is not supported"

    def given(self, settings: Any) -> str:
        """Return the flag with its value."""
        value = getattr(settings, self.dest, None)
        if not self.dest or " " in self.flag or isinstance(value, bool):
            return self.flag
        return f"{self.flag}={' '.join(map(str, value)) if isinstance(value, list) else value}"

    def message(self, settings: Any) -> str:
        """Return what is wrong with the settings, and what helps."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.given(settings)} {self.problem}{reason}. {self.remedy}."


def check_rules(rules: Iterable[Rule], settings: Any) -> None:
    """Raise ConfigError on the first rule that the settings break."""
    for rule in rules:
        if rule.is_broken(settings):
            raise ConfigError(rule.message(settings))
