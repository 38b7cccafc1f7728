"""Part of a start, before ranks look for state: what a lost rank had is made again from parity.

Every rank that keeps parity makes one stripe: it takes those of the other survivors out of its XOR. So they
share the work. The result lies in the memory of the rank that replaces the lost one, as if it had never left.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import PurePath

from msgspec import structs
from msgspec.msgpack import Decoder

from moe_ft.engine.memory.parity import ParityFile, ParityHead, ParityIndex, end_of, other_file
from moe_ft.engine.memory.region_stores import RegionStore
from moe_ft.errors import CorruptStateError, SnapshotError
from moe_ft.files.private_files import read_private
from moe_ft.files.progress import note_progress
from moe_ft.format.encoding import decode, encode
from moe_ft.planning.parity import FoundParity, Rebuilding, plan_rebuilding
from moe_ft.planning.shares import Packer, Table, Unpacker
from moe_ft.recovery.claim import Claimed
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.media import connect
from moe_ft.recovery.meet import Met
from moe_ft.saying import say, warn

_PIECE_BYTES = 16 << 20
_SIGHT = Decoder(tuple[Table, list[FoundParity]])
_ORDERS = Decoder(list[Rebuilding])
_PROBLEMS = Decoder(dict[int, str])


def rebuild(met: Met, claimed: Claimed) -> None:
    """Make again what ranks have lost, as far as parity has it. Called by all ranks.

    What cannot be made is said, and the start looks for older state.
    """
    sights = met.ranks.everyone.collect(_look_here(met), _SIGHT)

    def plan() -> list[Rebuilding]:
        assert sights is not None
        unpacker = Unpacker()
        held = [each for table, _ in sights for each in unpacker.versions(table)]
        parities = [each for _, found in sights for each in found]
        return plan_rebuilding(met.facts.world_size, held, parities)

    orders = met.ranks.on_first(plan, _ORDERS)
    if not orders:
        return
    problems = _together(met, lambda order: _make_stripes(met, order), orders)
    intact = [order for order in orders if order.rank not in problems]

    def take(order: Rebuilding) -> None:
        if order.rank == met.site.rank:
            _take_stripes(met, claimed, order)

    problems |= _together(met, take, intact)
    for order in orders if met.site.rank == 0 else ():
        ranks = ", ".join(str(each.holder) for each in order.parities)
        what = f"the state of rank {order.rank} of iteration {order.parities[0].family[0]}"
        if problem := problems.get(order.rank):
            warn(f"{what} cannot be made again from the parity of ranks {ranks}: {problem}")
        else:
            say(f"{what} was made again from the parity of ranks {ranks}")


def _together(
    met: Met, act: Callable[[Rebuilding], None], orders: Sequence[Rebuilding]
) -> dict[int, str]:
    """Let all ranks do their part of orders; return why some failed, by the rank that is made again."""
    own = dict[int, str]()
    for order in orders:
        try:
            act(order)
        except (OSError, SnapshotError) as error:
            own[order.rank] = f"{type(error).__name__}: {error} (on rank {met.site.rank})"
    found: dict[int, str] = {}
    for each in met.ranks.everyone.gather(own, _PROBLEMS):
        found |= each
    return found


def _look_here(met: Met) -> tuple[Table, list[FoundParity]]:
    """Return the whole windows and the parity of this node; nothing on ranks that do not look for it."""
    site, parities = met.site, list[FoundParity]()
    if not site.is_lowest_on_node:
        return Packer().table(), parities
    for path in sorted(site.node_dir.glob("rank_*/parity_*.json")):
        with suppress(OSError):  # what is damaged is lost too
            head = decode(read_private(path), ParityHead, str(path))
            if head.identity.job_id == site.job_id:
                place = str(path.relative_to(site.node_dir))
                parities.append(
                    FoundParity(
                        holder=head.holder,
                        group=head.group,
                        node=site.node,
                        path=place,
                        family=head.family,
                    )
                )
    held = (
        each
        for each in look_at_memory(site.node_dir, site.node, site.job_id).versions
        if not (each.is_replica or each.is_breakpoint)
    )
    return Packer().table(held), parities


def _make_stripes(met: Met, order: Rebuilding) -> None:
    """Make the stripes of a lost rank of which this node has the parity, where this rank is to do it."""
    site = met.site
    for parity in order.parities:
        here = [info.rank for info in site.topology.on_node(parity.node)]
        if here[parity.holder % len(here)] != site.rank:
            continue
        path = site.node_dir / parity.path
        index = decode(read_private(path), ParityIndex, str(path))
        made = ParityFile(
            site.node_dir / other_file(PurePath(parity.path)), parity.group.stripe_bytes
        )
        made.invalidate()
        made.open()
        content = read_private(path.with_suffix(".xor"))
        made.mapping[: len(content)] = content
        for source in index.sources:
            if source.rank == order.rank:
                continue
            held = order.held[source.rank]
            assert held.node is not None
            start, end = parity.group.stripe(source.rank, parity.holder)
            file = str(PurePath(held.path).with_suffix(".safetensors"))
            for at, piece in _read(met, held.node, file, start, min(end, end_of(source))):
                made.add(at - start, piece)
        made.close()


def _take_stripes(met: Met, claimed: Claimed, order: Rebuilding) -> None:
    """Put the stripes of this rank together in one of its regions."""
    parity, *_ = order.parities
    with closing(connect(met, parity.node)) as connection:
        content = bytes(connection.get(parity.path))
    index = decode(content, ParityIndex, f"{parity.path} of node {parity.node}").source(order.rank)
    store = RegionStore(claimed.memory.regions, None)
    store.find()
    region = store.take_region()
    if region.num_bytes != index.file_bytes:
        raise SnapshotError(
            f"its region had {index.file_bytes} bytes, and now has {region.num_bytes}"
        )
    region.open()
    for parity in order.parities:
        start, end = parity.group.stripe(order.rank, parity.holder)
        made = str(other_file(PurePath(parity.path)))
        for at, piece in _read(met, parity.node, made, 0, min(end, end_of(index)) - start):
            region.mapping[start + at : start + at + len(piece)] = piece
    region.commit(encode(structs.replace(index, file=region.data_path.name)), index.iteration)


def _read(met: Met, node: str, file: str, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield a range of a file of a node in pieces, each with its place; raises OSError if it is cut short."""
    with closing(connect(met, node)) as connection:
        for at in range(start, end, _PIECE_BYTES):
            num_bytes = min(_PIECE_BYTES, end - at)
            piece = connection.get(file, at, num_bytes)
            if len(piece) < num_bytes:
                raise CorruptStateError(f"{file} of node {node} has no {num_bytes} bytes at {at}")
            yield at, memoryview(piece)
            note_progress()
