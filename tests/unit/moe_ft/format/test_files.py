"""Indexes and manifests: what is written is read; whatever else is there is refused."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.errors import CorruptStateError
from moe_ft.format.files import (
    FORMAT,
    FileEntry,
    Identity,
    Index,
    IndexHead,
    Manifest,
    ParameterEntry,
    Start,
    TensorEntry,
    UnitEntry,
    UnitSource,
    check_path,
    checksum,
    decode,
    differing_settings,
    encode,
    incomparable_settings,
)
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
    """Return a file whose checksum is right, whatever its body is."""
    encoded = json.dumps(body).encode()
    return b'{"xxh3_64":"%s","body":%s}\n' % (checksum(encoded).encode(), encoded)


def body_of(decoded: Index | Manifest) -> Any:
    return json.loads(encode(decoded))["body"]


def is_refused[Body: (Index, Manifest)](content: bytes, kind: type[Body]) -> bool:
    try:
        decode(content, kind, "a file")
    except CorruptStateError:
        return True
    return False


EACH = pytest.mark.parametrize(
    ("content", "kind"),
    [
        (encode(small_index()), Index),
        (encode(small_window()), Index),
        (encode(small_manifest()), Manifest),
    ],
    ids=["index", "window", "manifest"],
)


@given(indexes())
@settings(max_examples=25)
def test_index_that_was_encoded_is_decoded_to_the_same(index: Index) -> None:
    assert decode(encode(index), Index, "a file") == index


@given(manifests())
@settings(max_examples=50)
def test_manifest_that_was_encoded_is_decoded_to_the_same(manifest: Manifest) -> None:
    assert decode(encode(manifest), Manifest, "a file") == manifest


@given(indexes())
@settings(max_examples=20)
def test_encoded_index_is_json_with_the_checksum_of_its_body(index: Index) -> None:
    content = encode(index)
    assert list(json.loads(content)) == ["xxh3_64", "body"]
    body = content.split(b'"body":', 1)[1].removesuffix(b"}\n")
    assert json.loads(content)["xxh3_64"] == checksum(body)


@EACH
@pytest.mark.parametrize("mask", [0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF])
def test_file_with_any_flipped_byte_is_refused(
    content: bytes, kind: type[Index] | type[Manifest], mask: int
) -> None:
    accepted = []
    for position, byte in enumerate(content):
        flipped = content[:position] + bytes([byte ^ mask]) + content[position + 1 :]
        if not is_refused(flipped, kind):
            accepted.append(position)
    assert accepted == []


@EACH
def test_file_that_is_cut_off_anywhere_is_refused(
    content: bytes, kind: type[Index] | type[Manifest]
) -> None:
    assert [end for end in range(len(content)) if not is_refused(content[:end], kind)] == []


@EACH
def test_file_that_lacks_its_beginning_is_refused(
    content: bytes, kind: type[Index] | type[Manifest]
) -> None:
    assert [at for at in range(1, len(content)) if not is_refused(content[at:], kind)] == []


@EACH
def test_file_in_which_any_range_is_zero_is_refused(
    content: bytes, kind: type[Index] | type[Manifest]
) -> None:
    # What a file system may leave of a file that was not synced.
    starts = range(0, len(content), 64)
    zeroed = [content[:at].ljust(at + 64, b"\0") + content[at + 64 :] for at in starts]
    assert [at for at, each in zip(starts, zeroed, strict=True) if not is_refused(each, kind)] == []


@EACH
@pytest.mark.parametrize("garbage", [b"\n", b" ", b"}\n", b"\0"])
def test_file_with_something_behind_its_end_is_refused(
    content: bytes, kind: type[Index] | type[Manifest], garbage: bytes
) -> None:
    assert is_refused(content + garbage, kind)


def test_manifest_in_the_place_of_an_index_is_refused() -> None:
    with pytest.raises(CorruptStateError, match="a file does not have the form of Index"):
        decode(encode(small_manifest()), Index, "a file")


def test_file_of_another_format_is_refused_with_both_versions() -> None:
    body = body_of(small_index()) | {"format": "moe_ft/2"}
    with pytest.raises(
        CorruptStateError, match="has format 'moe_ft/2', this version reads moe_ft/1"
    ):
        decode(seal(body), Index, "a file")


def test_flipped_byte_is_reported_with_the_path_of_the_file() -> None:
    content = encode(small_manifest()).replace(b"run-a", b"run-b")
    with pytest.raises(CorruptStateError, match=r"iter_5/manifest\.json is corrupt: its checksum"):
        decode(content, Manifest, "iter_5/manifest.json")


def test_corrupt_state_is_an_oserror_so_that_readers_fall_to_the_next_source() -> None:
    assert issubclass(CorruptStateError, OSError)


Change = Callable[[Any], object]


def change(path: str, value: object) -> Change:
    """Return a function that sets the value at a dotted path of a body."""

    def apply(body: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body[int(name) if isinstance(body, list) else name]
        body[int(last) if isinstance(body, list) else last] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("rank", "0"), "form of Index.*rank"),
        (change("rank", -1), "form of Index.*rank"),
        (change("rank", 0.5), "form of Index.*rank"),
        (change("rank", None), "form of Index.*rank"),
        (change("iteration", -5), "form of Index.*iteration"),
        (change("file_bytes", -1), "form of Index.*file_bytes"),
        (change("header_bytes", 10**9), "the header reaches beyond the end"),
        (change("header_bytes", -1), "form of Index.*header_bytes"),
        (change("header_checksum", "x" * 16), "form of Index.*header_checksum"),
        (change("surprise", 1), "form of Index.*surprise"),
        (change("identity.surprise", 1), "form of Index.*surprise"),
        (change("identity.world_size", 0), "form of Index.*world_size"),
        (change("identity.history", []), "belongs to no incarnation"),
        (change("identity.history", [[0]]), "form of Index.*history"),
        (change("identity.history", [[0, -1]]), "form of Index.*history"),
        (change("identity.history", [[0, 0, "a", 1]]), "form of Index.*history"),
        (change("identity.superseded", "a"), "form of Index.*superseded"),
        (change("complete_iteration", -1), "form of Index.*complete_iteration"),
        (lambda body: body.pop("node"), "form of Index.*node"),
        (lambda body: body["identity"].pop("lineage"), "form of Index.*lineage"),
        (change("units.embedding.offset", -64), "form of Index.*offset"),
        (change("units.embedding.num_bytes", 10**9), "unit embedding reaches beyond the end"),
        (change("units.embedding.offset", 10**9), "unit embedding reaches beyond the end"),
        (change("units.embedding.level", "half"), "form of Index.*level"),
        (change("units.embedding.checksum", "123"), "form of Index.*checksum"),
        (change("units.embedding.checksum", "0123456789ABCDEF"), "form of Index.*checksum"),
        (change("units.embedding.tensors.0.4", "float"), "form of Index.*tensors"),
        (change("units.embedding.tensors.0.2", 4), "unit embedding has an impossible tensor"),
        (change("units.embedding.tensors.0.5", 10**6), "unit embedding has an impossible tensor"),
        (change("units.embedding.tensors.0", ["a", "b", 0]), "form of Index.*tensors"),
        (change("records", []), "holds no record of its iteration 5"),
        (change("records.0.iteration", 4), "holds no record of its iteration 5"),
        (change("records.0.grad_norm", "big"), "form of Index.*grad_norm"),
        (change("records.0.surprise", 1), "form of Index.*surprise"),
        (lambda body: body["records"][0].pop("rng"), "form of Index.*rng"),
        (change("records.0.buffers", {"b": {"dtype": "F32"}}), "form of Index.*buffers"),
        (change("file", "sub/region_0.safetensors"), "is not beside its index"),
        (change("units.embedding.incarnation", -1), "form of Index.*incarnation"),
        (change("units.embedding.file", "../pool"), "names '../pool', which leaves its directory"),
        (change("units.embedding.file", 1), "form of Index.*file"),
        (change("units.embedding.routed_tokens", -1), "form of Index.*routed_tokens"),
        (change("units.embedding.gaps", [[0, -1]]), "form of Index.*gaps"),
        (change("origins", {"a": "123"}), "form of Index.*origins"),
        (change("progress", {}), "form of Index.*progress"),
        (change("older", [{}]), "form of Index.*older"),
        (change("window", 0), "form of Index.*window"),
        (change("num_snapshots", 0), "form of Index.*num_snapshots"),
        (change("num_snapshots", 2), "holds more snapshots than its window has"),
    ],
)
def test_index_that_breaks_the_schema_is_refused_and_the_field_named(
    spoil: Change, message: str
) -> None:
    body = body_of(small_index())
    spoil(body)
    with pytest.raises(CorruptStateError, match=message):
        decode(seal(body), Index, "a file")


# Windows: `make_window` has iterations 5, 6 and 7, experts 0, 1 and 2 are FULL at 5, 5 and 6

FIRST, SECOND, LAST = "layer.0.expert.0", "layer.0.expert.2", "embedding"


def remove(name: str, position: int) -> Change:
    """Return a function that removes an item of a list in a body."""
    return lambda body: body[name].pop(position)


def swap_records(body: Any) -> None:
    body["records"][0], body["records"][1] = body["records"][1], body["records"][0]


def repeat_record(body: Any) -> None:
    body["records"].insert(0, body["records"][0])


def add_snapshot(body: Any) -> None:
    body["compute"].append({})


def forget_the_first_snapshot(body: Any) -> None:
    # What is left is a window of the same length that claims to begin an iteration later.
    body["records"].pop(0)
    body["compute"].pop(0)
    body["num_snapshots"] = 2


NOT_CONSECUTIVE = "does not hold 3 consecutive snapshots up to iteration 7"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("records", 0), NOT_CONSECUTIVE),
        (remove("records", 1), NOT_CONSECUTIVE),
        (remove("records", 2), "holds no record of its iteration 7"),
        (swap_records, NOT_CONSECUTIVE),
        (repeat_record, NOT_CONSECUTIVE),
        (change("records.0.iteration", 4), NOT_CONSECUTIVE),
        (change("records.1.iteration", 7), NOT_CONSECUTIVE),
        (change("iteration", 8), "holds no record of its iteration 8"),
        (change("num_snapshots", 4), "holds more snapshots than its window has"),
        (change("num_snapshots", 2), "does not hold 2 consecutive snapshots up to iteration 7"),
        (change("window", 2), "holds more snapshots than its window has"),
        (change("window", 1), "holds more snapshots than its window has"),
        (change("compute", []), NOT_CONSECUTIVE),
        (remove("compute", 0), NOT_CONSECUTIVE),
        (add_snapshot, NOT_CONSECUTIVE),
        (forget_the_first_snapshot, "does not hold 2 consecutive snapshots up to iteration 7"),
        (change(f"compute.0.{LAST}.iteration", 4), NOT_CONSECUTIVE),
        (change(f"compute.0.{LAST}.iteration", 8), NOT_CONSECUTIVE),
        (change(f"compute.1.{LAST}.offset", 10**6), "unit embedding reaches beyond the end"),
        (change(f"compute.1.{LAST}.tensors.0.3", 10**6), "unit embedding has an impossible tensor"),
        (change(f"compute.1.{LAST}.file", "../pool"), "which leaves its directory"),
        (change(f"compute.1.{LAST}.level", "none"), "form of Index.*level"),
        (change(f"compute.1.{LAST}.checksum", ""), "form of Index.*checksum"),
        (change("compute.1", []), "form of Index.*compute"),
        (change("window", "3"), "form of Index.*window"),
    ],
)
def test_index_that_breaks_the_rules_of_windows_is_refused(spoil: Change, message: str) -> None:
    body = body_of(make_window().index)
    spoil(body)
    with pytest.raises(CorruptStateError, match=message):
        decode(seal(body), Index, "a file")


@pytest.mark.parametrize("iteration", [4, 8])
@pytest.mark.parametrize("name", [FIRST, SECOND, LAST])
def test_unit_outside_of_its_window_is_refused(name: str, iteration: int) -> None:
    body = body_of(make_window().index)
    body["units"][name]["iteration"] = iteration
    with pytest.raises(CorruptStateError, match=NOT_CONSECUTIVE):
        decode(seal(body), Index, "a file")


@pytest.mark.parametrize(("length", "num_snapshots"), [(1, 1), (2, 1), (3, 1), (3, 2), (4, 4)])
def test_window_up_to_any_snapshot_is_read_as_it_was_written(
    length: int, num_snapshots: int
) -> None:
    index = make_window(length=length).up_to(num_snapshots)
    assert decode(encode(index), Index, "a file") == index


@pytest.mark.parametrize("num_snapshots", [1, 2, 3])
def test_window_is_whole_with_its_last_snapshot_only(num_snapshots: int) -> None:
    content = encode(make_window(length=3).up_to(num_snapshots))
    assert decode(content, Index, "a file").is_whole == (num_snapshots == 3)
    assert decode(content, IndexHead, "a file").is_whole == (num_snapshots == 3)


@pytest.mark.parametrize("kind", [Index, IndexHead])
def test_index_that_does_not_speak_of_windows_is_of_a_whole_one(
    kind: type[Index] | type[IndexHead],
) -> None:
    body = body_of(small_index())
    for name in ("window", "num_snapshots", "compute"):
        del body[name]
    assert decode(seal(body), kind, "a file").is_whole


def test_entries_of_an_index_are_those_of_all_levels_and_snapshots() -> None:
    index = make_window(length=3).index
    found = [(name, unit.iteration, unit.level) for name, unit in index.entries()]
    assert sorted(found) == sorted(
        [
            (FIRST, 5, "full"),
            ("layer.0.expert.1", 5, "full"),
            (SECOND, 5, "compute"),
            (SECOND, 6, "full"),
            (LAST, 5, "compute"),
            (LAST, 6, "compute"),
            (LAST, 7, "full"),
        ]
    )


def test_manifest_that_does_not_speak_of_windows_is_of_single_snapshots() -> None:
    body = body_of(small_manifest())
    del body["window"]
    assert decode(seal(body), Manifest, "a file").window == 1


def test_unit_in_another_file_may_lie_behind_the_end_of_the_indexs_own() -> None:
    body = body_of(small_index())
    body["units"]["embedding"].update(file="pool_1x64.safetensors", offset=10**9)
    assert decode(seal(body), Index, "a file").units["embedding"].offset == 10**9


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("field", ["index", "data"])
def test_older_file_elsewhere_is_refused_in_an_index_and_in_a_manifest(
    field: str, path: str
) -> None:
    manifest = body_of(small_manifest())
    entry = {**manifest["files"][0], field: path}
    manifest["older"] = [entry]
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(manifest), Manifest, "a file")
    index = body_of(small_index())
    index["older"] = [entry]
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(index), Index, "a file")


def test_unit_of_a_manifest_may_be_in_an_older_file() -> None:
    body = body_of(small_manifest())
    body["older"] = body["files"]
    body["units"]["embedding"]["files"] = [0, 1]
    assert decode(seal(body), Manifest, "a file").units["embedding"].files == (0, 1)


def test_unit_of_a_manifest_beyond_its_older_files_is_refused() -> None:
    body = body_of(small_manifest())
    body["older"] = body["files"]
    body["units"]["embedding"]["files"] = [2]
    with pytest.raises(CorruptStateError, match="names a file that is not listed"):
        decode(seal(body), Manifest, "a file")


def test_version_of_a_later_incarnation_is_newer_whatever_its_iteration() -> None:
    unit = small_index().units["embedding"]
    later = msgspec.structs.replace(unit, incarnation=1, iteration=0)
    assert later.version > unit.version


def test_tensor_that_reaches_beyond_its_unit_is_refused() -> None:
    body = body_of(small_index())
    body["units"]["embedding"]["tensors"][0][3] = 10**6  # its end, in elements
    assert is_refused(seal(body), Index)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("created_s", "now"), "form of Manifest.*created_s"),
        (change("surprise", 1), "form of Manifest.*surprise"),
        (change("files.0.rank", -1), "form of Manifest.*rank"),
        (change("files.0.num_bytes", "4160"), "form of Manifest.*num_bytes"),
        (change("files.0.index_checksum", ""), "form of Manifest.*index_checksum"),
        (change("files.0.surprise", 1), "form of Manifest.*surprise"),
        (lambda body: body["files"][0].pop("data"), "form of Manifest.*data"),
        (change("units.embedding.files", [1]), "unit embedding names a file that is not listed"),
        (change("units.embedding.files", [-1]), "form of Manifest.*files"),
        (change("units.embedding.level", "none"), "form of Manifest.*level"),
        (change("window", 0), "form of Manifest.*window"),
        (change("identity.history", []), "belongs to no incarnation"),
    ],
)
def test_manifest_that_breaks_the_schema_is_refused_and_the_field_named(
    spoil: Change, message: str
) -> None:
    body = body_of(small_manifest())
    spoil(body)
    with pytest.raises(CorruptStateError, match=message):
        decode(seal(body), Manifest, "a file")


@pytest.mark.parametrize("body", [None, 1, "text", [], {}, [1, 2], True])
def test_body_that_is_no_object_of_the_schema_is_refused(body: object) -> None:
    assert is_refused(seal(body), Index)
    assert is_refused(seal(body), Manifest)


@pytest.mark.parametrize("path", ESCAPES)
def test_path_that_leaves_its_directory_is_refused_by_name(path: str) -> None:
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        check_path(path, "a file")


@pytest.mark.parametrize("path", ["a", "a/b.json", "iter_0000001/rank_00000_ab.json", "..a/b.."])
def test_path_inside_of_its_directory_is_accepted(path: str) -> None:
    check_path(path, "a file")


@pytest.mark.parametrize("path", ESCAPES)
def test_index_whose_data_file_is_elsewhere_is_refused(path: str) -> None:
    body = body_of(small_index()) | {"file": path}
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(body), Index, "a file")


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("field", ["index", "data"])
def test_manifest_that_names_a_file_elsewhere_is_refused(field: str, path: str) -> None:
    body = body_of(small_manifest())
    body["files"][0][field] = path
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(body), Manifest, "a file")


def test_settings_that_differ_are_described_and_those_that_one_side_lacks_are_named() -> None:
    ours, theirs = {"--a": 1, "--b": 2, "--d": 4}, {"--a": 1, "--b": 3, "--c": None}
    assert differing_settings(ours, theirs) == ["--b: 3 there, 2 now"]
    assert incomparable_settings(ours, theirs) == ["--c", "--d"]
