"""Checks that one process of each node makes: memory, limits, network, storage.

examination.py has the order of a whole examination.
"""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from moe_ft.doctor.job import Job
from moe_ft.doctor.machine import check_limits, check_memory
from moe_ft.doctor.meeting import Meeting
from moe_ft.doctor.network import (
    Peer,
    check_clocks,
    check_group,
    check_rates,
    check_reach,
    reach_all,
)
from moe_ft.doctor.place import TOKEN_NAME
from moe_ft.doctor.rows import Row, failed, guarded, refused, warned
from moe_ft.doctor.storage import (
    ProbeDirectory,
    Written,
    check_lock,
    check_read,
    check_semantics,
    check_space,
    check_write,
    write_file,
)
from moe_ft.engine.memory.job_directory import node_directory
from moe_ft.errors import ConfigError
from moe_ft.launches import launch_of
from moe_ft.recovery.persist_directory import trouble_of
from moe_ft.recovery.site import Site
from moe_ft.topology import RankInfo, Topology

# When phases end, as parts of the time that the whole examination has.
_NETWORK, _WRITTEN, _READ, _STORAGE = 0.6, 0.7, 0.8, 0.85
# Of a launch without a token: who proves it learns the time of this host, and may send bytes, which are lost.
NO_SECRET = "moe_ft_doctor"
_NO_NAME = "moe_ft_doctor"  # of a job without one


class Roster(msgspec.Struct, frozen=True):
    """Nodes that have answered, as rank 0 knows them, and those to which each would send replicas."""

    nodes: dict[str, Peer]
    peers: dict[str, list[str]]


_WRITTEN_FILE = msgspec.json.Decoder(Written)
_FLAG = msgspec.json.Decoder(bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Beginning of an examination on the monotonic clock, and the seconds that it has."""

    begin_s: float
    total_s: float

    def end_of(self, part: float) -> float:
        """Return when a part of the time has passed."""
        return self.begin_s + part * self.total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChecks:
    """Checks of one node.

    Attributes:
        num_local: processes of the examination on this node.
        token: of the connections between nodes.
        transfer_bytes: to send to each peer, and to write to storage.
        opened: removes what is written to storage.
    """

    job: Job
    node: str
    num_local: int
    token: str
    roster: Roster
    meeting: Meeting
    times: Times
    transfer_bytes: int
    opened: ExitStack

    def run(self) -> list[Row]:
        """Return all rows of this node."""
        rows = self._guarded("memory dir", self._memory, _NETWORK)
        rows += self._guarded("limits", self._limits, _NETWORK)
        rows += self._guarded("reach", self._network, _NETWORK)
        if self.job.config.storage.persist_dir is not None:
            rows += self._guarded("storage", self._storage, _STORAGE)
        return rows

    def _guarded(self, check: str, act: Callable[[], list[Row]], part: float) -> list[Row]:
        return guarded(check, self.node, act, self.times.end_of(part))

    @property
    def _is_first(self) -> bool:
        return self.roster.nodes[self.node].rank == 0

    @property
    def _num_ranks(self) -> int:
        """Ranks of training on this node."""
        return self.num_local if self.job.ranks is None else self.job.ranks[1]

    @property
    def _site(self) -> Site:
        """Place of a rank of training that is alone on this node."""
        memory, job_id = self.job.config.memory, _NO_NAME
        with suppress(ConfigError):  # which check_job reports
            job_id = memory.resolve_job_id(os.environ)
        info = RankInfo(
            rank=0,
            node=self.node,
            stage=0,
            pid=os.getpid(),
            address=None,
            region_bytes=0,
            boundary_slot_bytes=self.job.boundary_bytes,
            num_boundary_slots=self._num_ranks,
        )
        return Site(
            config=self.job.config,
            job_id=job_id,
            node=self.node,
            node_dir=node_directory(memory.memory_dir, job_id, self.node),
            rank=0,
            topology=Topology(ranks=(info,)),
            launch=launch_of(os.environ),
        )

    def _memory(self) -> list[Row]:
        return check_memory(self._site, self._num_ranks, self.job.node_bytes)

    def _limits(self) -> list[Row]:
        num_nodes = len(self.roster.nodes)
        world_size = num_nodes * self.num_local if self.job.ranks is None else self.job.ranks[0]
        return check_limits(self.node, world_size, -(-world_size // self.job.num_stages))

    def _network(self) -> list[Row]:
        peers = dict(self.roster.nodes)
        own = peers.pop(self.node)
        found = reach_all(list(peers.values()) or [own], self.token)
        rows = check_reach(self.node, found)
        if not peers:
            return rows
        if own.address is not None:
            rows += check_group(self.node, own.address[0], os.environ, socket.gethostname())
        if self._is_first:
            rows += check_clocks(self.node, found)
        reached = [
            peers[name] for name in self.roster.peers[self.node] if not isinstance(found[name], str)
        ]
        if reached and self.token == NO_SECRET:  # their addresses may be anybody's
            remedy = f"Set {TOKEN_NAME} to the same random value on all nodes."
            return [*rows, warned("bandwidth", self.node, "not measured: no token is set", remedy)]
        num_bytes, sent_bytes = self.transfer_bytes, self.job.sent_bytes
        return rows + check_rates(self.node, reached, self.token, num_bytes, sent_bytes)

    def _storage(self) -> list[Row]:
        url = self.job.config.storage.persist_dir
        assert url is not None
        probe = ProbeDirectory(url)
        self.opened.callback(probe.close)
        rows: list[Row] = []
        try:
            probe.open()
            if self._is_first:  # for all
                rows += check_semantics(probe.storage) + check_lock(probe.root)
                rows += check_space(probe.root, self.job.stored_bytes, self.job.num_stored)
            rows += self._write(probe)
        except Exception as error:  # packages of object stores have errors of their own
            rows.append(refused("storage", self.node, trouble_of(self._site, error).refusal))
        return rows + self._read(probe)

    def _write(self, probe: ProbeDirectory) -> list[Row]:
        written = write_file(probe.root, probe.speed_path, self.transfer_bytes)
        self.meeting.show("written", written)
        return check_write(self.node, written, self.job.checkpoint_bytes, self.job.saving_s)

    def _read(self, probe: ProbeDirectory) -> list[Row]:
        """Return the row of a read. No node removes anything before all have read."""
        written = self._collect("written", self.times.end_of(_WRITTEN), _WRITTEN_FILE)
        try:
            if self.node not in written:
                return []
            return check_read(self.node, probe.root, written, self.job.checkpoint_bytes)
        except OSError as error:
            remedy = "Look at the permissions and the connection of this node."
            return [failed("storage read", self.node, f"{type(error).__name__}: {error}", remedy)]
        finally:
            self._meet("read")
            probe.close()
            # Then whoever has created the persist directory finds it empty.
            self._meet("closed")

    def _meet(self, name: str) -> None:
        """Wait for all nodes, but not for long."""
        self.meeting.show(name, value=True)
        self._collect(name, self.times.end_of(_READ), _FLAG)

    def _collect[T](
        self, name: str, deadline_s: float, decoder: msgspec.json.Decoder[T]
    ) -> dict[str, T]:
        """Return what the nodes have shown, by node, in the order of the roster."""
        nodes = self.roster.nodes.values()
        found = self.meeting.collect(name, [each.rank for each in nodes], deadline_s, decoder)
        return {each.node: found[each.rank] for each in nodes if each.rank in found}
