"""Command lines that are planned: what is completed, noted and refused, and the stages that are built."""

from typing import Any

import pytest
import torch.distributed as dist

from megatron.fault_tolerance.program import stages
from megatron.fault_tolerance.program.plan import plan_job
from moe_ft.commands.command_line import read_command
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.planning.described import LARGE, SMALL, planned_job

DENSE = ("--moe-ft-strategy", "dense")


def planned(
    *flags: str, world_size: int = 4, runs_script: bool = False
) -> tuple[PlannedJob, list[str]]:
    config = read_command([*flags, *DENSE]).config
    return plan_job(
        [*flags, *DENSE],
        config,
        MeasuredTimes(),
        world_size=world_size,
        ranks_per_node=4,
        runs_script=runs_script,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SMALL[2:], "--num-layers not given: the sizes of the model follow"),
        ((*SMALL, "--hidden-size", "0"), "--hidden-size=0 must be a whole number, at least 1"),
        ((*SMALL, "--num-layers", "four"), "argument --num-layers: invalid int value: 'four'"),
        (
            (*SMALL, "--fp8-formats", "x"),
            "--fp8-formats is neither a flag .* Did you mean --fp8-format",
        ),
        ((*SMALL, "--swiglu", "3"), "'3' belongs to no flag"),
        ((*SMALL, "--use-checkpoint-args"), "--use-checkpoint-args cannot be planned"),
        ((*SMALL, "--tokenizer-type", "HuggingFaceTokenizer"), "the size of the vocabulary is not"),
        (
            (*SMALL, "--position-embedding-type", "learned_absolute"),
            "--max-position-embeddings not",
        ),
        ((*SMALL, "--use-torch-fsdp2"), "--use-torch-fsdp2 is not supported: .*divided into units"),
        ((*SMALL, "--num-layers", "5"), "Megatron refuses these arguments: "),
        ((*SMALL, "--expert-model-parallel-size", "3"), "must be a multiple of"),
    ],
)
def test_command_line_that_cannot_be_planned_is_refused(
    flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(*flags)
    assert not dist.is_initialized()


def test_flags_of_a_script_and_of_what_is_not_counted_are_named() -> None:
    _, notes = planned(*SMALL, "--corpus", "a", "--fp8-format", "hybrid", runs_script=True)
    assert notes[0] == "--corpus: taken as a flag of the script, and not counted"
    assert notes[1].startswith("--fp8-format: the scales")
    assert notes[2].startswith("planned from Megatron's model, without memory for it: one rank")


def test_stages_that_differ_in_the_numbers_of_layers_alone_are_planned_once() -> None:
    job, _ = planned(
        *SMALL, "--num-layers", "8", "--pipeline-model-parallel-size", "4", world_size=8
    )
    assert [stage.numbers for stage in job.stages] == [(0,), (1, 2), (3,)]
    assert job.num_ranks == 8
    assert job.by_rank([["a"], ["b"], ["c"]]) == ["a", "b", "b", "c"]
    assert job.model.num_moe_layers == 8


def test_groups_of_all_ranks_are_listed_as_often_for_many_stages_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def num_lists(num_stages: int) -> int:
        lists: list[int] = []

        def count(world_size: int, *of: list[Any]) -> list[list[int]]:
            lists.append(world_size)
            return list_groups(world_size, *of)

        monkeypatch.setattr(stages, "_list_groups", count)
        words = "--num-layers", "8", "--pipeline-model-parallel-size", f"{num_stages}"
        planned(*SMALL, *words, world_size=8)
        return len(lists)

    list_groups = stages._list_groups
    assert num_lists(2) == num_lists(4) > 0


def test_tensor_parallel_ranks_save_what_one_rank_would() -> None:
    whole, halved = planned_job(*SMALL), planned_job(*SMALL, "--tensor-model-parallel-size", "2")
    assert whole.model == halved.model
    norms = UnitId(kind=UnitKind.FINAL_NORM)
    assert halved.stages[-1].elements[norms] == whole.stages[-1].elements[norms] == 128
    assert (halved.tp, halved.dp, whole.dp) == (2, 2, 4)


def test_tied_embeddings_are_saved_on_both_ends_and_counted_once() -> None:
    one, two = planned_job(*LARGE), planned_job(*LARGE, "--pipeline-model-parallel-size", "2")
    assert one.model == two.model
    saved = [sum(each.num_elements for each in stage.ranks) for stage in two.stages]
    assert sum(saved) == one.model.num_parameters + 50257 * 1024


@pytest.mark.parametrize(
    ("flags", "num_bytes"),
    [
        ((), 12),
        (("--moe-ft-state-dtype", "exp_avg=bf16,exp_avg_sq=bf16"), 8),
        (
            (
                *("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"),
                *("--exp-avg-sq-dtype", "bf16"),
            ),
            8,  # the weight, the rest of the master, and two moments in 16 bits each
        ),
    ],
)
def test_formats_of_the_state_are_those_of_the_flags(
    flags: tuple[str, ...], num_bytes: int
) -> None:
    rank = planned_job(*SMALL, *flags).heaviest
    assert rank.full_bytes / rank.num_elements == pytest.approx(num_bytes, rel=0.01)
    live = sum(each.live for each in rank.sizes.values()) / rank.num_elements
    assert live == pytest.approx(8 if "--exp-avg-dtype" in flags else 12, rel=0.01)
