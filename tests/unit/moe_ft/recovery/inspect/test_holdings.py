"""Contents of directories as `inspect` shows them."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from megatron.training.arguments import add_megatron_arguments

from moe_ft.config.flag_table import Kind, flag_classes
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import ConfigError
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import encode
from moe_ft.recovery.inspect.holdings import (
    STOCK_DEFAULTS,
    Holding,
    find_holdings,
    render_holdings,
)
from tests.unit.moe_ft.builders import (
    WindowState,
    fill_region,
    fill_window,
    make_identity,
    make_window,
    persist_window,
)

ENTRIES = list(make_window().index.entries())


def shown(directory: Path, *, lists_units: bool = False) -> str:
    return render_holdings(find_holdings(str(directory)), lists_units=lists_units)


def rows(text: str) -> list[list[str]]:
    """Return the cells of the first table, without its head."""
    table = text.split("\n\n")[0].splitlines()[2:]
    return [re.split(r"  +", line.strip()) for line in table]


def in_memory(tmp_path: Path, **which: Any) -> tuple[Region, WindowState]:
    return fill_window(own_directory(tmp_path, 0), **which)


def on_storage(tmp_path: Path, length: int = 3) -> Path:
    """Write a window of one rank and return its data file."""
    manifest = persist_window(Storage(str(tmp_path)), 7, make_identity(), length)
    return tmp_path / manifest.files[0].data


# Shown


@pytest.mark.parametrize("num_snapshots", [1, 2, 3])
def test_window_in_memory_is_shown_with_how_much_of_it_there_is(
    tmp_path: Path, num_snapshots: int
) -> None:
    in_memory(tmp_path, num_snapshots=num_snapshots)
    (row,) = rows(shown(tmp_path))
    assert row[:2] == [str(4 + num_snapshots), "memory"]
    assert f"{num_snapshots} of 3" in row


def test_window_on_storage_is_shown_whole(tmp_path: Path) -> None:
    on_storage(tmp_path)
    (row,) = rows(shown(tmp_path))
    assert row[:2] == ["7", "storage"]
    assert "3 of 3" in row


def test_window_that_is_not_whole_is_not_described_as_the_newest_state(tmp_path: Path) -> None:
    directory = own_directory(tmp_path, 0)
    fill_window(directory, 0, first_iteration=2)
    fill_window(directory, 1, first_iteration=5, num_snapshots=2)
    text = shown(tmp_path)
    assert [row[0] for row in rows(text)] == ["6", "4"]
    assert "iteration 4, memory: job job" in text
    assert "iteration 6, memory: job job" not in text


def test_newest_state_adds_up_the_windows_of_all_ranks_and_no_others(tmp_path: Path) -> None:
    for rank in (0, 1):
        fill_window(own_directory(tmp_path, rank), 0, rank=rank)
        fill_region(own_directory(tmp_path, rank), 1, rank=rank, iteration=7)
    text = shown(tmp_path, lists_units=True)
    described = text.split("\n\n", 1)[1]
    (line,) = [line for line in described.splitlines() if line.startswith("embedding")]
    single = fill_region(tmp_path / "other", iteration=7)[1].units["embedding"]
    window = make_window().index.units["embedding"]
    assert int(line.split()[-1]) in (2 * single.num_bytes, 2 * window.num_bytes)


def test_units_of_a_window_are_listed_with_their_own_iterations(tmp_path: Path) -> None:
    in_memory(tmp_path)
    lines = [line.split() for line in shown(tmp_path, lists_units=True).splitlines()]
    found = {line[0]: line[1:3] for line in lines if line and line[0].startswith(("layer", "emb"))}
    assert found["layer.0.expert.0"] == ["5", "full"]
    assert found["layer.0.expert.2"] == ["6", "full"]
    assert found["embedding"] == ["7", "full"]


def test_directory_without_state_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no state of moe_ft.*Give a persist directory"):
        find_holdings(str(tmp_path))


def test_state_of_others_further_below_is_not_looked_for(tmp_path: Path) -> None:
    in_memory(tmp_path / "memory" / "job" / "node")
    assert len(find_holdings(str(tmp_path / "memory"))) == 1
    with pytest.raises(ConfigError, match="holds no state of moe_ft.* nothing further below"):
        find_holdings(str(tmp_path))


def test_settings_with_defaults_of_megatron_are_counted_and_listed_when_asked_for() -> None:
    given = {"--seed": 1234, "--swiglu": False, "--add-bias-linear": False, "--num-layers": 4}
    holding = Holding(
        tier="memory",
        place="here",
        iteration=1,
        identity=msgspec.structs.replace(make_identity(), fingerprint=given),
    )
    text = render_holdings([holding], lists_units=False)
    assert "2 more settings have Megatron's defaults: --settings lists them" in text
    assert [name for name in given if name in text] == ["--add-bias-linear", "--num-layers"]
    text = render_holdings([holding], lists_units=False, lists_settings=True)
    assert all(name in text for name in given)


def test_defaults_are_those_of_megatron() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    kept = {name for name, each in flag_classes().items() if each.kind is Kind.FINGERPRINT}
    defaults = {
        f"--{action.dest.replace('_', '-')}": action.default
        for action in parser._actions
        if action.dest in kept and action.default
    }
    assert {
        name: "torch.float32" if value == "fp32" else value for name, value in defaults.items()
    } == STOCK_DEFAULTS


def test_named_pipes_in_the_places_of_files_are_named_without_waiting_for_a_writer(
    tmp_path: Path,
) -> None:
    region, _ = in_memory(tmp_path / "memory")
    manifest = on_storage(tmp_path / "storage").with_name("manifest.json")
    for path in (region.index_path, manifest):
        path.unlink()
        os.mkfifo(path)
    for tier in ("memory", "storage"):
        (found,) = find_holdings(str(tmp_path / tier))
        assert "is not a regular file" in found.problem


def test_memory_that_others_can_write_is_shown_as_what_no_recovery_trusts(tmp_path: Path) -> None:
    region, _ = in_memory(tmp_path)
    region.index_path.chmod(0o666)
    (found,) = find_holdings(str(tmp_path))
    assert "not trusted, as in a recovery" in found.problem
    assert "can be written by other users" in found.problem


def test_breakpoint_is_shown_as_one(tmp_path: Path) -> None:
    region, _ = in_memory(tmp_path)
    for path in (region.index_path, region.data_path):
        path.rename(path.with_name(path.name.replace("region_0", "breakpoint")))
    index = make_window(1).index
    path = own_directory(tmp_path, 0) / "breakpoint.json"
    path.write_bytes(encode(msgspec.structs.replace(index, file="breakpoint.safetensors")))
    (row,) = rows(shown(tmp_path))
    assert row[1] == "breakpoint"
    assert row[-1] == str(path)
