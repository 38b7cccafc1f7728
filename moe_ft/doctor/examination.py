"""An examination from its beginning to the exit code: the processes meet, check, and rank 0 prints the table.

Everything ends within the time that it is given, also when ranks or nodes do not answer.
"""

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from moe_ft.addresses import own_address, own_host
from moe_ft.doctor.job import Job, place_on_nodes
from moe_ft.doctor.meeting import Meeting
from moe_ft.doctor.network import Peer, serve
from moe_ft.doctor.node_checks import NO_SECRET, NodeChecks, Roster, Times
from moe_ft.doctor.place import TOKEN_NAME, Place
from moe_ft.doctor.ranks import (
    RankFacts,
    check_gpus,
    check_job,
    check_names,
    check_ranks,
    check_store,
    check_variables,
    check_versions,
    find_facts,
)
from moe_ft.doctor.rows import Row, exit_code, failed, fold, join_nodes, render
from moe_ft.engine.links.listener import PeerListener
from moe_ft.errors import ConfigError, CorruptStateError

# When phases end, as parts of the time; those of a node are in node_checks.py.
_MET, _ROSTER, _ROWS, _LAST = 0.4, 0.45, 0.9, 0.97
_TERMINATED = 143  # as shells have it
_UNREACHABLE = "Look whether rank 0 runs, and whether this port of its node is open and free."
_FOREIGN = (
    f"Set {TOKEN_NAME} to the same random value on all nodes. If it is, another program writes to "
    "this store."
)
_FACTS = msgspec.json.Decoder(RankFacts)
_ROSTERS = msgspec.json.Decoder(Roster)
_ROWS_OF_A_NODE = msgspec.json.Decoder(list[Row])
_CODE = msgspec.json.Decoder(int)
_LEFT = msgspec.json.Decoder(bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An examination as the command line asks for it; the flags of commands/doctor.py say what each means."""

    job: Job
    timeout_s: float
    transfer_bytes: int
    is_strict: bool = False
    is_json: bool = False


def examine(request: Request, place: Place, environment: Mapping[str, str]) -> int:
    """Examine; rank 0 prints the table. Called by all processes of a launch.

    Returns:
        The exit code, the same on all ranks that have answered: 1 if something failed.
    """
    with _ending_within(request.timeout_s, place.rank):
        times = Times(begin_s=time.monotonic(), total_s=request.timeout_s)
        try:
            with ExitStack() as opened:
                return _Examination(
                    request=request,
                    place=place,
                    environment=environment,
                    meeting=Meeting(place, times.end_of(_MET)),
                    times=times,
                    token=place.token or (secrets.token_hex(16) if place.is_alone else NO_SECRET),
                ).run(opened)
        except CorruptStateError as error:  # of what somebody has shown
            return _end_without_table(place, request, str(error), _FOREIGN)
        except (RuntimeError, OSError) as error:  # of the store
            if place.is_alone:
                raise
            return _end_without_table(place, request, f"it failed: {error}", _UNREACHABLE)


def _end_without_table(place: Place, request: Request, problem: str, remedy: str) -> int:
    """Print what is wrong with the store, and return the exit code."""
    host, port = place.master
    line = f"the store at {host}:{port}: {problem}".splitlines()[0]
    _print([failed("meeting", f"rank {place.rank}", line, remedy)], is_json=request.is_json)
    return 1


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


def _print(rows: list[Row], *, is_json: bool) -> None:
    if is_json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode(), flush=True)
    else:
        print(render(fold(rows)), flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Examination:
    """One process's part; the token is that of the connections between nodes."""

    request: Request
    place: Place
    environment: Mapping[str, str]
    meeting: Meeting
    times: Times
    token: str

    def run(self, opened: ExitStack) -> int:
        facts = find_facts(self.place, self.request.job.config.memory, self.environment)
        host, problem = self._own_host()
        listener = PeerListener(host, serve, lambda reason: None)
        opened.callback(listener.close)
        if problem:
            facts = msgspec.structs.replace(facts, address_problem=problem)
        else:
            facts = self._listen(facts, host, listener)
        self.meeting.show("facts", facts)
        rows = self._lead() if self.place.rank == 0 else []
        end_s = self.times.end_of(_ROSTER)
        roster = self.meeting.collect("roster", [0], end_s, _ROSTERS).get(0)
        if roster is None:
            line = f"rank 0 did not answer within {self.times.total_s * _ROSTER:.0f} s"
            remedy = "Look at its output and its node."
            _print([failed("meeting", f"rank {self.place.rank}", line, remedy)], is_json=False)
            return 1
        listener.admit(self.token)
        own = roster.nodes.get(facts.node)
        if own is not None and own.rank == self.place.rank:
            self.meeting.show("rows", self._check_node(facts, roster, opened))
        return self._conclude(rows, roster) if self.place.rank == 0 else self._wait()

    def _own_host(self) -> tuple[str, str]:
        """Return the address that a rank of training listens on, and why it would refuse to."""
        master, memory = self.place.master[0], self.request.job.config.memory
        try:
            environment = {**self.environment, "MASTER_ADDR": master}
            return own_address(memory.network_interface, environment), ""
        except ConfigError as error:
            return own_host(master), str(error)

    def _listen(self, facts: RankFacts, host: str, listener: PeerListener) -> RankFacts:
        """Listen as a rank of training does; return the facts with the address, or why there is none."""
        try:
            address = (host, listener.start())
        except OSError as error:
            return msgspec.structs.replace(facts, address_problem=str(error))
        return msgspec.structs.replace(facts, address=address)

    def _check_node(self, facts: RankFacts, roster: Roster, opened: ExitStack) -> list[Row]:
        return NodeChecks(
            job=self.request.job,
            node=facts.node,
            num_local=facts.local_world_size,
            token=self.token,
            roster=roster,
            meeting=self.meeting,
            times=self.times,
            transfer_bytes=self.request.transfer_bytes,
            opened=opened,
        ).run()

    def _lead(self) -> list[Row]:
        """Show the roster, and return the rows that follow from what ranks say of themselves. Rank 0 only."""
        ranks = range(self.place.world_size)
        found = self.meeting.collect("facts", ranks, self.times.end_of(_MET), _FACTS)
        everyone = [found[rank] for rank in sorted(found)]
        nodes: dict[str, Peer] = {}
        for each in everyone:
            peer = Peer(
                node=each.node,
                rank=each.rank,
                address=each.address,
                problem=each.address_problem,
            )
            nodes.setdefault(each.node, peer)
        placement = place_on_nodes(self.request.job, [each.node for each in everyone])
        self.meeting.show("roster", Roster(nodes=nodes, peers=placement.nodes()))
        rows = [*self._rows_of(everyone), placement.row()]
        if self.request.job.ranks is not None and self.request.job.num_nodes > 1:
            rows.append(self.request.job.spare_row(len(nodes)))
        if silent := [str(rank) for rank in ranks if rank not in found]:
            seconds = self.times.total_s * _MET
            line = f"no answer within {seconds:.0f} s; {len(everyone)} ranks answered"
            remedy = "Look at the nodes that are missing below, or have fewer ranks there."
            rows.insert(0, failed("silent ranks", f"rank {join_nodes(silent)}", line, remedy))
        return rows

    def _rows_of(self, everyone: list[RankFacts]) -> list[Row]:
        job, environment = self.request.job, self.environment
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

    def _conclude(self, rows: list[Row], roster: Roster) -> int:
        """Print the table and tell the others the exit code. Rank 0 only."""
        end_s, seconds = self.times.end_of(_ROWS), self.times.total_s * _ROWS
        speakers = {each.rank: each.node for each in roster.nodes.values()}
        found = self.meeting.collect("rows", speakers, end_s, _ROWS_OF_A_NODE)
        for rank, node in speakers.items():
            line = f"rank {rank} answered, then fell silent for {seconds:.0f} s"
            silent = failed("silent ranks", node, line, "Look at this node.")
            rows += found.get(rank, [silent])
        code = exit_code(rows, strict=self.request.is_strict)
        _print(rows, is_json=self.request.is_json)
        self.meeting.show("end", code)
        if not (self.place.is_alone or self.place.has_agent_store):
            # They read the code from this process.
            others = range(1, self.place.world_size)
            end_s = min(time.monotonic() + 2.0, self.times.end_of(_LAST))
            self.meeting.collect("left", others, end_s, _LEFT)
        return code

    def _wait(self) -> int:
        """Return the exit code that rank 0 tells."""
        found = self.meeting.collect("end", [0], self.times.end_of(_LAST), _CODE)
        self.meeting.show("left", value=True)
        return found.get(0, 1)
