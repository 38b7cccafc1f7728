"""Exceptions raised by moe_ft, one line each, so a caller knows what to catch.

MoeFtError
+-- ConfigError             a flag combination that cannot work; raised before any GPU work (also a
|                           ValueError)
+-- PlanError               no valid plan exists for this topology and state (also a ValueError)
+-- SnapshotError           a copy to host memory failed, or a region was used out of turn
+-- CorruptStateError       a checksum, size, index or manifest does not match (also an OSError)
+-- UnrecoverableError      nothing usable to recover from; the message says what was looked at
+-- DegradedError           a background part failed under --moe-ft-on-error=raise
+-- InjectedFaultError      raised by --moe-ft-inject-fault exception:..., never by a real failure
"""


class MoeFtError(Exception):
    """Base of every exception that moe_ft raises on purpose."""


class ConfigError(MoeFtError, ValueError):
    """Flags that cannot work; the message names the flag, its value, the rule and the remedy."""


class PlanError(MoeFtError, ValueError):
    """No valid plan exists for what was given."""


class SnapshotError(MoeFtError):
    """A snapshot failed, or a region was asked for a step that its role does not allow."""


class CorruptStateError(MoeFtError, OSError):
    """Bytes that were read are not the bytes that were written."""


class UnrecoverableError(MoeFtError):
    """No complete state was found; the message says what was looked at and why it was rejected."""


class DegradedError(MoeFtError):
    """A background part failed and the user asked for that to end training."""


class InjectedFaultError(MoeFtError):
    """Raised on the training thread by an injected fault of kind exception."""
