"""Metrics of a real job: scraped while it trains, of both ranks of its node."""

import os
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import pretrain_gpt_moe
from moe_ft.faults import Phase
from moe_ft.loop.faults import Faults
from tests.jobs import NUM_RANKS, CheckpointJob
from tests.ports import free_port
from tests.waiting import wait_for

AT, SCRAPED = 4, "scraped.txt"


def train_and_scrape(flags: list[str]) -> None:
    """Train; in iteration AT rank 0 scrapes until both ranks have told the one before. Runs on every rank."""
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)
    port = flags[flags.index("--moe-ft-metrics-port") + 1]
    folder, enter = Path(flags[flags.index("--moe-ft-event-log") + 1]), Faults.enter_phase

    def scrape() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        (folder / SCRAPED).write_text(text)
        ends = (f'rank="{rank}"}} {AT}.0' for rank in range(NUM_RANKS))
        lines = [line for line in text.splitlines() if line.startswith("moe_ft_iteration{")]
        return all(any(line.endswith(end) for line in lines) for end in ends)

    def enter_phase(faults: Faults, iteration: int, phase: Phase) -> None:
        if (os.environ["RANK"], iteration, phase) == ("0", AT, Phase.FORWARD):
            wait_for(scrape, "the metrics of both ranks")
        enter(faults, iteration, phase)

    Faults.enter_phase = enter_phase  # type: ignore[method-assign,assignment]  # this process only
    pretrain_gpt_moe.main(flags)


def test_scrape_of_a_job_that_trains_has_what_its_event_logs_say(job: CheckpointJob) -> None:
    job.train = train_and_scrape
    port = str(free_port())
    job.run("--moe-ft-metrics-port", port, storage=True).check()
    text = (job.events_dir / SCRAPED).read_text()
    found = {
        (sample.name, sample.labels["rank"], sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for rank in range(NUM_RANKS):
        name = str(rank)
        iterations = [each for each in job.events("iteration", rank) if each["iteration"] <= AT]
        assert found["moe_ft_iterations_total", name, ""] == AT
        assert found["moe_ft_tokens_total", name, ""] == sum(
            each["num_tokens"] for each in iterations
        )
        assert found["moe_ft_loss", name, ""] == iterations[-1]["loss"]
        newest = int(found["moe_ft_snapshot_iteration", name, "memory"])
        sizes = [
            each["bytes"] for each in job.events("snapshot", rank) if each["iteration"] <= newest
        ]
        assert 0 < newest <= AT
        assert found["moe_ft_snapshot_bytes_total", name, "memory"] == sum(sizes)
