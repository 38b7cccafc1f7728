"""Lines of an event log as frozen values, for what reads logs: `report`, `watch` and metrics.

docs/events.md has all fields; those that no reader needs are not decoded. moe_ft/events.py writes and finds
lines.
"""

import re
from typing import Annotated, Literal, override

import msgspec

from moe_ft.events import MAX_COUNT

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Int = Annotated[
    int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)
]  # greater ones have no place in a float
Tokens = dict[str, list[Int]]  # by MoE layer, [expert]


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Fields of every event."""

    time: Annotated[float, msgspec.Meta(ge=0, le=2**37)]  # that has a date
    incarnation: Count
    iteration: Count


class Other(Line, frozen=True, kw_only=True, gc=False):
    """Event of another kind."""

    event: str


class Start(Line, frozen=True, kw_only=True, tag_field="event", tag="start"):
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


class Protects(Line, frozen=True, kw_only=True, tag_field="event", tag="protects"):
    """Protection of a run from its start on; `lost_rank` is what follows a death: repair, restart or end."""

    lost_rank: str = ""


class Iteration(Line, frozen=True, kw_only=True, gc=False, tag_field="event", tag="iteration"):
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

    @property
    def own_s(self) -> float | None:
        """Time of the rank itself, without what it waited for others and was in collectives."""
        if self.idle_s is None or self.exchange_s is None:
            return None
        return max(0.0, self.iteration_s - self.idle_s - self.exchange_s)


class RouterLoad(Line, frozen=True, kw_only=True, tag_field="event", tag="router_load"):
    """Tokens that a rank sent to each expert."""

    tokens: Tokens


class Moved(Line, frozen=True, kw_only=True, gc=False):
    """Bytes that a part of checkpointing has moved, and how long that took until `time`."""

    bytes: Int
    seconds: float

    @property
    def moved_bytes(self) -> int:
        """Bytes in all."""
        return self.bytes


class Snapshot(Moved, frozen=True, kw_only=True, tag_field="event", tag="snapshot"):
    """Snapshot in host memory."""

    experts: Tokens = {}


class Replicate(Moved, frozen=True, kw_only=True, tag_field="event", tag="replicate"):
    """Snapshot that peers have."""

    peers: tuple[Int, ...] = ()
    state_bytes: Int | None = None
    gradient_bytes: Int = 0

    @property
    @override
    def moved_bytes(self) -> int:
        if self.state_bytes is None:  # earlier versions told only the most that one peer got
            return self.bytes * len(self.peers)
        return self.state_bytes + self.gradient_bytes


class AtRisk(Line, frozen=True, kw_only=True, tag_field="event", tag="at_risk"):
    """Tokens that a failure would lose now, by where copies are: memory, peers, storage."""

    tokens: dict[str, Int]


class Persist(Moved, frozen=True, kw_only=True, tag_field="event", tag="persist"):
    """Part of a checkpoint on storage, not read back yet."""


class ReadBack(Line, frozen=True, kw_only=True, tag_field="event", tag="read_back"):
    """Part of a checkpoint that its rank has read back from storage."""

    bytes: Int
    seconds: float


class Recovery(Line, frozen=True, kw_only=True, tag_field="event", tag="recovery"):
    """Recovery, which ends at `time`."""

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


class Elastic(Line, frozen=True, kw_only=True, tag_field="event", tag="elastic"):
    """Start with another number of ranks than the one before, or with ranks that wait."""

    from_: Int = msgspec.field(name="from")
    to: Int
    waiting: tuple[Int, ...] = ()


class SlotChange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New table of a layer with slots: ``[rank]`` tokens of its last iteration, as they were and with it."""

    tokens_before: tuple[Count, ...]
    tokens_after: tuple[Count, ...]
    moved_replicas: Count


class SlotTables(Line, frozen=True, kw_only=True, tag_field="event", tag="slot_table"):
    """New tables of slots, by layer; bytes that the rank has sent for slots since the ones before."""

    layers: dict[str, SlotChange]
    sent_bytes: Count


class Repair(Line, frozen=True, kw_only=True, tag_field="event", tag="repair"):
    """Repair in place, which ends at `time`."""

    dead_ranks: tuple[Int, ...]
    hung_s: dict[str, float]
    broken_iteration: Int
    seconds: float
    is_replacement: bool = False
    taken_over: dict[str, str] = {}
    played: dict[str, Int] = {}


class SkippedBatch(Line, frozen=True, kw_only=True, tag_field="event", tag="skipped_batch"):
    """Iteration that all ranks have left out, since a rank has failed twice with its batch."""

    failed_rank: Int
    what: str


class Fault(Line, frozen=True, kw_only=True, tag_field="event", tag="fault_injected"):
    """Fault that the run inflicted on itself."""

    kind: str


class Stopped(Line, frozen=True, kw_only=True, tag_field="event", tag="stopped"):
    """Failure of which the rank could still tell."""

    reason: str
    silent_ranks: tuple[Int, ...] | None = None


class Verdict(Line, frozen=True, kw_only=True, tag_field="event", tag="verdict"):
    """Verdict on the end of a start: which rank failed first, and how."""

    words: str


class Hang(Line, frozen=True, kw_only=True, tag_field="event", tag="hang"):
    """Hang of the training thread, for which the rank has ended itself."""

    section: str
    silent_s: float
    limit_s: float


class Corruption(Line, frozen=True, kw_only=True, tag_field="event", tag="corruption"):
    """Finding of a check against silent corruption: one of the ranks, or all of them, has wrong bits."""

    check: str
    ranks: tuple[Int, ...]
    decided: bool


class Degraded(Line, frozen=True, kw_only=True, tag_field="event", tag="degraded"):
    """Part of checkpointing that failed while training went on."""

    part: str
    reason: str


class Skipped(Degraded, frozen=True, kw_only=True, tag_field="event", tag="skipped"):
    """Snapshot that was due and was left out."""


class End(Line, frozen=True, kw_only=True, tag_field="event", tag="end"):
    """End of training."""

    reason: str
    peak_device_memory_bytes: Int | None = None


_Known = (
    Start
    | Protects
    | Iteration
    | RouterLoad
    | Snapshot
    | Replicate
    | AtRisk
    | Persist
    | ReadBack
    | Recovery
    | Elastic
    | SlotTables
    | Repair
    | SkippedBatch
    | Fault
    | Hang
    | Stopped
    | Verdict
    | Corruption
    | Degraded
    | Skipped
    | End
)
_KNOWN = msgspec.json.Decoder(_Known)
_OTHER = msgspec.json.Decoder(Other)
_SURROGATE = re.compile(rb"\\u(d[89a-f]..)", re.IGNORECASE)
_NO_EVENT = (msgspec.DecodeError, RecursionError)
_NAMES = {type_.__struct_config__.tag for type_ in _Known.__args__}


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
