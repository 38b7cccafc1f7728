"""Collectives that a rank waits in, and those that some have not joined, as torch has recorded them."""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ft.loop import waits
from moe_ft.loop.waits import collective_of, joined, not_joined, recorded, write_trace

ENTRY = {"process_group": ["1", "TP"], "collective_seq_id": 2, "profiling_name": "nccl:all_gather"}


def trace(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"version": "2.10", "entries": entries}).encode()


def test_recorder_of_torch_tells_the_last_collective_of_each_group_for_gloo() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0], group_desc="experts")
        before = joined(recorded())
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0, group=group)
        dist.barrier()
        found = {key: each for key, each in joined(recorded()).items() if each != before.get(key)}
    finally:
        dist.destroy_process_group()
    assert sorted(each for _, each in found.values()) == [
        "barrier of default_pg",
        "broadcast of experts",
    ]


def test_sends_have_numbers_of_their_own() -> None:
    send = ENTRY | {"is_p2p": True, "collective_seq_id": 9}
    assert joined(trace(ENTRY, send)) == {"1": (2, "all_gather of TP")}
    nameless = ENTRY | {"process_group": ["7", ""]}
    assert joined(trace(nameless)) == {"7": (2, "all_gather of group 7")}


@pytest.mark.parametrize("text", [b"", b"nonsense", b'{"entries": [{"process_group": 1}]}'])
def test_trace_of_another_form_tells_nothing(text: bytes) -> None:
    assert joined(text) == {}


def test_torch_without_a_recorder_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_RECORDER", "gone")
    assert recorded() == b""


def test_ranks_that_are_behind_others_of_their_group_have_not_joined() -> None:
    last: dict[str, Any] = {"0": (5, "all_reduce of world")}
    by_rank: dict[int, dict[str, Any]] = {
        0: last | {"1": (3, "all_gather of TP")},
        1: last | {"1": [2, "barrier of TP"]},  # as JSON has it
        2: {"0": (4, "barrier of world"), "2": (1, "broadcast of DP")},
        3: last,
    }
    assert not_joined(by_rank) == {
        "all_reduce of world (number 5)": [2],
        "all_gather of TP (number 3)": [1],
    }
    assert not_joined({0: last, 3: last}) == {} == not_joined({})


def test_file_of_a_trace_has_its_last_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_MOST_ENTRIES", 1)
    write_trace(tmp_path / "file", trace({"unknown": 1}, ENTRY))
    assert json.loads((tmp_path / "file").read_text()) == {"version": "2.10", "entries": [ENTRY]}
    with pytest.raises(ValueError):
        write_trace(tmp_path / "file", b"")


def test_exception_of_a_collective_tells_which_and_who_called_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(Exception) as caught:
            dist.scatter(torch.ones(1), [torch.ones(2)], src=0)
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    finally:
        dist.destroy_process_group()
    assert collective_of(frames[-1]).startswith("scatter (test_exception")
    assert collective_of(sys._getframe()) == "" == collective_of(None)
