"""Bytes that ranks send each other over a group, and the values in them, which are decoded by type.

A group connects to any address that stands in the job's store, so what arrives may be of any process. It is
data: its size has a bound, and its type is that of the decoder that the caller gives. Nothing is unpickled.
engine/agreement.py sends values of many ranks through levels of groups.

The first rank of a group leads it. What does not come in the group's time raises RuntimeError.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.msgpack import Decoder

from moe_ft.errors import ExchangeError

_MOST_BYTES = 1 << 30  # what the nodes of 16,384 ranks have found is some 100 MB
_MET_BYTES = 256
# Of a message that comes first: the size of the content, and its beginning, which mostly is all of it.
_FIRST_BYTES, _SIZE_BYTES = 512, 8

BOOL, INT, TEXT, SETTINGS = Decoder(bool), Decoder(int), Decoder(str), Decoder(dict[str, Any])
# Encoded values, as ranks pass them on: in the order of their ranks, and by rank.
CONTENTS, BY_RANK = Decoder(list[bytes]), Decoder(dict[int, bytes])

encode = msgspec.msgpack.Encoder().encode


def decode[Value](content: bytes, decoder: Decoder[Value] | msgspec.json.Decoder[Value]) -> Value:
    """Return a value that another rank has sent; raises ExchangeError if it is not of the type."""
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:  # of deeply nested lists
        kind = getattr(decoder.type, "__name__", decoder.type)
        raise refusal(f"what is no {kind} ({error})") from error


def refusal(what: str) -> ExchangeError:
    """Return the error about something that a rank of this job would not have sent."""
    return ExchangeError(
        f"a rank has sent {what}: probably another process has connected in its place. Start the job again, "
        "in a network that only its nodes reach"
    )


def gather(group: Any, content: bytes) -> list[bytes] | None:
    """Return the contents of all ranks on the leader, None on others. Called by all ranks."""
    if group.rank() != 0:
        _send(group, 0, content)
        return None
    return [content, *(_receive(group, rank) for rank in range(1, group.size()))]


def scatter(group: Any, contents: Sequence[bytes]) -> bytes:
    """Return this rank's of the contents that the leader has, ``[rank]``. Called by all ranks."""
    if group.rank() != 0:
        return _receive(group, 0)
    for rank, content in enumerate(contents[1:], 1):
        _send(group, rank, content)
    return contents[0]


def _send(group: Any, rank: int, content: bytes) -> None:
    first = len(content).to_bytes(_SIZE_BYTES) + content
    for part in (first[:_FIRST_BYTES].ljust(_FIRST_BYTES), first[_FIRST_BYTES:]):
        if part:
            group.send([torch.frombuffer(bytearray(part), dtype=torch.uint8)], rank, 0).wait()


def _receive(group: Any, rank: int) -> bytes:
    first = _receive_part(group, rank, _FIRST_BYTES)
    size = int.from_bytes(first[:_SIZE_BYTES])
    if not 0 < size <= _MOST_BYTES:
        raise refusal(f"a message of {size} bytes")
    content, num_more = first[_SIZE_BYTES:], _SIZE_BYTES + size - _FIRST_BYTES
    return content + _receive_part(group, rank, num_more) if num_more > 0 else content[:size]


def _receive_part(group: Any, rank: int, num_bytes: int) -> bytes:
    part = torch.empty(num_bytes, dtype=torch.uint8)
    group.recv([part], rank, 0).wait()
    return part.numpy().tobytes()


def meet[Value](value: Value, decoder: msgspec.json.Decoder[Value]) -> list[Value]:
    """Return the small values of all ranks of the job. Called by all of them, over torch's own group."""
    content = bytearray(msgspec.json.encode(value).ljust(_MET_BYTES))
    # The CPU, if that group has a backend for it.
    device = dist.distributed_c10d._get_object_coll_device()
    own = torch.frombuffer(content, dtype=torch.uint8).to(device)
    everyone = own.new_empty(dist.get_world_size() * _MET_BYTES)
    dist.all_gather_into_tensor(everyone, own)
    return [decode(each.numpy().tobytes(), decoder) for each in everyone.cpu().split(_MET_BYTES)]
