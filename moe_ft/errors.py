"""Exceptions raised by moe_ft, one line each, so a caller knows what to catch.

MoeFtError
+-- ConfigError             a flag combination that cannot work; raised before any GPU work (also a
|                           ValueError)
+-- PlanError               no valid plan exists for this topology and state (also a ValueError)
+-- SnapshotError           a copy to host memory failed, or a region was used out of turn
+-- PinError                CUDA cannot register host memory: copies to it would hold training up
+-- CorruptStateError       a checksum, size, index or manifest does not match (also an OSError)
|   +-- FormatVersionError  the file is of another version of moe_ft: intact, and not readable here
+-- UnsafePathError         another user owns a file or directory, or could replace it (also an OSError)
|   +-- ForeignPathError    the first of the two
+-- UnmadeDirectoryError    a directory can never be made where its name says (also an OSError)
+-- LockLostError           another job has taken the persist directory over (also an OSError)
+-- UnrecoverableError      nothing usable to recover from; the message lists what was examined
|   +-- BusyError           not now, or not on this node: start the job again, later or elsewhere
|       +-- StorageAwayError  as long as storage does not answer or is full
+-- RepairError             a repair in place was given up: the launcher restarts the job
|   +-- ReplacedError       another node has this rank now: its old process must end
+-- JobStoreError           the job's store does not answer: its node is lost or cut off (also a RuntimeError)
+-- ExchangeError           a message of a rank is not of the agreed type (also a RuntimeError)
+-- RejectedResultError     Megatron has rejected a loss or gradients: NaN, infinity or a spike
+-- CorruptionError         a check has found that a rank computes or holds other bits than it must (also a
|                           RuntimeError)
+-- LinksEndedError         the links of this rank's process groups have ended, and the result with them
|                           (also a RuntimeError)
+-- CallOrderError          a call of Checkpointer that is not allowed where the loop is (also a RuntimeError)
+-- DegradedError           a background part failed under --moe-ft-on-error=raise
+-- InjectedFaultError      raised by --moe-ft-inject-fault exception:..., never by a real failure
"""


class MoeFtError(Exception):
    """Base of every exception that moe_ft raises on purpose."""


class ConfigError(MoeFtError, ValueError):
    """Flags that cannot work; the message names the flag, its value, the rule and the remedy."""


class PlanError(MoeFtError, ValueError):
    """No valid plan exists for the given state and topology."""


class SnapshotError(MoeFtError):
    """A snapshot failed, or memory that must be kept would be overwritten."""


class PinError(MoeFtError):
    """CUDA refuses to register host memory, so that no GPU can copy into it directly."""


class CorruptStateError(MoeFtError, OSError):
    """Bytes that were read are not the bytes that were written."""


class FormatVersionError(CorruptStateError):
    """A file has a format that this version does not read."""


class UnsafePathError(MoeFtError, OSError):
    """A file or directory that must be ours belongs to another user, or others can change it."""


class ForeignPathError(UnsafePathError):
    """A file or directory belongs to another user."""


class UnmadeDirectoryError(MoeFtError, OSError):
    """A directory cannot be made where its name says, and a later start could not make it either."""


class LockLostError(MoeFtError, OSError):
    """Another job has taken over the persist directory, so this one must not write to it."""


class UnrecoverableError(MoeFtError):
    """No complete state was found; the message lists what was examined and why it was rejected."""


class BusyError(UnrecoverableError):
    """Something that a start needs is taken, and will not be later or on another node."""


class StorageAwayError(BusyError):
    """Storage that a start needs does not answer or is full; the same start may succeed later."""


class RepairError(MoeFtError):
    """A repair in place cannot be made; the process ends, and the launcher restarts the job."""


class ReplacedError(RepairError):
    """Another node has this rank now: this process must not take part in anything any more."""


class RejectedResultError(MoeFtError):
    """Megatron's checks have rejected a loss or gradients, and training ends."""


class CorruptionError(MoeFtError, RuntimeError):
    """A rank computes or holds other bits than it must: its results must not be used.

    A RuntimeError, so that a rank that raises it looks whether another one is replaced for it.

    Attributes:
        ranks: that have other bits, or may have.
        sound: the latest iteration whose state surely lacks the damage; None if that of the last one does, or
            nobody knows.
    """

    def __init__(self, text: str, ranks: tuple[int, ...] = (), sound: int | None = None) -> None:
        super().__init__(text)
        self.ranks = ranks
        self.sound = sound


class LinksEndedError(MoeFtError, RuntimeError):
    """The links of this rank's process groups have ended: what it has computed since does not count."""


class JobStoreError(MoeFtError, RuntimeError):
    """The job's store does not answer, as a store of torch says it: with a RuntimeError."""


class ExchangeError(MoeFtError, RuntimeError):
    """A message of another rank is not of the agreed type: it may be from another process."""


class CallOrderError(MoeFtError, RuntimeError):
    """A training loop has called its Checkpointer out of turn; the message names the call and the rule."""


class DegradedError(MoeFtError):
    """A background part failed and the user asked for that to end training."""


class InjectedFaultError(MoeFtError):
    """Raised by an injected fault of kind exception, on the thread that enters the fault's phase."""
