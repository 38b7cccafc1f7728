"""Identity of a start: of one that begins a run, and of one that continues a state."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from moe_ft.format.identity import Identity, Start
from moe_ft.planning.recovery import Plan
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.start import make_identity
from tests.unit.moe_ft import builders
from tests.unit.moe_ft.recovery.meetings import FINGERPRINT, config_of, facts_of, met_alone
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of

FIRST, LEFT = start(0, 0, "first"), start(4, 9, "left")


def identity_of(
    folder: Path,
    plan: Plan | None = None,
    inventory: Inventory | None = None,
    *,
    is_chosen: bool = False,
) -> Identity:
    """Return the identity of a start that has found something."""
    config = config_of(folder)
    facts = replace(
        facts_of(iteration=3, began_with="--finetune"), replay_settings={"--clip-grad": 1.0}
    )
    with ExitStack() as opened:
        met = met_alone(config, facts, opened)
        return make_identity(met, inventory or Inventory(), plan, is_chosen=is_chosen)


def test_start_that_begins_a_run_names_it(tmp_path: Path) -> None:
    found = identity_of(tmp_path)
    assert found == Identity(
        job_id="job",
        lineage="run-new",
        history=(Start(number=0, resumed_at=3, name="new"),),
        fingerprint=FINGERPRINT,
        world_size=1,
        strategy="dense",
        replay_settings={"--clip-grad": 1.0},
        began_with="--finetune",
    )


def test_start_that_continues_a_run_keeps_its_name_and_what_it_began_with(tmp_path: Path) -> None:
    (plan,), _ = plans_of(versions_of((FIRST,), 7, began_with="--seed-from"))
    found = identity_of(tmp_path, plan, is_chosen=True)
    assert (found.lineage, found.began_with) == ("run-a", "--seed-from")
    assert found.history == (FIRST, Start(number=0, resumed_at=7, name="new", is_chosen=True))


def test_start_counts_on_from_all_that_it_has_found_and_remembers_what_it_leaves(
    tmp_path: Path,
) -> None:
    inventory = Inventory()
    for history in ((FIRST,), (FIRST, LEFT)):
        other = msgspec.structs.replace(builders.make_identity(), history=history)
        inventory.add_identity("somewhere", other)
    (plan,), _ = plans_of(versions_of((FIRST,), 7))
    found = identity_of(tmp_path, plan, inventory)
    assert found.start.number == 5
    assert found.superseded == ("left",)
