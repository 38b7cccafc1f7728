"""Exceptions raised by moe_ft, one line each, so a caller knows what to catch.

MoeFtError
+-- ConfigError             a flag combination that cannot work; raised before any GPU work (also a
|                           ValueError)
+-- InjectedFaultError      raised by --moe-ft-inject-fault exception:..., never by a real failure
"""


class MoeFtError(Exception):
    """Base of every exception that moe_ft raises on purpose."""


class ConfigError(MoeFtError, ValueError):
    """Flags that cannot work; the message names the flag, its value, the rule and the remedy."""


class InjectedFaultError(MoeFtError):
    """The exception that ``--moe-ft-inject-fault exception:RANK@ITERATION`` asks for."""
