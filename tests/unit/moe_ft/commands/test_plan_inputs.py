"""Models, clusters and measured runs that `plan` reads."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.commands.plan_inputs import (
    cluster_names,
    model_names,
    read_cluster,
    read_model,
    read_run,
)
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from tests.unit.examples.model_files import read_model as read_file
from tests.unit.examples.test_model_files import CONFIGS
from tools.pictures.plots import measured, table_with

QUICK = ("gpt-125m-8e", "lazarus-gpt-s", "qwen-moe", "mixtral-8x7b")
SLOW = [name for name in model_names() if name not in QUICK]


def built(name: str) -> PlannedJob:
    """Return the job of a preset."""
    model = read_model(name)
    command = read_command([*model.flags, "--moe-ft-strategy", "dense"])
    assert model.nodes is not None
    return plan_job(command, MeasuredTimes(), world_size=8 * model.nodes, ranks_per_node=8)[0]


def check_counts(name: str) -> None:
    """Check the parameters of a preset against the published numbers."""
    model, job = read_model(name), built(name)
    further = sum(
        count
        for stage in job.stages
        for unit, count in stage.elements.items()
        if unit.block == "mtp"
    )
    assert job.model.num_parameters - further == pytest.approx(model.parameters, rel=0.01)
    if model.active is not None and not further:
        assert job.model.active_parameters == pytest.approx(model.active, rel=0.03)


@pytest.mark.parametrize("name", QUICK)
def test_parameters_of_a_preset_are_those_published(name: str) -> None:
    check_counts(name)


@pytest.mark.rest
@pytest.mark.parametrize("name", SLOW)
def test_parameters_of_a_large_preset_are_those_published(name: str) -> None:
    check_counts(name)


@pytest.mark.parametrize(
    "name", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "deepseek_moe_16b"]
)
def test_preset_has_the_shape_of_the_model_file_for_slurm(name: str) -> None:
    ours, theirs = read_model(name.replace("_", "-")).flags, read_file(name).flags
    for flag in ("--num-layers", "--hidden-size", "--num-experts", "--moe-ffn-hidden-size"):
        assert ours[ours.index(flag) + 1] == theirs[theirs.index(flag) + 1]


def test_config_of_hugging_face_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]))
    for path in (tmp_path, tmp_path / "config.json"):
        model = read_model(f"{path}")
        command = read_command([*model.flags, "--moe-ft-strategy", "dense"])
        job, _ = plan_job(command, MeasuredTimes(), world_size=1, ranks_per_node=1)
        assert job.model.num_parameters == pytest.approx(46.7e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral", "--model=mixtral must be one of .* Did you mean mixtral-8x7b or mixtral-8x22b"),
        (
            "/nowhere/config.json",
            "--model=/nowhere/config.json must be a config.json or its folder",
        ),
    ],
)
def test_unknown_model_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(name)


def test_every_cluster_has_its_sources_and_half_of_them_names_another() -> None:
    clusters = [read_cluster(name) for name in cluster_names()]
    assert all(each.sources for each in clusters)
    h100, h200 = read_cluster("dgx-h100"), read_cluster("dgx-h200")
    assert (h200.bandwidth, h200.gpu_bytes) == (h100.bandwidth, 141e9)
    values = h100.values(num_nodes=100, num_streams=1)
    assert values["mtbf_s"][0] == h100.node_mtbf_h * 36
    assert values["storage_bandwidth"] == (
        h100.storage_bandwidth / 8,
        "assumed: --cluster dgx-h100",
    )


@pytest.mark.parametrize(
    ("cluster", "num_streams", "speed", "source"),
    [
        ("dgx-h100", 1, 1.4e9, "measured on a loopback, --moe-ft-streams 1 .* has 40 GB/s"),
        ("dgx-h100", 4, 1.6e9, "measured on a loopback, --moe-ft-streams 4 .* has 40 GB/s"),
        ("azure-a100", 1, 1.25e9, "assumed: --cluster azure-a100"),
    ],
)
def test_replicas_travel_at_the_speed_of_the_transport_at_most_that_of_the_card(
    cluster: str, num_streams: int, speed: float, source: str
) -> None:
    value, found = read_cluster(cluster).values(4, num_streams)["network_bandwidth"]
    assert value == speed and re.match(source, found)
    (row,) = [
        row
        for row in table_with("streams.md", "streams", "GB/s")
        if row["streams"] == f"{num_streams}"
    ]
    assert speed <= 1.01 * 1e9 * measured(row["GB/s"]).middle


def test_cluster_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('like = "dgx-h100"\nbandwidth = 1e9\n')
    found = read_cluster(f"{path}")
    assert (found.bandwidth, found.gpu, found.has_gpus) == (1e9, "H100 SXM 80 GB", True)
    sources = {name: source for name, (_, source) in found.values(1, 1).items()}
    assert sources["bandwidth"] == f"--cluster {path}"  # what the file leaves out is assumed
    assert sources["storage_bandwidth"] == f"assumed: --cluster {path}"
    path.write_text('like = "dgx-h100"\ngpu = "none"\n')
    assert not read_cluster(f"{path}").has_gpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "dgx-h100"\nbandwidth = 0', "bandwidth=0 must be a number, more than 0. Give"),
        ('like = "dgx-h100"\nnode_mtbf_h = "x"', "node_mtbf_h='x' must be a number"),
        ('like = "dgx-h100"\nbandwith = 1', "bandwith is no field of a cluster; its fields are"),
        ('gpu = "x"', 'is missing; .* or add like = "dgx-h100"'),
        ('like = "dgx-h10"', "like=dgx-h10 must be one of .* Did you mean dgx-h100"),
        ("no toml", "cannot be read: .* Give a TOML file"),
    ],
)
def test_cluster_that_cannot_be_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster(f"{path}")


def write_log(directory: Path, rank: int, slower: float) -> None:
    """Write the events of a rank as a run does: a start, a restart after 30 s, a repair in 2 s."""

    def line(time: float, incarnation: int, event: str, **values: Any) -> str:
        head = {"time": time, "rank": rank, "incarnation": incarnation, "event": event}
        return json.dumps({**head, "iteration": 1, **values})

    def iterations(time: float, incarnation: int) -> list[str]:
        times = [9.0, 2.0 * slower]  # the first one after a start warms up
        found = [
            line(time + place, incarnation, "iteration", iteration_s=each, stall_s=0.5)
            for place, each in enumerate(times)
        ]
        snapshot = line(time + 5, incarnation, "snapshot", bytes=100, copy_s=0.5 * slower)
        sent = line(time + 6, incarnation, "replicate", bytes=100, seconds=2.0, peers=[2, 3])
        return [*found, snapshot, sent]

    phases = {"notice": 0.5, "build": 1.0, "swap": 0.5, "recover": 7.0, "catch_up": 9.0}
    lines = [
        line(0, 0, "start"),
        line(1, 0, "protects"),
        *iterations(10, 0),
        line(46, 1, "start"),
        line(47, 1, "recovery"),
        *iterations(60, 1),
        line(80, 2, "repair", phases_s=phases),
        line(81, 2, "start"),
        *iterations(94, 2),
    ]
    (directory / f"rank_{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")


def test_measured_run_gives_the_values_of_its_slowest_rank(tmp_path: Path) -> None:
    for rank, slower in enumerate((1.0, 2.0)):
        write_log(tmp_path, rank, slower)
    run = read_run(tmp_path)
    assert run.values == {
        "iteration_s": 4.0,
        "bandwidth": 100,
        "network_bandwidth": 100,
        "restart_s": 30,
        "repair_s": 2,
        "mtbf_s": 50,
    }
    assert (run.stall_s, run.num_failures) == (0.5, 2)


def test_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from-run=.* must hold the event log"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="--from-run=.*nowhere cannot be read: No such file"):
        read_run(tmp_path / "nowhere")


def test_flags_of_presets_are_words_of_a_shell() -> None:
    for name in model_names():
        words = read_model(name).flags
        assert shlex.split(shlex.join(words)) == list(words)
