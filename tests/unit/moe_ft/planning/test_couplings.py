"""Couplings of stages follow from Megatron's flags, and agree with where Megatron sums gradients."""

import argparse
import inspect
import re
from types import SimpleNamespace

import pytest
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import (
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training import arguments as megatron_arguments

from moe_ft.planning.couplings import (
    SharedWeights,
    mtp_stages_of,
    report_couplings,
    shared_weights_of,
)

TIED = "tied word embeddings (no --untie-embeddings-and-output-weights)"
MTP = "the word embedding with the layers of --mtp-num-layers"
UNTIED = "--untie-embeddings-and-output-weights"


def of_flags(*flags: str) -> SharedWeights:
    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return shared_weights_of(parser.parse_args(flags))


def stages_of(*flags: str) -> list[tuple[int, ...]]:
    return [each.stages for each in report_couplings(of_flags(*flags)).couplings]


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ([], [(0, 3)]),
        ([UNTIED], []),
        ([UNTIED, "--mtp-num-layers", "2"], [(0, 3)]),
        (["--mtp-num-layers", "1"], [(0, 3)]),
        (
            [UNTIED, "--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Et|t|m|L"],
            [(0, 2)],
        ),
        (["--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Et|t|m|L"], [(0, 2, 3)]),
        ([UNTIED, "--position-embedding-type", "learned_absolute"], []),
        ([UNTIED, "--position-embedding-type", "rope"], []),
        ([UNTIED, "--calculate-per-token-loss", "--moe-router-enable-expert-bias"], []),
    ],
)
def test_coupled_stages_follow_from_megatrons_flags(
    flags: list[str], stages: list[tuple[int, ...]]
) -> None:
    assert stages_of("--pipeline-model-parallel-size", "4", *flags) == stages


@pytest.mark.parametrize(
    ("layout", "num_stages"),
    [
        ("Et|t|t|mL", 4),
        ("Ettt|(tt|)*29,m|L", 16),
        ("Et*3|(tt|)*5m|L", 2),
        ("E,t*2|(t|)*2,t|tm|L", 3),
        ("Et|tL", 2),
        ("Et*2m*2L", 1),
    ],
)
def test_stages_with_mtp_layers_are_those_that_megatron_reads_from_the_layout(
    layout: str, num_stages: int
) -> None:
    config = SimpleNamespace(
        mtp_num_layers=1,
        pipeline_model_parallel_layout=PipelineParallelLayerLayout(layout, num_stages),
    )
    stages = list(range(num_stages))
    assert list(mtp_stages_of(layout, num_stages)) == sorted(get_mtp_ranks(stages, config))


def test_group_of_position_embeddings_is_the_first_stage_and_that_of_word_embeddings_has_two() -> (
    None
):
    ranks = [1, 5, 9]
    assert default_position_embedding_ranks(ranks) == ranks[:1]
    assert default_embedding_ranks(ranks) == [ranks[0], ranks[-1]]


def test_nothing_else_sums_gradients_over_stages_in_the_installed_megatron() -> None:
    # A new one in this list must be examined: if it sums over stages, it is a coupling.
    module = inspect.getmodule(finalize_model_grads)
    source = inspect.getsource(finalize_model_grads)
    assert module is not None
    assert sorted(re.findall(r"    (_(?:allreduce|update)_\w+)\(", source)) == [
        "_allreduce_conditional_embedding_grads",  # over all stages: has_common
        "_allreduce_non_tensor_model_parallel_grads",  # tensor-parallel ranks
        "_allreduce_position_embedding_grads",  # position_stages
        "_allreduce_replicated_grads_over_gtp_remat_group",  # weight shards, which are refused
        "_allreduce_router_grads",  # over all stages: has_common
        "_allreduce_word_embedding_grads",  # is_tied, mtp_stages
        "_update_router_expert_bias",  # ranks of a stage
        "_update_router_qb_beta",  # data-parallel ranks
    ]
    for name in ("has_cond_embedder", "flextron"):
        assert name in inspect.getsource(module)
        assert name not in inspect.getsource(GPTModel), "GPTs have none of these parameters"


def test_untied_model_without_mtp_has_nothing_to_say() -> None:
    report = report_couplings(SharedWeights(num_stages=4, is_tied=False))
    assert (report.couplings, report.line, report.is_global) == ((), "", False)


def test_stages_with_shared_weights_run_together_and_the_line_says_why() -> None:
    report = report_couplings(SharedWeights(num_stages=4, is_tied=True))
    assert not report.is_global
    assert report.line == f"stages 0 and 3 always run iterations again together: they share {TIED}"


def test_couplings_with_a_common_stage_are_one_with_both_reasons() -> None:
    report = report_couplings(SharedWeights(num_stages=4, is_tied=True, mtp_stages=(2,)))
    assert [(each.stages, each.reason) for each in report.couplings] == [
        ((0, 2, 3), f"{TIED} and {MTP}")
    ]
    assert report.line.startswith("stages 0, 2 and 3 always run iterations again together")


def test_couplings_without_a_common_stage_stay_apart() -> None:
    weights = SharedWeights(num_stages=6, is_tied=True, position_stages=(2, 4))
    report = report_couplings(weights)
    assert [each.stages for each in report.couplings] == [(0, 5), (2, 4)]
    assert "; stages 2 and 4 always run iterations again together" in report.line


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (SharedWeights(num_stages=2, is_tied=True), TIED),
        (SharedWeights(num_stages=2, is_tied=False, mtp_stages=(1,)), MTP),
        (
            SharedWeights(num_stages=4, is_tied=False, has_common=True),
            "parameters that Megatron sums over all stages",
        ),
    ],
)
def test_recoveries_are_global_if_all_stages_are_coupled(
    weights: SharedWeights, reason: str
) -> None:
    report = report_couplings(weights)
    assert report.is_global
    assert report.line == (
        f"recoveries that run iterations again are global: all {weights.num_stages} stages share {reason}"
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_recoveries_of_a_single_stage_are_global_and_nothing_is_coupled(is_tied: bool) -> None:
    report = report_couplings(SharedWeights(num_stages=1, is_tied=is_tied, mtp_stages=(0,)))
    assert (report.couplings, report.is_global) == ((), True)
    assert report.line == (
        "recoveries that run iterations again are global: the job has one pipeline stage"
    )


def test_group_that_a_script_has_chosen_counts_only_if_the_embedding_has_copies() -> None:
    tied, untied = (
        SharedWeights(num_stages=4, is_tied=is_tied, embedding_group=(0, 1, 3))
        for is_tied in (True, False)
    )
    assert [each.stages for each in report_couplings(tied).couplings] == [(0, 1, 3)]
    assert report_couplings(untied).couplings == ()
