"""A rank that holds whole tensors reads what two tensor-parallel ranks have left, with every age and flaw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, override

import msgspec
import pytest
import torch

from moe_ft.format.encoding import checksum
from moe_ft.format.entries import (
    GlobalPlace,
    ModelPlaces,
    ParameterEntry,
    TensorEntry,
    UnitEntry,
)
from moe_ft.format.index import Index
from moe_ft.format.packings import Packing
from moe_ft.planning.recovery import Plan, Source, Version, plan_recovery
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery import divided, transfer
from moe_ft.recovery.divided import DividedFetching, DividedUnits
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.left import Left as Findings
from moe_ft.recovery.overview import Overview, in_order, look_at_share
from moe_ft.recovery.readers import Readers, StateReader
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.interface import Rotation
from moe_ft.topology import RankInfo, Topology
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import (
    make_identity,
    make_optimizer,
    make_parameter,
    make_record,
    make_window,
)

EMBEDDING = UnitId(kind=UnitKind.EMBEDDING)
EXPERT = UnitId(kind=UnitKind.EXPERT, layer=0, expert=1)
UNITS = (EMBEDDING, EXPERT)
OTHER = UnitId(kind=UnitKind.EXPERT, layer=1, expert=0)
KINDS = ("param", "exp_avg", "exp_avg_sq")
IDENTITY = make_identity(world_size=2)
NOW = 5
TENSOR_BYTES = 64  # 12 numbers and padding


def whole(unit: UnitId, kind: str, iteration: int) -> torch.Tensor:
    """Return a tensor of the model, whose values say what it is."""
    first = 10_000 * iteration + 1000 * UNITS.index(unit) + 100 * KINDS.index(kind)
    return torch.arange(first, first + 24, dtype=torch.float32).view(8, 3)


def entry_of(unit: UnitId, rows: int, first: int) -> ParameterEntry:
    place = GlobalPlace(
        key=str(unit), shape=(8, 3), offset=(first, 0), start=(0, 0), extent=(rows, 3)
    )
    return ParameterEntry(shape=(rows, 3), places=(place,))


@dataclass
class Left(StateReader):
    """State of one rank in one place: half of the rows of each tensor.

    Attributes:
        ages: iterations of the units; a unit without one was not saved.
        absent: kinds that do not exist yet.
        unit: the only one that the rank has, which is not one of ours; None for ours.
    """

    rank: int
    node: str = "n"
    unit: UnitId | None = None
    ages: Mapping[UnitId, int] = field(default_factory=lambda: dict.fromkeys(UNITS, NOW))
    absent: Sequence[str] = ()
    is_damaged: bool = False
    asked_bytes: int = 0

    def __post_init__(self) -> None:
        self.content = bytearray()
        units = {str(unit): self._add(unit, age) for unit, age in self.ages.items()}
        names: tuple[UnitId, ...] = UNITS
        if self.unit is not None:
            like = units[str(EXPERT)]
            tensors = [
                msgspec.structs.replace(each, parameter=f"{self.unit}.weight")
                for each in like.tensors
            ]
            like = msgspec.structs.replace(like, tensors=tuple(tensors))
            names, units = (self.unit,), {str(self.unit): like}
        index = msgspec.structs.replace(
            make_window(length=1).index,
            rank=self.rank,
            iteration=NOW,
            identity=IDENTITY,
            header_checksum=checksum(b""),
            units=units,
            parameters={f"{unit}.weight": entry_of(unit, 4, 4 * self.rank) for unit in names},
            records=(make_record(NOW),),
            compute=(),
        )
        super().__init__(index, "")
        if self.is_damaged:
            self.content[5] ^= 1

    def _add(self, unit: UnitId, iteration: int) -> UnitEntry:
        start = len(self.content)
        tensors = []
        for number, kind in enumerate(KINDS):
            half = whole(unit, kind, iteration)[4 * self.rank :][:4]
            self.content += half.numpy().tobytes().ljust(TENSOR_BYTES, b"\0")
            tensors.append(
                TensorEntry(
                    f"{unit}.weight",
                    kind,
                    0,
                    12,
                    "F32",
                    number * TENSOR_BYTES,
                    kind in self.absent,
                    Packing.EXACT.value,
                )
            )
        return UnitEntry(
            offset=start,
            num_bytes=len(self.content) - start,
            iteration=iteration,
            level="full",
            checksum=checksum(bytes(self.content[start:])),
            tensors=tuple(tensors),
            routed_tokens=iteration,
        )

    @property
    def path(self) -> str:
        """The path of its index."""
        return f"{self.node}/rank_{self.rank:05d}/region_0.json"

    @override
    def read(self, file: str, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self.content)[offset : offset + num_bytes]

    @override
    def read_parts(
        self, name: str, position: int | None, unit: UnitEntry, ranges: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        parts = bytearray(unit.num_bytes)
        for start, end in ranges:
            parts[start:end] = self.read("", unit.offset + start, end - start)
            self.asked_bytes += end - start
        return memoryview(parts)

    @override
    def read_header(self) -> memoryview:
        return memoryview(b"")


def plan_of(left: Sequence[Left]) -> Plan:
    versions = [
        Version(
            rank=each.rank,
            iteration=NOW,
            lineage=IDENTITY.lineage,
            history=IDENTITY.history,
            node=each.node,
            path=each.path,
            layout="two",
            world_size=2,
        )
        for each in left
    ]
    return plan_recovery(versions, ["n"])[0][0]


def rank_info(rank: int) -> RankInfo:
    return RankInfo(rank=rank, node="n", stage=0, pid=1, address=None, region_bytes=1)


Fetch = Callable[..., tuple[Fetched, Readers]]


def local_rows(unit: UnitId, rows: int, first: int) -> LocalParameter:
    """Return a parameter of which this rank has some rows."""
    master = torch.zeros(rows * 3)
    local = make_parameter(
        unit,
        parameter=torch.zeros((rows, 3), dtype=torch.bfloat16),
        optimizer=make_optimizer(master),
        master=master,
    )
    object.__setattr__(local, "entry", entry_of(unit, rows, first))
    return local


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """Return what fetches on the only rank of a job; with rotating experts if it is told so."""

    def record_of(indexes: Mapping[int, Index], met: Any, position: int) -> Any:
        return indexes[0].records[position]

    monkeypatch.setattr(divided, "make_record", record_of)
    parameters = [local_rows(unit, 8, 0) for unit in UNITS]

    def run(*left: Left, rotates: bool = False, others: int = 0) -> tuple[Fetched, Readers]:
        topology = Topology(ranks=tuple(map(rank_info, range(1 + others))))
        by_path = {each.path: each for each in left}

        def open_source(source: Source) -> StateReader:
            return by_path[source.version.path]

        def fold(
            own: Overview, merge_all: Callable[[Sequence[Overview]], Overview], _: Any
        ) -> Overview:
            sources = plan_of(left).sources_of(0)
            return merge_all(
                [own]
                + [
                    look_at_share(in_order(sources), sources, Readers(open_source), topology, rank)
                    for rank in range(1, 1 + others)
                ]
            )

        met: Any = SimpleNamespace(
            site=SimpleNamespace(rank=0, node="n", topology=topology),
            strategy=SimpleNamespace(
                always=UNITS[:1] if rotates else UNITS,
                rotation=Rotation(
                    units=frozenset(UNITS[1:] if rotates else ()), is_empty=not rotates
                ),
            ),
            live=SimpleNamespace(
                catalog=UnitCatalog(parameters, leaves_out_frozen=False),
                model_places=ModelPlaces(),
            ),
            ranks=SimpleNamespace(
                stage=SimpleNamespace(gather=lambda each, _: [each]),
                everyone=SimpleNamespace(fold=fold),
            ),
        )
        readers = Readers(open_source)
        return DividedFetching(plan_of(left), met, readers, {}, None).fetch(), readers

    return run


def tensors_of(fetched: Fetched, unit: UnitId) -> dict[str, torch.Tensor]:
    found = fetched.units[str(unit)]
    return {
        each.key: torch.frombuffer(
            found.content, dtype=torch.float32, count=24, offset=each.offset
        ).view(8, 3)
        for each in found.entry.tensors
    }


def check_is_whole(fetched: Fetched, unit: UnitId, iteration: int = NOW) -> None:
    for kind, tensor in tensors_of(fetched, unit).items():
        assert torch.equal(tensor, whole(unit, kind, iteration))


def test_tensors_are_put_together_and_the_index_is_that_of_this_rank(fetch: Fetch) -> None:
    fetched, _ = fetch(Left(1), Left(0))
    assert fetched.missing == ()
    for unit in UNITS:
        check_is_whole(fetched, unit)
        entry = fetched.units[str(unit)].entry
        assert checksum(fetched.units[str(unit)].content) == entry.checksum
    assert fetched.index is not None
    assert (fetched.index.rank, fetched.index.units) == (0, {})
    assert fetched.sources == {MEMORY: 2}


def test_units_of_another_iteration_than_the_state_are_never_taken_for_it(fetch: Fetch) -> None:
    old = {EMBEDDING: NOW, EXPERT: NOW - 2}
    for ages in ((old, old), (old, dict.fromkeys(UNITS, NOW))):  # all of it, and half of it
        fetched, _ = fetch(*(Left(rank, ages=each) for rank, each in enumerate(ages)))
        assert any(f"whole {EXPERT}" in each for each in fetched.missing)
        assert str(EXPERT) not in fetched.units


def test_an_expert_that_only_some_snapshots_hold_keeps_its_age(fetch: Fetch) -> None:
    ages = {EMBEDDING: NOW, EXPERT: NOW - 2}
    fetched, _ = fetch(Left(0, ages=ages), Left(1, ages=ages), rotates=True)
    assert fetched.missing == ()
    check_is_whole(fetched, EXPERT, NOW - 2)
    version = fetched.rotation.versions[str(EXPERT)]
    assert (version.iteration, version.routed_tokens) == (NOW - 2, NOW - 2)


def test_an_expert_of_which_ranks_have_different_ages_continues_from_none(fetch: Fetch) -> None:
    left = [Left(rank, ages={EMBEDDING: NOW, EXPERT: NOW - rank}) for rank in range(2)]
    fetched, _ = fetch(*left, rotates=True)
    assert str(EXPERT) not in fetched.units
    assert fetched.missing


def test_an_expert_that_was_never_saved_is_refused_with_the_remedy(fetch: Fetch) -> None:
    fetched, _ = fetch(*(Left(rank, ages={EMBEDDING: NOW}) for rank in range(2)), rotates=True)
    assert fetched.missing == (
        f"{EXPERT}: nothing of it was saved. Start in the layout of that run until every expert was",
    )


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_moments_that_nobody_has_stay_absent_and_those_that_some_have_are_refused(
    fetch: Fetch, ranks: tuple[int, ...]
) -> None:
    left = [Left(rank, absent=KINDS[1:] if rank in ranks else ()) for rank in range(2)]
    fetched, _ = fetch(*left)
    if len(ranks) == 2:
        assert fetched.missing == ()
        assert [each.is_absent for each in fetched.units[str(EXPERT)].entry.tensors] == [
            kind in KINDS[1:] for kind in KINDS
        ]
    else:
        assert f"exp_avg of {EXPERT}.weight" in fetched.missing


def test_a_rank_opens_no_index_that_has_nothing_of_what_it_needs(fetch: Fetch) -> None:
    others = [Left(rank, unit=OTHER) for rank in (2, 3, 4)]
    fetched, readers = fetch(Left(0), Left(1), *others, others=4)
    assert fetched.missing == ()
    check_is_whole(fetched, EXPERT)
    assert {each.version.rank for each in readers._readers} == {0, 1}


def test_a_rank_whose_index_nobody_can_read_is_named_though_others_need_nothing_of_it(
    fetch: Fetch,
) -> None:
    other = Left(2, unit=OTHER)
    other.index = msgspec.structs.replace(other.index, iteration=NOW + 1)
    fetched, _ = fetch(Left(0), Left(1), other, others=1)
    assert fetched.missing == ("index of rank 2 of the other layout",)


def test_a_damaged_copy_is_replaced_by_one_of_another_node_or_refused(fetch: Fetch) -> None:
    damaged = Left(0, is_damaged=True)
    fetched, readers = fetch(damaged, Left(1), Left(0, node="m"))
    assert fetched.missing == ()
    check_is_whole(fetched, EMBEDDING)
    assert any("checksum" in each for each in readers.problems)
    fetched, _ = fetch(damaged, Left(1))
    assert f"{EMBEDDING} of rank 0 of the other layout" in fetched.missing


def test_a_rank_that_needs_a_few_rows_of_a_unit_reads_no_more_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_GAP_BYTES", 0)
    local = local_rows(EMBEDDING, 2, 3)  # rows 3 and 4, of both ranks
    left = [Left(0), Left(1)]
    by_path = {each.path: each for each in left}
    findings = Findings(
        Readers(lambda source: by_path[source.version.path]),
        plan_of(left).sources_of(0),
    )
    findings.look_at_all()
    catalog = UnitCatalog([local], leaves_out_frozen=False)
    reading = DividedUnits(findings, catalog, 0)
    found = reading.read(EMBEDDING, Level.FULL, None, (0, NOW))
    for each in found.entry.tensors:
        rows = torch.frombuffer(found.content, dtype=torch.float32, count=6, offset=each.offset)
        assert torch.equal(rows.view(2, 3), whole(EMBEDDING, each.key, NOW)[3:5])
    assert [each.asked_bytes for each in left] == [3 * 3 * 4] * 2
    assert (reading.needed_bytes, reading.read_bytes) == (72, {"n": 72})
