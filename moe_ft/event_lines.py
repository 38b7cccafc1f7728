"""Lines of an event log as frozen values, and what each one shows: one description for all that reads logs.

A class has the name of its event, as in docs/events.md, in another spelling. Fields that no reader needs are
not decoded. `mark`, `shows`, `counted_by` and `ended` say what of an event `report`, its page and its trace,
`watch` and metrics show: the fold (moe_ft/loop/event_fold.py) marks and counts by them. moe_ft/events.py
writes and finds lines.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Union, override

import msgspec

from moe_ft.events import MAX_COUNT

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Int = Annotated[
    int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)
]  # greater ones have no place in a float
Tokens = dict[str, list[Int]]  # by MoE layer, [expert]
_SILENT = "fell silent: running, killed or hung"


class Mark(StrEnum):
    """Moments that are marked on a timeline, the first ones above the others."""

    FAULT = "fault"
    REPAIR = "repair"
    RECOVERY = "recovery"
    TROUBLE = "trouble"


class SnapshotTier(StrEnum):
    """Places that a checkpoint's bytes go to."""

    MEMORY = "memory"
    PEERS = "peers"
    STORAGE = "storage"


def _event_name(name: str) -> str:
    return re.sub(r"\B([A-Z])", r"_\1", name.removesuffix("Line")).lower()


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event", tag=_event_name):
    """Fields of every event.

    Attributes:
        mark: where events of this kind are shown and counted; None where they only change sums.
        shows: what the mark says, after the name of the rank.
        counted_by: field that divides the count.
        ended: how a rank ended of which this is the last event.
    """

    mark: ClassVar[Mark | None] = None
    shows: ClassVar[str] = ""
    counted_by: ClassVar[str] = ""
    ended: ClassVar[str] = _SILENT

    time: Annotated[float, msgspec.Meta(ge=0, le=2**37)]  # that has a date
    incarnation: Count
    iteration: Count

    @property
    def text(self) -> str:
        """Return what its mark says."""
        return self.shows.format(self)

    @property
    def label(self) -> str:
        """Kind of an event among those that are counted with it."""
        return str(getattr(self, self.counted_by)) if self.counted_by else ""

    def ending(self, most: int | None = None) -> str:
        """Return how a rank ended of which this is the last event, with so many letters of its reason."""
        return self.ended.format(self)


class OtherLine(Line, frozen=True, kw_only=True, tag=False):
    """Event of another kind."""

    event: str


class StartLine(Line, frozen=True, kw_only=True):
    """Beginning of an incarnation."""

    pid: Count = 0
    host: str = ""
    job: str = ""
    strategy: str = ""
    moe_ft: str = ""
    torch: str = ""
    megatron: str = ""
    world_size: Count = 0
    tp: Count = 0
    pp: Count = 0
    ep: Count = 0
    etp: Count = 0
    dp: Count = 0
    num_layers: Int | None = None
    hidden_size: Int | None = None
    num_experts: Int | None = None
    seq_length: Int | None = None
    train_iterations: Int | None = None


class ProtectsLine(Line, frozen=True, kw_only=True):
    """Protection of a run from its start on; `lost_rank` is what follows a death: repair, restart or end."""

    lost_rank: str = ""


class IterationLine(Line, frozen=True, kw_only=True, gc=False):
    """Iteration that is complete."""

    iteration_s: float
    num_tokens: float
    idle_s: float | None = None
    exchange_s: float | None = None
    stage: Count = 0
    stall_s: float = 0.0
    loss: float | Literal["nan", "inf", "-inf"] | None = None
    resident_bytes: Int | None = None
    device_bytes: Int | None = None
    phases_s: dict[str, float] | None = None

    @property
    def own_s(self) -> float | None:
        """Time of the rank itself, without what it waited for others and was in collectives."""
        if self.idle_s is None or self.exchange_s is None:
            return None
        return max(0.0, self.iteration_s - self.idle_s - self.exchange_s)


class RouterLoadLine(Line, frozen=True, kw_only=True):
    """Tokens that a rank sent to each expert."""

    tokens: Tokens


class _Moved(Line, frozen=True, kw_only=True, gc=False):
    """Bytes that a part of checkpointing has moved to a tier, and how long that took until `time`."""

    tier: ClassVar[SnapshotTier]

    bytes: Int
    seconds: float

    @property
    def moved_bytes(self) -> int:
        """Bytes in all."""
        return self.bytes


class SnapshotLine(_Moved, frozen=True, kw_only=True):
    """Snapshot in host memory."""

    tier = SnapshotTier.MEMORY

    experts: Tokens = {}


class ReplicateLine(_Moved, frozen=True, kw_only=True):
    """Snapshot that peers have."""

    tier = SnapshotTier.PEERS

    peers: tuple[Int, ...] = ()
    state_bytes: Int | None = None
    gradient_bytes: Int = 0

    @property
    @override
    def moved_bytes(self) -> int:
        if self.state_bytes is None:  # earlier versions told only the most that one peer got
            return self.bytes * len(self.peers)
        return self.state_bytes + self.gradient_bytes


class PersistLine(_Moved, frozen=True, kw_only=True):
    """Part of a checkpoint on storage, not read back yet."""

    tier = SnapshotTier.STORAGE


MovedLine = SnapshotLine | ReplicateLine | PersistLine


class AtRiskLine(Line, frozen=True, kw_only=True):
    """Tokens that a failure would lose now, by where copies are: memory, peers, storage."""

    tokens: dict[str, Int]


class ReadBackLine(Line, frozen=True, kw_only=True):
    """Part of a checkpoint that its rank has read back from storage."""

    bytes: Int
    seconds: float


