"""Speed of parity beside replicas: of sending state to peers, and of getting back that of a lost rank.

    python -m benchmarks.parity_speed [--megabytes N] [--repetitions N] [--quick] [--output FILE.md]

Four ranks are a process each on this machine, and each is on a node of its own. All send their region at the
same time: to one peer, which keeps a replica, or a third of it to each of three, which add it to parity. Then
the region of one rank is lost: it is read from that peer, or the three others make it again. In turns; GB/s
of one rank's region. "XOR" is the rate of one core of the holder, without a network.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import PeerConnection, PeerReplicator
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.job_directory import own_directory, replica_directory
from moe_ft.engine.memory.parity import ParityStore, parity_files
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.engine.memory.regions import Region
from moe_ft.files.private_files import make_private
from moe_ft.planning.parity import FoundParity, Rebuilding, group_of_regions
from moe_ft.planning.recovery import Version
from moe_ft.recovery.rebuild import _make_stripes, _take_stripes
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.builders import fill_region, make_record
from tests.unit.moe_ft.peer import HOST, TOKEN, no_fault, replica_of

_NUM_RANKS, _LOST = 4, 3
_PEER = (_LOST + 1) % _NUM_RANKS  # keeps the replica of that rank
_KINDS = ("replicas", "parity")


class Rank:
    """A rank with its region, and what it keeps of others in both ways."""

    def __init__(self, folder: Path, rank: int, num_elements: int) -> None:
        """Fill its memory, and serve it."""
        self.rank = rank
        self.node_dir = folder / f"node{rank}"
        make_private(self.node_dir)
        self.region, self.index = fill_region(
            own_directory(self.node_dir, rank), rank=rank, num_elements=num_elements
        )
        size = self.index.file_bytes
        self.group = group_of_regions(range(_NUM_RANKS), [size] * _NUM_RANKS)
        self.files = parity_files(own_directory(self.node_dir, rank), self.group)
        source = (rank - 1) % _NUM_RANKS
        kept = [Region(replica_directory(self.node_dir, source, rank), at, size) for at in (0, 1)]
        self.spare = Region(own_directory(self.node_dir, rank), 1, size)
        for each in (*self.files, *kept, self.spare):
            each.open()
        self.servers = {kind: PeerServer(self.node_dir, HOST) for kind in _KINDS}
        parity = ParityStore(self.files, rank, self.group)
        memory = ReplicaMemory(regions=tuple(kept), pool=None)
        self.reports = EventQueue()
        for kind, server in self.servers.items():
            server.start()
            server.admit(TOKEN)
            if kind == "parity":
                server.keep({}, self.reports, parity)
            else:
                server.keep({source: memory}, self.reports)

    def meet(self, addresses: dict[str, list[tuple[str, int]]]) -> None:
        """Connect to its peers, by address of each rank's servers."""
        found = {
            kind: [
                RankInfo(
                    rank=rank,
                    node=f"node{rank}",
                    stage=0,
                    pid=1,
                    address=address,
                    region_bytes=self.index.file_bytes,
                )
                for rank, address in enumerate(addresses[kind])
            ]
            for kind in _KINDS
        }
        parts = TOKEN, self.reports, no_fault, Clock(), 1
        stripes = {
            each: self.group.stripe(self.rank, each) for each in self.group.others(self.rank)
        }
        peers = [found["parity"][each] for each in stripes]
        self.senders = {
            "replicas": PeerReplicator(
                [found["replicas"][(self.rank + 1) % _NUM_RANKS]], *parts, {}
            ),
            "parity": PeerReplicator(peers, *parts, stripes),
        }
        self.peer = found["replicas"][_PEER]
        self.met = SimpleNamespace(
            site=SimpleNamespace(
                rank=self.rank,
                node_dir=self.node_dir,
                topology=Topology(ranks=tuple(found["parity"])),
            ),
            token=TOKEN,
            config=MoeFtConfig(),
        )

    def send(self, kind: str, iteration: int) -> None:
        """Send the region to its peers."""
        self.index = replace(self.index, iteration=iteration, records=(make_record(iteration),))
        assert self.senders[kind].replicate(replica_of(self.region, self.index, iteration - 1))

    def read_replica(self) -> None:
        """Read what the peer of the lost rank has, into a region."""
        assert self.peer.address is not None
        folder = replica_directory(Path(), _LOST, _PEER)
        with closing(PeerConnection(self.peer.address, TOKEN)) as connection:
            content = connection.get(str(folder / self.region.data_path.name))
        self.spare.mapping[:] = content

    def order(self) -> Rebuilding:
        """Return what makes the lost rank's state again."""
        at, history = self.index.iteration, self.index.identity.history
        family = self.index.identity.family(at, 1)
        number = next(n for n, each in enumerate(self.files) if each.iteration == at)
        others = [each for each in range(_NUM_RANKS) if each != _LOST]
        folders = {each: own_directory(Path(), each) for each in others}
        return Rebuilding(
            rank=_LOST,
            parities=tuple(
                FoundParity(
                    holder=each,
                    group=self.group,
                    node=f"node{each}",
                    path=str(folder / f"parity_{number}.json"),
                    family=family,
                )
                for each, folder in folders.items()
            ),
            held={
                each: Version(
                    rank=each,
                    iteration=at,
                    lineage="",
                    history=history,
                    node=f"node{each}",
                    path=str(folder / "region_0.json"),
                )
                for each, folder in folders.items()
            },
        )

    def make_stripes(self) -> None:
        """Make the stripe of the lost rank that is this one's."""
        _make_stripes(cast(Any, self.met), self.order())

    def take_stripes(self) -> None:
        """Put the stripes together."""
        memory = SimpleNamespace(regions=(self.region, self.spare))
        _take_stripes(cast(Any, self.met), cast(Any, SimpleNamespace(memory=memory)), self.order())

    def check(self) -> None:
        """Check that what has come back is what was lost, and forget it."""
        end = self.region.num_bytes
        assert self.spare.mapping[:end] == self.region.mapping[:end]
        self.spare.invalidate()
        self.spare.mapping[:] = bytes(end)

    def xor(self) -> float:
        """Return the bytes that one core adds in a second."""
        content = memoryview(self.region.mapping)[: self.group.stripe_bytes]
        begin_s = time.perf_counter()
        self.files[0].add(0, content)
        return len(content) / (time.perf_counter() - begin_s)


