"""Jobs in which peers cannot play the role of a lost rank are refused, with flag, reason and remedy."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron.fault_tolerance.degraded import rules
from megatron.fault_tolerance.degraded.rules import Usage, check_job, check_room, check_weights
from moe_ft.errors import ConfigError
from tests.unit.fault_tolerance.parsing import parse

SUPPORTED = ("--pipeline-model-parallel-size", "2", "--moe-ft-strategy", "dense")
# Flags, what is set as Megatron sets it, and the message.
BAD: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"use_distributed_optimizer": False}, "no --use-distributed-optimizer .* Add"),
    ((), {"untie_embeddings_and_output_weights": False}, "its pipeline .* Add --untie-embed"),
    (("--mtp-num-layers", "1"), {}, "--mtp-num-layers=1 .* Leave it out"),
    (("--context-parallel-size", "2"), {}, "--context-parallel-size=2 .* Use tensor parallelism"),
    ((), {"virtual_pipeline_model_parallel_size": 2}, "virtual stages .* one stage a rank"),
    (("--overlap-moe-expert-parallel-comm",), {}, "--overlap-moe-expert-parallel-comm .* as one"),
    (("--cuda-graph-impl", "local"), {}, "--cuda-graph-impl=local .* usual order"),
    (
        ("--moe-router-load-balancing-type", "global_aux_loss"),
        {},
        "load-balancing-type=global_aux_loss .* Use aux_loss",
    ),
    ((), {"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type=flex .* Use alltoall"),
    (("--fp16",), {}, "--fp16 .* Use bf16"),
    (("--log-num-zeros-in-grad",), {}, "--log-num-zeros-in-grad"),
    (("--log-params-norm",), {}, "--log-params-norm .* not in the sum"),
    (("--exit-signal-handler",), {}, "--exit-signal-handler .* each iteration waits"),
    (
        ("--check-weight-hash-across-dp-replicas-interval", "5"),
        {},
        "--check-weight-hash-across-dp-replicas-interval=5 .* waits",
    ),
    (("--overlap-grad-reduce",), {}, "--overlap-grad-reduce .* do not overlap"),
    (("--overlap-param-gather",), {}, "--overlap-param-gather .* do not overlap"),
    (("--ddp-average-in-collective",), {}, "--ddp-average-in-collective .* mean"),
    ((), {"reduce_scatter_with_fp32_accumulation": True}, "--reduce-scatter-with-fp32-accum"),
    ((), {"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer .* shards"),
    ((), {"variable_seq_lengths": True}, "--variable-seq-lengths .* one shape"),
    (
        (),
        {"num_microbatches_with_partial_activation_checkpoints": 1},
        "--num-microbatches-with-partial-activation-checkpoints=1",
    ),
    ((), {"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
    (("--defer-embedding-wgrad-compute",), {}, "--defer-embedding-wgrad-compute"),
    (("--use-tp-pp-dp-mapping",), {}, "--use-tp-pp-dp-mapping .* outermost"),
    (
        ("--dataloader-type", "cyclic"),
        {},
        "--dataloader-type=cyclic .* Use --dataloader-type single",
    ),
    (("--moe-ft-strategy", "sparse"), {}, "--moe-ft-strategy=sparse .* whole state of a rank"),
    (("--moe-ft-upstream-log",), {}, "--moe-ft-upstream-log .* for two ranks"),
    (("--moe-ft-breakpoints",), {}, "--moe-ft-breakpoints .* leaves none"),
    (("--moe-ft-replicate", "gradients"), {}, "--moe-ft-replicate=gradients .* not kept"),
    (("--save", "there"), {}, "--save=there .* Use --moe-ft-persist-dir"),
    (("--eval-iters", "3"), {}, "--eval-iters=3 .* Give --eval-iters 0"),
    ((), {"data_parallel_size": 1}, "only one data-parallel rank: .* Give the job more"),
    (
        ("--num-experts", "4", "--expert-model-parallel-size", "4"),
        {},
        "every expert of a stage is in one group of 4 .* Give the job more",
    ),
    (("--data-parallel-random-init",), {}, "--data-parallel-random-init .* other random numbers"),
]


def job(*flags: str, **changes: Any) -> Namespace:
    args = parse(*SUPPORTED, *flags)
    args.dataloader_type = args.dataloader_type or "single"  # as Megatron's validation does
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or 1
    defaults = {"data_parallel_size": 4, "virtual_pipeline_model_parallel_size": None}
    for name, value in {**defaults, **changes}.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--tensor-model-parallel-size", "2"),
        ("--num-experts", "4", "--expert-model-parallel-size", "2"),
    ],
    ids=["stages", "tensors", "experts with replicas"],
)
def test_groups_with_peers_are_supported(flags: tuple[str, ...]) -> None:
    check_job(job(*flags))


@pytest.mark.parametrize(("flags", "changes", "message"), BAD, ids=[each[2] for each in BAD])
def test_job_whose_roles_nobody_can_play_is_refused_by_flag_and_value(
    flags: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_job(job(*flags, **changes))


def test_peer_without_memory_for_another_role_is_refused_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Gradients of 4 MB, and half of 3 MB for each of a million parameters.
    group = Namespace(size=lambda: 2)
    bucket = Namespace(grad_data=torch.empty(1_000_000))
    dense = Namespace(buckets=[bucket], intra_distributed_optimizer_instance_group=group)
    chunk = Namespace(bucket_groups=[dense], expert_parallel_bucket_groups=[])
    monkeypatch.setattr(rules, "get_num_microbatches", lambda: 1)
    args, used = job(), Usage(state=9_000_000, activations=1_000_000)
    # The first of two stages holds one micro-batch, and the one of the other role at the same time.
    needed = 9_000_000 + 1_000_000 + 4_000_000 + 6_000_000 + 1_000_000
    check_room(args, [chunk], 0, used, needed)
    check_room(args, [chunk], 0, used, 0)
    with pytest.raises(
        ConfigError, match=r"rank 0 has 21.0 MB and needs 21.0: 4.0 .* 6.0 .* 1.0 for 1 micro"
    ):
        check_room(args, [chunk], 0, used, needed - 1)


def test_frozen_weights_are_refused_when_they_are_made() -> None:
    model = torch.nn.Linear(2, 2)
    check_weights([model])
    model.bias.requires_grad = False
    with pytest.raises(ConfigError, match=r"frozen weights .* leave --moe-ft-without-spare out"):
        check_weights([model])
