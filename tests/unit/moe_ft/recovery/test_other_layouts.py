"""A start that finds state of another layout: refused with the flag, or marked so that no rank takes it."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.flag_table import FLAGS, Kind, flag_classes, names_in
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.errors import ConfigError
from moe_ft.format.identity import CUTS, Identity, has_other_layout, layout_of, without_layout
from moe_ft.planning.remains import FoundLog
from moe_ft.recovery.claim import Claimed, memory_of
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import mark_other_layouts
from moe_ft.recovery.meet import Met
from moe_ft.recovery.notices import Notices
from moe_ft.recovery.plan import check_replay, check_settings
from moe_ft.recovery.protect import check_room, clear_of_pools
from moe_ft.recovery.site import Site
from moe_ft.topology import Topology
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, initialized, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, site, start, versions_of, wish

OURS = {"--tensor-model-parallel-size": 2, "--hidden-size": 64, CUTS: "now"}


def identity(world_size: int = 1, **changes: Any) -> Identity:
    theirs = {"--tensor-model-parallel-size": 2, "--hidden-size": 64, CUTS: "now"} | changes
    return Identity(
        job_id="job",
        lineage="run-a",
        history=(start(0, 0),),
        fingerprint=theirs,
        world_size=world_size,
        strategy="dense",
    )


def test_settings_that_divide_state_are_those_of_the_table_and_no_others() -> None:
    layout = {name for text in FLAGS["layout"].values() for name in names_in(text)}
    classes = flag_classes()
    captured = {name for name in layout if classes[name].kind in (Kind.FINGERPRINT, Kind.REPLAY)}
    names = ["--" + name.replace("_", "-") for name in sorted(captured)]
    assert without_layout(dict.fromkeys([*names, CUTS, "--world-size"])) == {}
    kept = ("--hidden-size", "--padded-vocab-size", "--micro-batch-size", "--hidden-dropout")
    assert without_layout(dict.fromkeys(kept)).keys() == {*kept}


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ({}, False),
        ({"world_size": 4}, True),
        ({"--tensor-model-parallel-size": 1}, True),
        ({CUTS: "then"}, True),
        ({"--hidden-size": 32}, False),  # another model, in the same layout
        ({"--expert-model-parallel-size": 2}, False),  # a setting that the other version notes
    ],
)
def test_a_layout_is_another_one_if_it_differs_in_what_both_have_noted(
    changed: dict[str, Any], is_other: bool
) -> None:
    found = identity(**changed)
    assert has_other_layout(found, OURS, 1) == is_other
    assert layout_of(found)


def log(of: Identity) -> FoundLog:
    return FoundLog(
        rank=0,
        iteration=3,
        history=of.history,
        node="a",
        path="rank_00000/boundary_0.json",
        receivers=(),
        numbers=None,
        replay_settings="{}",
        record_settings="{}",
    )


def test_versions_of_another_layout_are_marked_and_its_logs_are_left_out() -> None:
    old = identity(world_size=4)
    new = msgspec.structs.replace(old, history=(*old.history, start(1, 5)), world_size=1)
    inventory = Inventory(logs=[log(old), log(new)])
    for each in (old, new):
        inventory.add_identity("here", each)
        inventory.versions += versions_of(each.history, 5)
    mark_other_layouts(inventory, OURS, 1)
    assert [(each.layout, each.world_size) for each in inventory.versions] == [
        (layout_of(old), 4),
        ("", 0),
    ]
    assert [each.history for each in inventory.logs] == [new.history]


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    with initialized(), ExitStack() as opened:
        met = met_alone(config_of(tmp_path), facts_of(), opened)
        yield replace(met, fingerprint=OURS)


def with_layout(met: Met, layout: str) -> Met:
    config: MoeFtConfig = replace(met.config, recovery=replace(met.config.recovery, layout=layout))
    return replace(met, config=config)


def check(found: Identity, met: Met) -> None:
    inventory = Inventory()
    inventory.add_identity("storage", found)
    check_settings(found, inventory, met, Notices(site(), wish(), None))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"--tensor-model-parallel-size": 1}, "--tensor-model-parallel-size: 1 there, 2 now"),
        ({"world_size": 4}, "4 ranks there, 1 now"),
    ],
)
def test_another_layout_is_refused_with_the_flag_that_allows_it(
    met: Met, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match="add --moe-ft-layout any") as refusal:
        check(identity(**changed), with_layout(met, "same"))
    assert named in str(refusal.value)
    check(identity(**changed), with_layout(met, "any"))


def test_another_model_is_refused_in_any_layout(met: Met) -> None:
    for layout in ("same", "any"):
        with pytest.raises(ConfigError, match="--hidden-size: 32 there, 64 now") as refusal:
            check(
                identity(**{"--hidden-size": 32, "--tensor-model-parallel-size": 1}),
                with_layout(met, layout),
            )
        assert "--moe-ft-layout" not in str(refusal.value)


def test_another_padded_vocabulary_is_refused_with_the_flag_that_decides_it(met: Met) -> None:
    met = replace(met, fingerprint=OURS | {"--padded-vocab-size": 512})
    with pytest.raises(ConfigError, match="--make-vocab-size-divisible-by"):
        check(identity(**{"--padded-vocab-size": 256}), with_layout(met, "any"))


def replay(dropout: float, **changes: Any) -> None:
    settings = {"--hidden-dropout": dropout, "--sequence-parallel": False, "--clip-grad": 1.0}
    made_with = msgspec.json.encode(settings | {"--sequence-parallel": True}).decode()
    versions = versions_of((start(0, 0),), 7, window=3, replay_settings=made_with)
    (plan,), _ = plans_of([replace(each, layout="other", world_size=1) for each in versions])
    check_replay(plan, settings | changes, Notices(site(), wish(), None))


def test_a_window_is_run_again_in_another_layout_unless_iterations_draw_random_numbers() -> None:
    replay(0.0)
    with pytest.raises(ConfigError, match="--clip-grad"):
        replay(0.0, **{"--clip-grad": 2.0})
    with pytest.raises(
        ConfigError, match="--moe-ft-layout=any: iteration 7 is in a window"
    ) as refusal:
        replay(0.1)
    message = str(refusal.value)
    for remedy in (
        "--hidden-dropout 0.1",
        "--exit-interval 1",
        "--densify",
        "persist-dense-interval",
    ):
        assert remedy in message


# Room for both layouts


def site_of(met: Met, num_slots: int = 2, limit: str | None = None) -> Site:
    ranks = [replace(info, slot_bytes=64, num_slots=num_slots) for info in met.site.topology.ranks]
    memory = replace(met.config.memory, host_memory_limit=limit)
    config = replace(met.config, memory=memory)
    return replace(met.site, config=config, topology=Topology(ranks=tuple(ranks)))


@pytest.mark.parametrize(("taken", "expected"), [((), 2), ((2,), 3), ((2, 3, 5), 4)])
def test_pool_of_another_layout_is_not_filled_though_it_has_the_same_geometry(
    met: Met, taken: tuple[int, ...], expected: int
) -> None:
    met = replace(met, site=site_of(met))
    own = own_directory(met.site.node_dir, 0)
    own.mkdir(parents=True)
    for number in taken:
        (own / f"pool_{number}x64.safetensors").touch()
    memory = memory_of(met, met.site.topology)
    before = Claimed(memory=memory, storage=None, lock=None)
    cleared, claimed = clear_of_pools(met, before)
    assert claimed.memory.pool is not None
    assert claimed.memory.pool.num_slots == expected
    assert [info.num_slots for info in cleared.site.topology.ranks] == [expected]


def test_too_little_room_for_both_layouts_is_refused_with_the_sizes(met: Met) -> None:
    site = site_of(met, limit="8KiB")
    own = own_directory(site.node_dir, 0)
    own.mkdir(parents=True)
    (own / "region_0.safetensors").write_bytes(bytes(5000))
    check_room(site, [0])
    with pytest.raises(ConfigError, match="--moe-ft-host-memory-limit=8KiB: node node keeps"):
        check_room(site, [4096])
    with pytest.raises(ConfigError, match="--moe-ft-memory-dir=.* Enlarge it") as refusal:
        check_room(site_of(met), [1 << 60])
    assert "Lower --moe-ft-replication-factor" in str(refusal.value)
