"""Indexes and manifests of all kinds, and changes that spoil them."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import FORMAT, checksum, decode, encode
from moe_ft.format.entries import FileEntry, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity, Start
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest, UnitSource
from moe_ft.format.records import ExpertProgress, IterationRecord, OptimizerRecord, RecordTensor
from tests.unit.moe_ft.builders import make_identity, make_state, make_window

ESCAPES = ["../x", "/x", "a/../../b", "..", "a/..", "", ".", "a\\..\\b", "a\0b", "//x"]


COUNTS = st.integers(0, 2**53)


NAMES = st.text(max_size=12)


DIGITS = st.text("0123456789abcdef", min_size=16, max_size=16)


DTYPES = st.sampled_from(["F32", "BF16", "F8_E4M3", "U8"])


FILE_NAMES = st.from_regex(r"[a-z0-9_]{1,12}\.safetensors", fullmatch=True)


LEVELS = st.sampled_from(["full", "compute"])


FLOATS = st.floats(allow_nan=False, allow_infinity=False)


NORMS = FLOATS | st.sampled_from(["inf", "-inf", "nan"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


SETTINGS = st.dictionaries(NAMES, JSON, max_size=3)


STARTS = st.builds(Start, number=COUNTS, resumed_at=COUNTS, name=NAMES, is_chosen=st.booleans())


IDENTITIES = st.builds(
    Identity,
    job_id=NAMES,
    lineage=NAMES,
    history=st.lists(STARTS, min_size=1, max_size=3).map(tuple),
    fingerprint=SETTINGS,
    world_size=st.integers(1, 10**5),
    strategy=NAMES,
    superseded=st.lists(NAMES, max_size=2).map(tuple),
    began_with=NAMES,
)


GAPS = st.lists(st.tuples(COUNTS, COUNTS), max_size=2).map(tuple)


FILES = st.builds(
    FileEntry,
    rank=COUNTS,
    index=FILE_NAMES,
    index_checksum=DIGITS,
    data=FILE_NAMES,
    num_bytes=COUNTS,
)


PROGRESS = st.builds(
    ExpertProgress,
    cursor=COUNTS,
    k_snapshot=COUNTS,
    k_persist=COUNTS,
    least_k=COUNTS,
    interval=COUNTS,
    routed_tokens=st.dictionaries(NAMES, st.lists(COUNTS, max_size=3).map(tuple), max_size=2),
    gaps=st.dictionaries(NAMES, st.lists(GAPS, max_size=3).map(tuple), max_size=2),
    planned_tokens=COUNTS,
)


PACKED = st.builds(
    RecordTensor,
    dtype=DTYPES,
    shape=st.lists(COUNTS, max_size=3).map(tuple),
    data=st.binary(max_size=20),
)


OPTIMIZERS = st.builds(
    OptimizerRecord,
    groups=st.lists(SETTINGS, max_size=2).map(tuple),
    steps=st.dictionaries(NAMES, FLOATS, max_size=2),
    scaler=st.none() | SETTINGS,
    found_inf=st.none() | st.booleans(),
    scales=st.dictionaries(NAMES, PACKED, max_size=2),
)


def records(iteration: int) -> st.SearchStrategy[IterationRecord]:
    return st.builds(
        IterationRecord,
        iteration=st.just(iteration),
        grad_norm=st.none() | NORMS,
        grad_norms_by_group=st.dictionaries(NAMES, NORMS, max_size=2),
        num_tokens=st.none() | COUNTS,
        optimizers=st.lists(OPTIMIZERS, max_size=2).map(tuple),
        scheduler=SETTINGS,
        consumed_train_samples=COUNTS,
        consumed_valid_samples=COUNTS,
        skipped_train_samples=COUNTS,
        num_floating_point_operations=FLOATS,
        num_microbatches=COUNTS,
        rng=SETTINGS,
        buffers=st.dictionaries(NAMES, PACKED, max_size=2),
        extra_state=st.dictionaries(NAMES, PACKED, max_size=2),
        tokens_per_expert=st.dictionaries(NAMES, st.lists(COUNTS).map(tuple), max_size=2),
        loop_state=SETTINGS,
    )


@st.composite
def units(
    draw: st.DrawFn, file_bytes: int, iterations: st.SearchStrategy[int] = COUNTS
) -> UnitEntry:
    offset = draw(st.integers(0, file_bytes))
    num_bytes = draw(st.integers(0, file_bytes - offset))
    tensors = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(COUNTS)
        tensors.append(
            TensorEntry(
                parameter=draw(NAMES),
                key=draw(NAMES),
                start=start,
                end=start,
                dtype=draw(DTYPES),
                offset=draw(st.integers(0, num_bytes)),
                is_absent=draw(st.booleans()),
            )
        )
    return UnitEntry(
        offset=offset,
        num_bytes=num_bytes,
        iteration=draw(iterations),
        level=draw(LEVELS),
        checksum=draw(DIGITS),
        tensors=tuple(tensors),
        incarnation=draw(COUNTS),
        file=draw(st.just("") | FILE_NAMES),
        routed_tokens=draw(COUNTS),
        gaps=draw(GAPS),
    )


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    iteration, file_bytes = draw(st.integers(10, 2**53)), draw(COUNTS)
    window = draw(st.integers(1, 3))
    num_snapshots = draw(st.integers(1, window))
    first = iteration - num_snapshots + 1
    inside = st.integers(first, iteration) if window > 1 else COUNTS
    held = st.dictionaries(NAMES, units(file_bytes, inside), max_size=2)
    return Index(
        format=FORMAT,
        identity=draw(IDENTITIES),
        rank=draw(COUNTS),
        node=draw(NAMES),
        iteration=iteration,
        file=draw(FILE_NAMES),
        file_bytes=file_bytes,
        header_bytes=draw(st.integers(0, file_bytes)),
        header_checksum=draw(DIGITS),
        units=draw(held),
        parameters=draw(
            st.dictionaries(
                NAMES,
                st.builds(ParameterEntry, shape=st.lists(COUNTS, max_size=3).map(tuple)),
                max_size=2,
            )
        ),
        records=tuple(draw(records(each)) for each in range(first, iteration + 1)),
        origins=draw(st.dictionaries(NAMES, DIGITS, max_size=2)),
        progress=draw(st.none() | PROGRESS),
        older=tuple(draw(st.lists(FILES, max_size=2))),
        window=window,
        num_snapshots=num_snapshots,
        compute=tuple(draw(held) for _ in range(num_snapshots)) if window > 1 else (),
        complete_iteration=draw(st.none() | COUNTS),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    paths = FILE_NAMES.map(lambda name: f"iter_0000001/{name}")
    file = st.builds(
        FileEntry, rank=COUNTS, index=paths, index_checksum=DIGITS, data=paths, num_bytes=COUNTS
    )
    files = draw(st.lists(file, min_size=1, max_size=3))
    positions = st.lists(st.integers(0, len(files) - 1), max_size=3).map(tuple)
    source = st.builds(UnitSource, iteration=COUNTS, level=LEVELS, files=positions)
    return Manifest(
        format=FORMAT,
        identity=draw(IDENTITIES),
        iteration=draw(COUNTS),
        created_s=draw(FLOATS),
        files=tuple(files),
        units=draw(st.dictionaries(NAMES, source, max_size=2)),
        older=tuple(draw(st.lists(FILES, max_size=2))),
        window=draw(st.integers(1, 9)),
    )


def small_index() -> Index:
    """Return an index in which every part of the schema occurs once."""
    index, _ = make_state(num_elements=3)
    name = min(index.units)
    return msgspec.structs.replace(index, units={name: index.units[name]})


def small_window() -> Index:
    """Return the index of a window in which every part of the schema occurs."""
    index = make_window(length=2, num_elements=3).index
    at_first, at_last = index.compute
    name = min(at_first)
    return msgspec.structs.replace(
        index, units={name: index.units[name]}, compute=({name: at_first[name]}, at_last)
    )


def small_manifest() -> Manifest:
    file = FileEntry(
        rank=0,
        index="iter_0000005/rank_00000_01234567.json",
        index_checksum="0123456789abcdef",
        data="iter_0000005/rank_00000_01234567.safetensors",
        num_bytes=4160,
    )
    return Manifest(
        format=FORMAT,
        identity=make_identity(),
        iteration=5,
        created_s=1.7e9,
        files=(file,),
        units={"embedding": UnitSource(iteration=5, level="full", files=(0,))},
    )


def seal(body: object) -> bytes:
    """Return a file whose checksum is right, whatever its body is; bytes are taken as they are."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"xxh3_64":"%s","body":%s}\n' % (checksum(encoded).encode(), encoded)


def body_of(decoded: Index | Manifest) -> Any:
    return json.loads(encode(decoded))["body"]


def is_refused[Body: (Index, Manifest)](content: bytes, kind: type[Body]) -> bool:
    try:
        decode(content, kind, "a file")
    except CorruptStateError:
        return True
    return False


Change = Callable[[Any], object]


def change(path: str, value: object) -> Change:
    """Return a function that sets the value at a dotted path of a body."""

    def apply(body: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body[int(name) if isinstance(body, list) else name]
        body[int(last) if isinstance(body, list) else last] = value

    return apply