class RecoveryLine(Line, frozen=True, kw_only=True):
    """Recovery, which ends at `time`."""

    mark = Mark.RECOVERY
    shows = "continues from iteration {0.target_iteration}"

    target_iteration: Int
    replayed_iterations: Int
    sources: dict[str, Int]
    lost_tokens: Int
    plt: float
    total_lost_tokens: Int | None = None
    total_plt: float = 0.0
    mtl: float = 0.0
    lossy: dict[str, str] = {}
    phases_s: dict[str, float] = {}
    read_bytes: dict[str, Int] = {}
    lost_per_expert: Tokens = {}


class ElasticLine(Line, frozen=True, kw_only=True):
    """Start with another number of ranks than the one before, or with ranks that wait."""

    from_: Int = msgspec.field(name="from")
    to: Int
    waiting: tuple[Int, ...] = ()


class SlotChange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New table of a layer with slots: ``[rank]`` tokens of its last iteration, as they were and with it."""

    tokens_before: tuple[Count, ...]
    tokens_after: tuple[Count, ...]
    moved_replicas: Count


class SlotTableLine(Line, frozen=True, kw_only=True):
    """New tables of slots, by layer; bytes that the rank has sent for slots since the ones before."""

    layers: dict[str, SlotChange]
    sent_bytes: Count


class RepairLine(Line, frozen=True, kw_only=True):
    """Repair in place, which ends at `time`."""

    mark = Mark.REPAIR
    shows = "is repaired after {0.seconds:.1f} s"

    dead_ranks: tuple[Int, ...]
    hung_s: dict[str, float]
    broken_iteration: Int
    seconds: float
    is_replacement: bool = False
    taken_over: dict[str, str] = {}
    shared: tuple[Int, ...] = ()
    phases_s: dict[str, float] = {}


class SkippedBatchLine(Line, frozen=True, kw_only=True):
    """Iteration that all ranks have left out, since a rank has failed twice with its batch."""

    failed_rank: Int
    what: str


class FaultInjectedLine(Line, frozen=True, kw_only=True):
    """Fault that the run inflicted on itself."""

    mark = Mark.FAULT
    shows = "injected {0.kind}"
    ended = "fell silent after an injected {0.kind}"

    kind: str


class StoppedLine(Line, frozen=True, kw_only=True):
    """Failure of which the rank could still tell."""

    mark = Mark.FAULT
    shows = "stopped: {0.reason:.80}"

    reason: str
    silent_ranks: tuple[Int, ...] | None = None

    @override
    def ending(self, most: int | None = None) -> str:
        missed = ""
        if self.silent_ranks:
            missed = f"; heard nothing from {', '.join(map(str, self.silent_ranks))}"
        return f"stopped: {self.reason[:most]}{missed}"


class VerdictLine(Line, frozen=True, kw_only=True):
    """Verdict on the end of a start: which rank failed first, and how."""

    mark = Mark.FAULT
    shows = "tells the verdict: {0.words}"

    words: str


class HangLine(Line, frozen=True, kw_only=True):
    """Hang of the training thread, for which the rank has ended itself."""

    mark = Mark.FAULT
    shows = "hung in its {0.section} for {0.silent_s:.0f} s"
    counted_by = "section"
    ended = "hung in its {0.section}: {0.silent_s:.0f} s without progress, limit {0.limit_s:.0f} s"

    section: str
    silent_s: float
    limit_s: float


class CorruptionLine(Line, frozen=True, kw_only=True):
    """Finding of a check against silent corruption: one of the ranks, or all of them, has wrong bits."""

    mark = Mark.FAULT
    counted_by = "check"

    check: str
    ranks: tuple[Int, ...]
    decided: bool

    @property
    @override
    def text(self) -> str:
        return f"corruption of rank {' or '.join(map(str, self.ranks))}: {self.check}"


class DegradedLine(Line, frozen=True, kw_only=True):
    """Part of checkpointing that failed while training went on."""

    mark = Mark.TROUBLE
    shows = "{0.part}: {0.reason:.80}"
    counted_by = "part"

    part: str
    reason: str


class SkippedLine(DegradedLine, frozen=True, kw_only=True):
    """Snapshot that was due and was left out."""


class EndLine(Line, frozen=True, kw_only=True):
    """End of training."""

    ended = "{0.reason}"

    reason: str
    peak_device_memory_bytes: Int | None = None


def _kinds(base: type[Line]) -> Iterator[type[Line]]:
    """Yield the classes of events that have a name."""
    for each in base.__subclasses__():
        yield from _kinds(each)
        if each is not OtherLine and each is not _Moved:
            yield each


_KINDS = tuple(_kinds(Line))
_NAMES = {each.__struct_config__.tag for each in _KINDS}
_KNOWN: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[_KINDS])  # noqa: UP007
_OTHER = msgspec.json.Decoder(OtherLine)
_SURROGATE = re.compile(rb"\\u(d[89a-f]..)", re.IGNORECASE)
_NO_EVENT = (msgspec.DecodeError, RecursionError)


def decode(line: bytes) -> Line | None:
    """Return the event in a line, None unless the log has written it completely."""
    try:
        known: Line = _KNOWN.decode(line)
        return known
    except _NO_EVENT:
        pass
    try:
        other = _OTHER.decode(line)
        return None if other.event in _NAMES else other
    except _NO_EVENT:
        pass
    try:  # a text that is no Unicode, as the name of a file may be
        found: Line = _KNOWN.decode(_SURROGATE.sub(rb"\\\\u\1", line))
        return found
    except _NO_EVENT:
        return None
