"""The default memory directory is one that nobody else has, and the same one for every start."""

import os
from pathlib import Path

import pytest

from moe_ft.config.rules import default_memory_dir

OWN, STRANGER = os.geteuid(), 65534

pytestmark = pytest.mark.skipif(OWN != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ({}, ""),
        ({"": OWN}, ""),
        ({"": STRANGER}, "_1"),
        ({"": STRANGER, "_1": STRANGER, "_2": OWN}, "_2"),
        ({"_3": OWN}, "_3"),
        ({"": OWN, "_1": OWN}, ""),
        ({"_old": OWN, "_01": OWN}, ""),
    ],
)
def test_default_directory_is_found_by_its_owner_or_is_the_first_free_name(
    tmp_path: Path, owners: dict[str, int], expected: str
) -> None:
    for end, owner in owners.items():
        (tmp_path / f"moe_ft_{OWN}{end}").symlink_to("/nowhere")  # whatever it is
        os.lchown(tmp_path / f"moe_ft_{OWN}{end}", owner, owner)
    assert default_memory_dir(tmp_path) == f"{tmp_path}/moe_ft_{OWN}{expected}"


def test_default_directory_in_a_place_that_is_not_there_is_the_first_name(tmp_path: Path) -> None:
    assert default_memory_dir(tmp_path / "shm") == f"{tmp_path}/shm/moe_ft_{OWN}"
