"""Waits of a rank for others: where its thread is in a collective, and which ones it has joined.

The stack tells the first, torch's flight recorder the second. It is on by default, for gloo too, and numbers
the collectives of each group; for gloo it knows no sends and no members. It is read as JSON.
"""

import dis
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from torch._C import _distributed_c10d

from moe_ft.files.private_files import replace_file

# Packages in which a rank waits for what others do, on the CPU, right in one of their calls.
_EXCHANGES = (
    "/torch/distributed/",
    "/deep_ep/",
    "/transformer_engine/pytorch/ep",
    "/megatron/core/transformer/moe/fused_a2a.py",  # which calls both
)
_BACKWARD, _OF_BACKWARD = "/torch/autograd/graph.py", "/torch/autograd/function.py"
_RECORDER = "_dump_fr_trace_json"  # private: without it nothing is known
_MOST_ENTRIES = 200  # of a rank's last ones, in a file


class _Entry(msgspec.Struct):
    """Collective that a rank has joined."""

    process_group: tuple[str, str]  # name and description
    collective_seq_id: int
    profiling_name: str
    is_p2p: bool = False


class _Trace(msgspec.Struct):
    """Dump of a flight recorder, of format 2."""

    entries: list[_Entry] = []


Joined = Mapping[str, Sequence[Any]]  # number and name of the last collective by group
_TRACE = msgspec.json.Decoder(_Trace)
_RAW = msgspec.json.Decoder(dict[str, Any])


def recorded() -> bytes:
    """Return what this process has recorded, as JSON; empty if torch does not tell."""
    dump = getattr(_distributed_c10d, _RECORDER, None)
    try:
        return b"" if dump is None else bytes(dump())
    except RuntimeError:  # of a recorder that has no room
        return b""


def joined(trace: bytes) -> Joined:
    """Return the last collective of each group that a rank has joined; none if nobody can read the trace."""
    try:
        entries = _TRACE.decode(trace).entries
    except msgspec.DecodeError:
        return {}
    found: dict[str, Sequence[Any]] = {}
    for each in entries:
        name, about = each.process_group
        if not each.is_p2p:
            what = each.profiling_name.rpartition(":")[2]
            found[name] = (each.collective_seq_id, f"{what} of {about or f'group {name}'}")
    return found


def not_joined(by_rank: Mapping[int, Joined]) -> dict[str, list[int]]:
    """Return, by the name of a collective that some ranks have joined, those of its group that have not.

    A rank that has never been in a collective of a group is not known to be in it.
    """
    found: dict[str, list[int]] = {}
    for group in dict.fromkeys(name for each in by_rank.values() for name in each):
        last = {rank: each[group] for rank, each in by_rank.items() if group in each}
        number, name = max(map(tuple, last.values()))
        if late := [rank for rank, each in last.items() if each[0] < number]:
            found[f"{name} (number {number})"] = late
    return found


def write_trace(path: Path, trace: bytes) -> None:
    """Write the last entries of a trace to a file; raises OSError, and ValueError if it is no trace."""
    whole = _RAW.decode(trace)
    whole["entries"] = whole.get("entries", [])[-_MOST_ENTRIES:]
    replace_file(path, msgspec.json.encode(whole).decode())


def collective_of(frame: FrameType | None) -> str:
    """Return the collective that a frame is in, and who has called it; empty if it is in none."""
    name = f"{_method(frame)}" if frame is not None and _is_exchange(frame) else ""
    while frame is not None and name:
        code = frame.f_code
        if any(each in code.co_filename for each in _EXCHANGES):
            name = name if code.co_name == "wrapper" else code.co_name
        elif "/torch/" not in code.co_filename:
            return f"{name} ({code.co_name})"
        frame = frame.f_back
    return name


def stack_of(thread: int) -> str:
    """Return where a thread is, for people; empty if it has ended.

    It is without lines of the source, which may be on storage that does not answer.
    """
    frame, lines = sys._current_frames().get(thread), list[str]()
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}\n')
        frame = frame.f_back
    return "".join(reversed(lines))


def is_in_exchange(thread: int) -> bool:
    """Return whether a thread is in a collective with other ranks, or waits for one that it has begun.

    A backward pass on a GPU runs in a thread of torch, for which this one waits.
    """
    frames = sys._current_frames()
    if (frame := frames.get(thread)) is None:
        return False
    if frame.f_code.co_filename.endswith(_BACKWARD):
        of_backward = (each for each in frames.values() if _begins_in(each, _OF_BACKWARD))
        return any(map(_is_exchange, (frame, *of_backward)))
    return _is_exchange(frame)


def _is_exchange(frame: FrameType) -> bool:
    if _method(frame) == "wait":
        return True
    inner: FrameType | None = frame
    while inner is not None:
        name = inner.f_code.co_filename
        if any(each in name for each in _EXCHANGES):
            return True
        if "/torch/" not in name:
            return False
        inner = inner.f_back
    return False


def _begins_in(frame: FrameType, file: str) -> bool:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.endswith(file)


def _method(frame: FrameType) -> str:
    """Return the name of what a frame calls now, if it is no Python function: that has a frame of its own.

    It is read from the code, not from the source, which may be on storage that does not answer.
    """
    names: list[str] = []  # of what is to be called, from the outermost call inwards
    for each in dis.get_instructions(frame.f_code):
        if each.offset > frame.f_lasti:
            break
        if "NULL" in each.argrepr or each.opname == "PUSH_NULL":
            names.append(str(each.argval))
        elif each.opname.startswith("CALL") and each.offset < frame.f_lasti and names:
            names.pop()
    return names[-1] if names else ""
