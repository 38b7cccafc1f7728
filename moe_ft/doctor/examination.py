"""An examination from its beginning to the exit code: the processes meet, check, and rank 0 prints the table.

One process of each node makes the checks of the node. Everything ends within the time that it is given, also
when ranks or nodes do not answer.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from moe_ft.addresses import own_address, own_host
from moe_ft.doctor.job import ExaminedJob, place_on_nodes
from moe_ft.doctor.machine import check_limits, check_memory
from moe_ft.doctor.meeting import TOKEN_NAME, Meeting, MeetingPlace
from moe_ft.doctor.network import (
    Peer,
    check_clocks,
    check_group,
    check_rates,
    check_reach,
    reach_all,
    serve,
)
from moe_ft.doctor.ranks import (
    ProcessFacts,
    check_gpus,
    check_job,
    check_names,
    check_ranks,
    check_store,
    check_variables,
    check_versions,
    find_facts,
)
from moe_ft.doctor.rows import (
    CheckRow,
    exit_code,
    failed,
    fold,
    guarded,
    join_nodes,
    refused,
    render,
    warned,
)
from moe_ft.doctor.storage import (
    ProbeDirectory,
    ProbeFile,
    check_lock,
    check_read,
    check_semantics,
    check_space,
    check_write,
    write_file,
)
from moe_ft.engine.links.listener import PeerListener
from moe_ft.engine.memory.job_directory import node_directory
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.launches import launch_of
from moe_ft.recovery.persist_directory import trouble_of
from moe_ft.recovery.site import Site
from moe_ft.topology import RankInfo, Topology

# When phases end, as parts of the time: those of all processes, and those of a node.
_MET, _ROSTER, _ROWS, _LAST = 0.4, 0.45, 0.9, 0.97
_NETWORK, _WRITTEN, _READ, _STORAGE = 0.6, 0.7, 0.8, 0.85
_TERMINATED = 143  # as shells have it
_UNREACHABLE = "Look whether rank 0 runs, and whether this port of its node is open and free."
_SET_TOKEN = f"Set {TOKEN_NAME} to the same random value on all nodes."
_FOREIGN = f"{_SET_TOKEN} If it is, another program writes to this store."
# Of a launch without a token: who proves it learns the time of this host, and may send bytes, which are lost.
_NO_SECRET = "moe_ft_doctor"
_NO_NAME = "moe_ft_doctor"  # of a job without one


class Answering(msgspec.Struct, frozen=True):
    """Nodes that have answered, as rank 0 knows them, and those to which each would send what peers keep."""

    nodes: dict[str, Peer]
    peers: dict[str, list[str]]


_FACTS = msgspec.json.Decoder(ProcessFacts)
_ANSWERING = msgspec.json.Decoder(Answering)
_ROWS_OF_A_NODE = msgspec.json.Decoder(list[CheckRow])
_WRITTEN_FILE = msgspec.json.Decoder(ProbeFile)
_CODE = msgspec.json.Decoder(int)
_FLAG = msgspec.json.Decoder(bool)


@dataclass(kw_only=True)
class Examination:
    """One process's part; the flags of commands/doctor.py say what each setting means.

    Attributes:
        environment: of the process.
        transfer_bytes: to send to each peer, and to write to storage.
        begin_s: on the monotonic clock.
        token: of the connections between nodes.
    """

    job: ExaminedJob
    place: MeetingPlace
    timeout_s: float
    transfer_bytes: int
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    is_strict: bool = False
    is_json: bool = False
    begin_s: float = field(default_factory=time.monotonic)
    token: str = ""

    def run(self) -> int:
        """Examine; rank 0 prints the table. Called by all processes of a launch.

        Returns:
            The exit code, the same on all ranks that have answered: 1 if something failed.
        """
        self.token = self.place.token or (
            secrets.token_hex(16) if self.place.is_alone else _NO_SECRET
        )
        with _ending_within(self.timeout_s, self.place.rank):
            try:
                self.meeting = Meeting(self.place, self.end_of(_MET))
                with ExitStack() as self.opened:
                    return self._examine()
            except CorruptStateError as error:  # of what somebody has shown
                return self._end_without_table(str(error), _FOREIGN)
            except (RuntimeError, OSError) as error:  # of the store
                if self.place.is_alone:
                    raise
                return self._end_without_table(f"it failed: {error}", _UNREACHABLE)

    def end_of(self, part: float) -> float:
        """Return when a part of the time has passed."""
        return self.begin_s + part * self.timeout_s

    def _end_without_table(self, problem: str, remedy: str) -> int:
        """Print what is wrong with the store, and return the exit code."""
        host, port = self.place.master
        line = f"the store at {host}:{port}: {problem}".splitlines()[0]
        self._print([failed("meeting", f"rank {self.place.rank}", line, remedy)])
        return 1

    def _print(self, rows: list[CheckRow]) -> None:
        if self.is_json:
            print(msgspec.json.format(msgspec.json.encode(rows)).decode(), flush=True)
        else:
            print(render(fold(rows)), flush=True)

    def _examine(self) -> int:
        facts = find_facts(self.place, self.job.config.memory, self.environment)
        listener, facts = self._listen(facts)
        self.meeting.show("facts", facts)
        rows = self._lead() if self.place.rank == 0 else []
        end_s = self.end_of(_ROSTER)
        self.answering = self.meeting.collect("roster", [0], end_s, _ANSWERING).get(0)
        if self.answering is None:
            line = f"rank 0 did not answer within {self.timeout_s * _ROSTER:.0f} s"
            remedy = "Look at its output and its node."
            print(render([failed("meeting", f"rank {self.place.rank}", line, remedy)]), flush=True)
            return 1
        listener.admit(self.token)
        own = self.answering.nodes.get(facts.node)
        if own is not None and own.rank == self.place.rank:
            checks = NodeChecks(self, self.answering, facts.node, facts.local_world_size)
            self.meeting.show("rows", checks.run())
        return self._conclude(rows) if self.place.rank == 0 else self._wait()

    def _listen(self, facts: ProcessFacts) -> tuple[PeerListener, ProcessFacts]:
        """Listen as a rank of training does; return the facts with the address, or why there is none."""
        master, memory, problem = self.place.master[0], self.job.config.memory, ""
        try:
            environment = {**self.environment, "MASTER_ADDR": master}
            host = own_address(memory.network_interface, environment)
        except ConfigError as error:
            host, problem = own_host(master), str(error)
        listener = PeerListener(host, serve, lambda reason: None)
        self.opened.callback(listener.close)
        try:
            address = None if problem else (host, listener.start())
        except OSError as error:
            address, problem = None, str(error)
        found = msgspec.structs.replace(facts, address=address, address_problem=problem)
        return listener, found

    def _lead(self) -> list[CheckRow]:
        """Show who answers, and return the rows that follow from facts of ranks. Rank 0 only."""
        ranks = range(self.place.world_size)
        found = self.meeting.collect("facts", ranks, self.end_of(_MET), _FACTS)
        everyone = [found[rank] for rank in sorted(found)]
        nodes: dict[str, Peer] = {}
        for each in everyone:
            peer = Peer(
                node=each.node, rank=each.rank, address=each.address, problem=each.address_problem
            )
            nodes.setdefault(each.node, peer)
        peers, failures = place_on_nodes(self.job, [each.node for each in everyone])
        self.meeting.show("roster", Answering(nodes=nodes, peers=peers))
        rows = [*self._rows_of(everyone), failures]
        if self.job.ranks is not None and self.job.num_nodes > 1:
            rows.append(self.job.spare_row(len(nodes)))
        if silent := [str(rank) for rank in ranks if rank not in found]:
            seconds = self.timeout_s * _MET
            line = f"no answer within {seconds:.0f} s; {len(everyone)} ranks answered"
            remedy = "Look at the nodes that are missing below, or have fewer ranks there."
            rows.insert(0, failed("silent ranks", f"rank {join_nodes(silent)}", line, remedy))
        return rows

    def _rows_of(self, everyone: list[ProcessFacts]) -> list[CheckRow]:
        job, environment = self.job, self.environment
        num_nodes = len({each.node for each in everyone}) if job.ranks is None else job.num_nodes
        return [
            *job.rows,
            *check_versions(everyone),
            *check_gpus(everyone, None if job.ranks is None else job.ranks[1]),
            *check_names(everyone, environment),
            *check_ranks(everyone, job.ranks),
            check_job(job.config.memory, environment, is_planned=job.is_given),
            check_store(
                environment,
                restarts=job.restarts,
                backend=job.backend,
                is_alone=num_nodes == 1,
            ),
            *check_variables(everyone),
        ]

    def _conclude(self, rows: list[CheckRow]) -> int:
        """Print the table and tell the others the exit code. Rank 0 only."""
        assert self.answering is not None
        end_s, seconds = self.end_of(_ROWS), self.timeout_s * _ROWS
        speakers = {each.rank: each.node for each in self.answering.nodes.values()}
        found = self.meeting.collect("rows", speakers, end_s, _ROWS_OF_A_NODE)
        for rank, node in speakers.items():
            line = f"rank {rank} answered, then fell silent for {seconds:.0f} s"
            silent = failed("silent ranks", node, line, "Look at this node.")
            rows += found.get(rank, [silent])
        code = exit_code(rows, strict=self.is_strict)
        self._print(rows)
        self.meeting.show("end", code)
        if not (self.place.is_alone or self.place.has_agent_store):
            # They read the code from this process.
            others = range(1, self.place.world_size)
            end_s = min(time.monotonic() + 2.0, self.end_of(_LAST))
            self.meeting.collect("left", others, end_s, _FLAG)
        return code

    def _wait(self) -> int:
        """Return the exit code that rank 0 tells."""
        found = self.meeting.collect("end", [0], self.end_of(_LAST), _CODE)
        self.meeting.show("left", value=True)
        return found.get(0, 1)


@contextmanager
def _ending_within(timeout_s: float, rank: int) -> Iterator[None]:
    """End the process if it is still here after the time: something hangs that cannot be given up."""

    def end() -> None:
        print(f"error: rank {rank} of doctor was not done after {timeout_s:g} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # and clean up
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        timer.cancel()


class NodeChecks:
    """Checks of one node: memory, limits, network, storage. What they write is removed with `opened`."""

    def __init__(
        self, examination: Examination, answering: Answering, node: str, num_local: int
    ) -> None:
        """Check nothing yet; `num_local` are the processes of the examination on this node."""
        self._examination = examination
        self._job = examination.job
        self._nodes = answering.nodes
        self._peers = answering.peers[node]
        self._node = node
        self._is_first = answering.nodes[node].rank == 0
        # Of training, as far as that is known.
        ranks = examination.job.ranks
        self._num_ranks = num_local if ranks is None else ranks[1]
        self._world_size = len(answering.nodes) * num_local if ranks is None else ranks[0]

    def run(self) -> list[CheckRow]:
        """Return all rows of this node."""
        rows = self._guarded("memory dir", self._memory, _NETWORK)
        rows += self._guarded("limits", self._limits, _NETWORK)
        rows += self._guarded("reach", self._network, _NETWORK)
        if self._job.config.storage.persist_dir is not None:
            rows += self._guarded("storage", self._storage, _STORAGE)
        return rows

    def _guarded(
        self, check: str, act: Callable[[], list[CheckRow]], part: float
    ) -> list[CheckRow]:
        return guarded(check, self._node, act, self._examination.end_of(part))

    @property
    def _site(self) -> Site:
        """Place of a rank of training that is alone on this node."""
        memory, job_id = self._job.config.memory, _NO_NAME
        with suppress(ConfigError):  # which check_job reports
            job_id = memory.resolve_job_id(os.environ)
        info = RankInfo(
            rank=0,
            node=self._node,
            stage=0,
            pid=os.getpid(),
            address=None,
            region_bytes=0,
            boundary_slot_bytes=self._job.boundary_bytes,
            num_boundary_slots=self._num_ranks,
        )
        return Site(
            config=self._job.config,
            job_id=job_id,
            node=self._node,
            node_dir=node_directory(memory.memory_dir, job_id, self._node),
            rank=0,
            topology=Topology(ranks=(info,)),
            launch=launch_of(os.environ),
        )

    def _memory(self) -> list[CheckRow]:
        return check_memory(self._site, self._num_ranks, self._job.node_bytes)

    def _limits(self) -> list[CheckRow]:
        stage_size = -(-self._world_size // self._job.num_stages)
        return check_limits(self._node, self._world_size, stage_size)

    def _network(self) -> list[CheckRow]:
        peers, token = dict(self._nodes), self._examination.token
        own = peers.pop(self._node)
        found = reach_all(list(peers.values()) or [own], token)
        rows = check_reach(self._node, found)
        if not peers:
            return rows
        if own.address is not None:
            rows += check_group(self._node, own.address[0], os.environ, socket.gethostname())
        if self._is_first:
            rows += check_clocks(self._node, found)
        reached = [peers[name] for name in self._peers if not isinstance(found[name], str)]
        if reached and token == _NO_SECRET:  # their addresses may be anybody's
            return [
                *rows,
                warned("bandwidth", self._node, "not measured: no token is set", _SET_TOKEN),
            ]
        return rows + check_rates(
            self._node,
            reached,
            token,
            self._examination.transfer_bytes,
            self._job.sent_bytes,
            what=self._job.kept_by_peers,
        )

    def _storage(self) -> list[CheckRow]:
        url = self._job.config.storage.persist_dir
        assert url is not None
        probe = ProbeDirectory(url)
        self._examination.opened.callback(probe.close)
        rows: list[CheckRow] = []
        try:
            probe.open()
            if self._is_first:  # for all
                rows += check_semantics(probe.storage) + check_lock(probe.root)
                rows += check_space(probe.root, self._job.stored_bytes, self._job.num_stored)
            rows += self._write(probe)
        except Exception as error:  # packages of object stores have errors of their own
            rows.append(refused("storage", self._node, trouble_of(self._site, error).refusal))
        return rows + self._read(probe)

    def _write(self, probe: ProbeDirectory) -> list[CheckRow]:
        written = write_file(probe.root, probe.speed_path, self._examination.transfer_bytes)
        self._examination.meeting.show("written", written)
        return check_write(self._node, written, self._job.checkpoint_bytes, self._job.saving_s)

    def _read(self, probe: ProbeDirectory) -> list[CheckRow]:
        """Return the row of a read. No node removes anything before all have read."""
        written = self._collect("written", _WRITTEN, _WRITTEN_FILE)
        try:
            if self._node not in written:
                return []
            return check_read(self._node, probe.root, written, self._job.checkpoint_bytes)
        except OSError as error:
            remedy = "Look at the permissions and the connection of this node."
            return [failed("storage read", self._node, f"{type(error).__name__}: {error}", remedy)]
        finally:
            self._meet("read")
            probe.close()
            # Then whoever has created the persist directory finds it empty.
            self._meet("closed")

    def _meet(self, name: str) -> None:
        """Wait for all nodes, but not for long."""
        self._examination.meeting.show(name, value=True)
        self._collect(name, _READ, _FLAG)

    def _collect[T](self, name: str, part: float, decoder: msgspec.json.Decoder[T]) -> dict[str, T]:
        """Return what the nodes have shown in their part of the time, by node, in their order."""
        ranks = [each.rank for each in self._nodes.values()]
        end_s = self._examination.end_of(part)
        found = self._examination.meeting.collect(name, ranks, end_s, decoder)
        return {each.node: found[each.rank] for each in self._nodes.values() if each.rank in found}
