"""Facts of a process: its node's name, the GPUs it may use, variables that must be the same everywhere."""

import platform
from pathlib import Path

import pytest
import torch

from moe_ft.config.config import MemoryConfig
from moe_ft.doctor.place import Place
from moe_ft.doctor.ranks import count_gpus, find_facts, find_versions


def test_name_of_the_node_comes_with_its_source() -> None:
    facts = find_facts(Place(rank=2, world_size=4), MemoryConfig(), {"MOE_FT_NODE_ID": "a"})
    assert (facts.rank, facts.node, facts.node_source) == (2, "a", "MOE_FT_NODE_ID")
    assert find_facts(Place(), MemoryConfig(node_id="b"), {}).node_source == "--moe-ft-node-id"
    assert find_facts(Place(), MemoryConfig(), {}).node_source == "the host name"


def test_name_that_cannot_be_a_directory_is_a_problem() -> None:
    facts = find_facts(Place(), MemoryConfig(), {"MOE_FT_NODE_ID": "a/b"})
    assert facts.node == ""
    assert "a/b" in facts.node_problem


def test_variables_of_one_node_alone_are_left_out() -> None:
    given = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "x", "HOME": "/"}
    assert find_facts(Place(), MemoryConfig(), given).variables == {"NCCL_DEBUG": "INFO"}


def test_versions_are_those_of_the_packages() -> None:
    versions = find_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 3)]
)
def test_gpus_are_the_devices_that_the_process_may_use(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, tmp_path) == count
