"""Metrics of a node: where they are served, to whom, and that what cannot be served is refused or said."""

import re
import select
import socket
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from moe_ft.config.config import MemoryConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.engine.background import BackgroundPart
from moe_ft.errors import ConfigError
from moe_ft.loop import metrics
from moe_ft.loop.metrics import LABELS, METRICS, Metrics
from tests.ports import free_port
from tests.unit.moe_ft.commands.runs import write_run
from tests.waiting import wait_for

JOB = MemoryConfig(job_id="lm")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObservabilityConfig:
    """Return settings of local rank 0 of two, of job `lm` on node `n1`."""
    monkeypatch.setenv("MOE_FT_NODE_ID", "n1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.0)
    return ObservabilityConfig(event_log=str(tmp_path), metrics_port=free_port())


@pytest.fixture
def served(config: ObservabilityConfig) -> Iterator[ObservabilityConfig]:
    """Return the settings of metrics that are served."""
    listener = Metrics(config, JOB, 2)
    listener.start()
    yield config
    listener.close()


def samples_of(port: int) -> list[Sample]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return [each for family in text_string_to_metric_families(text) for each in family.samples]


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return values by name, rank and the other label."""
    found = {}
    for each in samples_of(port):
        job_name, node, rank, *further = (*map(each.labels.pop, LABELS), *each.labels.values())
        assert (job_name, node) == ("lm", "n1")
        found[each.name, rank, *further] = each.value
    return found


def test_metrics_are_those_of_the_ranks_of_the_node(
    served: ObservabilityConfig, tmp_path: Path
) -> None:
    for rank in (1, 2, 3, 4):  # local rank 0 is rank 2
        write_run(tmp_path, rank, [5.0, 4.0])
    log = write_run(tmp_path, 3, [])
    log.write("snapshot", 2, bytes=100, seconds=0.5)
    log.write("degraded", 2, part="replicate", reason="x", traceback="")
    log.write("skipped", 2, part="snapshot", reason="x")
    log.write("repair", 2, dead_ranks=[2], hung_s={}, broken_iteration=1, seconds=1.5)
    found = scrape(served.metrics_port)
    assert {each[1] for each in found} == {"2", "3"}
    assert found["moe_ft_iteration", "2"] == 2
    assert found["moe_ft_tokens_total", "3"] == 200
    assert found["moe_ft_loss", "3"] == 4.0
    assert found["moe_ft_snapshot_iteration", "3", "memory"] == 2
    assert ("moe_ft_snapshot_iteration", "3", "peers") not in found
    assert found["moe_ft_snapshot_bytes_total", "3", "memory"] == 100
    assert found["moe_ft_degraded_total", "3", "replicate"] == 1
    assert (found["moe_ft_skipped_total", "3"], found["moe_ft_skipped_total", "2"]) == (1, 0)
    assert (found["moe_ft_repairs_total", "3"], found["moe_ft_repair_seconds_total", "3"]) == (
        1,
        1.5,
    )


def names_of(found: Iterable[tuple[str, ...]]) -> set[str]:
    return {name.removeprefix("moe_ft_").removesuffix("_total") for name, *_ in found}


def test_counters_are_0_before_the_first_event_and_gauges_come_with_it(
    served: ObservabilityConfig, tmp_path: Path
) -> None:
    found = scrape(served.metrics_port)
    counters = {name for name, (kind, *_) in METRICS.items() if kind == "counter"}
    assert names_of(found) == {*counters, "unread_bytes"}
    assert set(found.values()) == {0}
    for part in BackgroundPart:  # an alert on increase() misses a series that begins with 1
        assert ("moe_ft_degraded_total", "2", part.value) in found
    log = write_run(tmp_path, 2, [5.0, 4.0])
    times = {"iteration_s": 2.0, "idle_s": 0.5, "exchange_s": 0.25, "stage": 1}
    log.write("iteration", 3, loss=3.0, num_tokens=1, **times)
    for event in ("snapshot", "read_back"):
        log.write(event, 2, bytes=100, seconds=0.5)
    found = scrape(served.metrics_port)
    assert names_of(found) == set(METRICS)
    assert found["moe_ft_own_seconds", "2", "1"] == 1.25


def test_run_without_a_name_is_told_apart_by_the_id_that_torchrun_drew(
    config: ObservabilityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = "e9db10d9-4b3f-4d5e-8f2d-6a7c1f0d2b3c"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", drawn)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    listener = Metrics(config, MemoryConfig(), 2)
    listener.start()
    assert {each.labels["job_name"] for each in samples_of(config.metrics_port)} == {drawn}
    listener.close()


def test_log_of_earlier_starts_is_left_out(config: ObservabilityConfig, tmp_path: Path) -> None:
    log = write_run(tmp_path, 2, [5.0, 4.0])
    listener = Metrics(config, JOB, 2)
    listener.start()
    log.write("iteration", 3, iteration_s=1.0, loss=None, num_tokens=7)
    found = scrape(config.metrics_port)
    listener.close()
    assert (found["moe_ft_iterations_total", "2"], found["moe_ft_tokens_total", "2"]) == (1, 7)


def test_long_log_is_read_over_several_scrapes(
    served: ObservabilityConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_MOST_BYTES", 200)
    write_run(tmp_path, 2, [5.0] * 20)
    found = [scrape(served.metrics_port)]
    while found[-1]["moe_ft_unread_bytes", "2"]:
        found.append(scrape(served.metrics_port))
    counts = [each["moe_ft_iterations_total", "2"] for each in found]
    assert counts == sorted(counts)
    assert (counts[-1], len(counts) > 5) == (20, True)


def listening_at(port: int) -> set[str]:
    """Return the addresses where this process listens on a port."""
    return {
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.laddr.port == port and each.status == "LISTEN"
    }


def test_only_the_loopback_is_open_unless_an_interface_is_named(
    served: ObservabilityConfig,
) -> None:
    assert listening_at(served.metrics_port) == {"127.0.0.1"}


def test_named_interface_alone_is_open(config: ObservabilityConfig) -> None:
    addresses = {
        name: each.address
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET and name != "lo"
    }
    if not addresses:
        pytest.skip("needs a network interface besides the loopback")
    name, address = next(iter(addresses.items()))
    listener = Metrics(replace(config, metrics_interface=name), JOB, 2)
    listener.start()
    assert listening_at(config.metrics_port) == {address}
    listener.close()
    assert listening_at(config.metrics_port) == set()


def test_nothing_is_opened_without_the_flag_or_by_other_local_ranks(
    config: ObservabilityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(psutil.Process().net_connections())
    Metrics(replace(config, metrics_port=0), JOB, 2).start()
    monkeypatch.setenv("LOCAL_RANK", "1")
    Metrics(config, JOB, 3).start()
    assert len(psutil.Process().net_connections()) == before


def test_port_that_is_taken_is_a_warning_and_ends_no_run(
    config: ObservabilityConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = Metrics(config, JOB, 2)
    with socket.create_server(("127.0.0.1", config.metrics_port)):
        listener.start()
    listener.close()
    said = capsys.readouterr().err
    flag = f"--moe-ft-metrics-port={config.metrics_port}"
    assert f"WARNING moe_ft: no metrics are served: {flag} cannot be opened on 127.0.0.1" in said
    assert "(Address already in use)" in said
    assert "Name a port that is free on all nodes" in said


def test_strangers_that_ask_nothing_take_few_places(
    served: ObservabilityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", None)
    address = ("127.0.0.1", served.metrics_port)
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(address, timeout=60))
            for _ in range(2 * metrics._MOST_CONNECTIONS)
        ]
        # The ones that came first stay; the server closes the others at once.
        for each in strangers[metrics._MOST_CONNECTIONS :]:
            assert each.recv(1) == b""
        assert not select.select(strangers[: metrics._MOST_CONNECTIONS], [], [], 0)[0]
        assert not can_scrape(served.metrics_port)
        strangers[0].close()
        wait_for(lambda: can_scrape(served.metrics_port), "a place that is free again")


def test_stranger_that_asks_nothing_is_sent_away(
    served: ObservabilityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics._Handler.timeout
    monkeypatch.setattr(metrics._Handler, "timeout", 0.01)
    with socket.create_connection(("127.0.0.1", served.metrics_port), timeout=60) as stranger:
        assert stranger.recv(1) == b""


def can_scrape(port: int) -> bool:
    try:
        return bool(scrape(port))
    except OSError:
        return False


def test_interface_that_does_not_exist_is_refused(config: ObservabilityConfig) -> None:
    with pytest.raises(
        ConfigError, match="--moe-ft-metrics-interface=ib9 must be an interface of this host"
    ):
        Metrics(replace(config, metrics_interface="ib9"), JOB, 2).start()


def test_missing_client_library_is_refused_with_the_command_that_installs_it(
    config: ObservabilityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="needs prometheus_client.*pip install prometheus-client"):
        Metrics(config, JOB, 2).start()


def test_page_of_the_metrics_lists_what_is_served() -> None:
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    rows = [
        f"| `moe_ft_{name}{'_total' if kind == 'counter' else ''}` | {kind} | {label} | {text} |"
        for name, (kind, text, label) in METRICS.items()
    ]
    assert re.findall(r"^\| `moe_ft_.*$", page, re.MULTILINE) == rows
