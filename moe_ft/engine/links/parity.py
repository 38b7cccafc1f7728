"""Receives what other ranks add to the parity that this rank keeps. The other side is peers.py."""

import xxhash

from moe_ft.engine.links.messages import Put, Reply, pass_over, receive
from moe_ft.engine.links.streams import Streams
from moe_ft.engine.links.transport import CHUNK_BYTES, Deadline
from moe_ft.engine.memory.parity import ParityStore
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.errors import CorruptStateError, SnapshotError
from moe_ft.format.encoding import check_found, decode
from moe_ft.format.index import Index


class ParityKeeper:
    """Used by the threads of all connections."""

    def __init__(self, store: ParityStore) -> None:
        self._store = store

    def receive(self, connection: Streams, request: Put, content: bytes) -> Reply:
        """Receive a stretch of a stripe and add it; return what is wrong with it, or nothing.

        Args:
            content: the index of the sender.

        Raises:
            OSError: if it does not arrive in time, or cannot be meant for this rank: the connection ends.
        """
        group, holder, source = self._store.group, self._store.holder, request.source
        is_member = source in group.others(holder)
        start, end = group.stripe(source, holder) if is_member else (0, -1)
        first = request.start_byte - start
        if not 0 <= first <= first + request.data_bytes <= end - start:
            raise ConnectionError(
                f"{request.data_bytes} bytes at byte {request.start_byte} of rank {source} are not of the "
                f"stripe that rank {holder} keeps"
            )
        deadline = Deadline.for_bytes(request.data_bytes)
        version, why_not = None, ""
        try:
            index = decode(content, Index, f"the index of rank {source}")
            if index.rank != source:
                raise CorruptStateError(f"an index of rank {index.rank} from rank {source}")
            version = self._store.begin(index, request.window_byte, request.keep_iteration)
        except (OSError, SnapshotError) as error:
            why_not = str(error)
        if version is None:
            pass_over(connection, request.data_bytes, deadline)
            return Reply(error=why_not)
        found, at = xxhash.xxh3_64(), first
        try:
            while rest := first + request.data_bytes - at:
                piece = receive(connection, min(rest, CHUNK_BYTES), deadline)
                found.update(piece)
                self._store.add(version, at, memoryview(piece))
                at += len(piece)
            check_found(f"a stripe of rank {source}", found.hexdigest(), request.checksum)
        except BaseException as error:
            version.is_broken = True
            if not isinstance(error, CorruptStateError):
                raise
            return Reply(error=str(error))
        try:
            self._store.finish(version, index)
        except OSError as error:
            return Reply(error=str(error))
        return Reply()


def parity_keeper(memory: RankMemory) -> ParityKeeper | None:
    """Return what keeps parity in a rank's memory, which is open; None where there are replicas."""
    if memory.group is None:
        return None
    return ParityKeeper(ParityStore(memory.parity, memory.rank, memory.group))