def _run(folder: Path, number: int, num_elements: int, pipe: Pipe) -> None:
    rank = Rank(folder, number, num_elements)
    pipe.send({kind: each.address for kind, each in rank.servers.items()})
    while words := pipe.recv():
        name, *given = words
        pipe.send(getattr(rank, name)(*given))


class Job:
    """All ranks, each in its process."""

    def __init__(self, folder: Path, num_elements: int) -> None:
        """Start them."""
        context = multiprocessing.get_context("spawn")
        self._pipes = list[Pipe]()
        self._ranks = []
        for number in range(_NUM_RANKS):
            own, theirs = context.Pipe()
            given = folder, number, num_elements, theirs
            self._ranks.append(context.Process(target=_run, args=given, daemon=True))
            self._ranks[-1].start()
            self._pipes.append(own)
        found = [pipe.recv() for pipe in self._pipes]
        self.ask("meet", {kind: [each[kind] for each in found] for kind in _KINDS})

    def ask(self, *words: object, of: Sequence[int] = range(_NUM_RANKS)) -> list[Any]:
        """Have ranks do something at the same time; return what they answer."""
        for rank in of:
            self._pipes[rank].send(words)
        return [self._pipes[rank].recv() for rank in of]

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self._pipes, self._ranks, strict=True):
            pipe.send(())
            process.join()


def measure(job: Job, num_bytes: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Return bytes per second by way and what is done."""
    found: dict[str, dict[str, list[float]]] = {
        kind: {"send": [], "back": [], "XOR": []} for kind in _KINDS
    }

    def timed(act: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        act()
        return num_bytes / (time.perf_counter() - begin_s)

    def make_again() -> None:
        job.ask("make_stripes", of=[each for each in range(_NUM_RANKS) if each != _LOST])
        job.ask("take_stripes", of=[_LOST])

    back: dict[str, Callable[[], object]] = {
        "replicas": partial(job.ask, "read_replica", of=[_LOST]),
        "parity": make_again,
    }
    for iteration in range(5, 5 + repetitions + 1):
        for kind, rates in found.items():
            sent = timed(partial(job.ask, "send", kind, iteration))
            again = timed(back[kind])
            job.ask("check", of=[_LOST])
            if iteration > 5:  # the first ones connect
                rates["send"].append(sent)
                rates["back"].append(again)
    found["parity"]["XOR"] = [*(job.ask("xor", of=[0])[0] for _ in range(repetitions))]
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    options = read_options(words, megabytes=(256, 6, "of a region"), repetitions=(5, 1))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="parity_") as folder:
        job = Job(Path(folder), (options.megabytes << 20) // 24)  # three units of two float32 each
        try:
            found = measure(job, options.megabytes << 20, options.repetitions)
        finally:
            job.close()
    rows = [
        (kind, *(spread([each / 1e9 for each in rate], ".2f") for rate in rates.values()))
        for kind, rates in found.items()
    ]
    say = conditions(
        f"4 ranks, regions of {options.megabytes} MiB, median (range) of {options.repetitions}."
    )
    headers = ("at peers", "sent, GB/s", "back, GB/s", "XOR, GB/s")
    show([say, markdown_table(rows, headers)], options.output)


if __name__ == "__main__":
    main()
