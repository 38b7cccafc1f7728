"""Jobs with CUDA graphs of layers: strategies get from them what they get from hooks and frozen units.

The graphs are a stand-in (tests/graphs_on_cpus.py); what Megatron has around them is not.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests import deep_ep_on_cpus
from tests.graphs_on_cpus import train_with_graphs
from tests.harness import events
from tests.jobs import PP_EP, CheckpointJob, RepairedJob
from tests.kept_job import ROOT

ROUTER_LOG = "--moe-ft-router-log"
# Graphs are there before the first iteration of a start, which may be one that a recovery runs again.
GRAPHS = (
    *("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "0"),
    *("--moe-ft-allow-untested", "cuda-graphs", "--cuda-graph-modules"),
)
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
FLEX = (
    *("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"),
    *("--moe-router-dtype", "fp32"),
)


def train_with_flex_graphs(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with both stand-ins."""
    deep_ep_on_cpus.install()
    train_with_graphs(flags)


def loads(lines: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """Return the tokens of experts by iteration, those of the last attempt."""
    return {line["iteration"]: line["tokens"] for line in lines}


@pytest.mark.rest
def test_rank_is_replaced_in_place_and_captures_its_own_graphs(repaired: RepairedJob) -> None:
    script = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_graphs.py")
    repaired.run("kill:3@4:backward", extra=(*GRAPHS, "moe_router"), script=script)
    repaired.check([3], [4], [{3, 4}], is_exact=False)
    repaired.set_model(repaired.num_ranks, PP_EP)
    assert repaired.digests() == repaired.reference(), "of a job without graphs"


def test_windows_are_replayed_with_graphs_to_the_same_bits_and_tokens_are_counted_in_them(
    job: CheckpointJob,
) -> None:
    job.train = train_with_graphs
    job.run_with_faults("kill:1@5:backward", flags=[*SPARSE, *GRAPHS, "moe_router", ROUTER_LOG])
    assert len(job.recovered()) == 1 and job.events("recovery")[0]["replayed_iterations"] > 0
    references, flags = job.place.references, [*job.base, ROUTER_LOG]
    assert job.digests() == references.digests(flags, job.num_ranks), "of a job without graphs"
    folder = references._folder_of(flags, job.num_ranks, None) / "events"
    for rank in range(job.num_ranks):
        found = loads(job.events("router_load", rank))
        assert found == loads(events(folder, rank, "router_load")), "the tokens that it has counted"


@pytest.mark.rest
def test_graphs_that_prepare_the_dispatch_of_deepep_are_replayed_too(job: CheckpointJob) -> None:
    job.set_model(2, {"ep": 2}, *FLEX, moe_token_dispatcher_type="flex")
    job.train = train_with_flex_graphs
    graphs = [*GRAPHS, "moe_router", "moe_preprocess"]
    job.run_with_faults("kill:1@5:backward", flags=[*SPARSE, *graphs])
    assert job.events("recovery")[0]["replayed_iterations"] > 0
    job.train = deep_ep_on_cpus.train_with_flex
    assert job.digests() == job.reference()


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["partial", "selective"])
def test_lossy_recovery_with_graphs_loses_the_tokens_that_one_without_them_loses(
    job: CheckpointJob, strategy: str
) -> None:
    results: list[tuple[int, float, Any]] = []
    for train, graphs in ((train_with_graphs, [*GRAPHS, "moe_router"]), (None, [])):
        job.train, job.events_dir = train, job.folder / f"events_{len(results)}"
        job.memory_dir = job.memory_dir.with_name(f"{job.memory_dir.name}_{len(results)}")
        flags = ["--moe-ft-strategy", strategy, *graphs]
        job.run_with_faults("kill:1@5:backward", flags=flags, is_intact=False)
        recovery = job.events("recovery")[0]
        results.append((recovery["lost_tokens"], recovery["plt"], job.digests()))
    assert results[0] == results[1]
    assert results[0][0] > 0 or strategy == "selective"
