"""Sizes, ranks and bytes that flags describe are those that Megatron derives and builds."""

import pytest

from moe_ft.commands.command_line import read_command
from moe_ft.errors import ConfigError
from moe_ft.planning.described_job import shape_of
from moe_ft.planning.model_size import unit_parameters
from moe_ft.planning.ownership import Sharding
from tests.demo_model import deepseek_flags, model_flags
from tests.unit.moe_ft.planning.built import built_units
from tests.unit.moe_ft.planning.described import LARGE, LARGE_OF_8, SMALL, planned_job

MODELS = {
    "demo": [],
    "llama-like": [
        "--normalization",
        "RMSNorm",
        "--group-query-attention",
        "--num-query-groups",
        "2",
    ],
    "heads of their own width": ["--kv-channels", "24", "--qk-layernorm"],
    "qwen-like": ["--add-qkv-bias", "--normalization", "RMSNorm", "--qk-layernorm"],
    "query groups without grouping": ["--num-query-groups", "2"],
    "shared experts": ["--moe-shared-expert-intermediate-size", "48", "--moe-shared-expert-gate"],
    "every second layer": ["--moe-layer-freq", "2"],
    "one dense layer": ["--moe-layer-freq", "([0]*1+[1]*3)"],
    "padded vocabulary": ["--vocab-size", "1000", "--make-vocab-size-divisible-by", "96"],
    "given vocabulary": ["--padded-vocab-size", "777"],
    "legacy rotary flag": ["--use-rotary-position-embeddings"],
}
# Without the demo's sizes, so that Megatron's defaults count.
DEFAULTS: dict[str, dict[str, bool | int | str]] = {
    "default widths": {"ffn_hidden_size": False, "moe_ffn_hidden_size": False},
    "default width without gate": {"ffn_hidden_size": False, "swiglu": False},
    "width of experts": {"ffn_hidden_size": False, "moe_ffn_hidden_size": 40},
    "learned positions": {"position_embedding_type": False},
    "no positions": {"position_embedding_type": "none"},
    "tied": {"untie_embeddings_and_output_weights": False},
    "biases without experts": {
        "disable_bias_linear": False,
        "num_experts": False,
        "moe_ffn_hidden_size": False,
    },
    "no experts": {"num_experts": False, "moe_ffn_hidden_size": False},
}
# Of a model like DeepSeek-V3: latent attention, shared experts, a layer that predicts a second token.
DEEPSEEK: dict[str, dict[str, bool | int | str]] = {
    "latent attention": {},
    "queries that are not compressed": {"q_lora_rank": False},
    "latent attention without norms": {"qk_layernorm": False},
    "latent attention of the default sizes": {
        **dict.fromkeys(("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"), False),
        "v_head_dim": False,
    },
    "latent attention with biases": {
        "normalization": "LayerNorm",
        "disable_bias_linear": False,
        "moe_shared_expert_intermediate_size": False,
    },
    "two further tokens": {"mtp_num_layers": 2},
    "a further token without experts": {"moe_layer_freq": "([1]*1+[0]*1)"},
    "a further token, tied": {"untie_embeddings_and_output_weights": False},
}
LINES = (
    {name: [*model_flags(), *flags] for name, flags in MODELS.items()}
    | {name: model_flags(**changes) for name, changes in DEFAULTS.items()}
    | {name: deepseek_flags(**changes) for name, changes in DEEPSEEK.items()}
)


@pytest.mark.parametrize("name", LINES)
def test_sizes_are_those_of_the_model_that_megatron_builds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = unit_parameters(shape_of(read_command(LINES[name]).args))
    assert {unit: count for unit, count in planned.items() if count} == built_units(
        LINES[name], monkeypatch
    )


def test_ranks_and_bytes_are_those_of_the_flags() -> None:
    job = planned_job(
        *(*SMALL, "--context-parallel-size", "2", "--overlap-grad-reduce", "--moe-grouped-gemm"),
        *("--moe-ft-replication-factor", "1", "--moe-ft-persist-dir", "/x", "--train-iters", "7"),
        world_size=16,
    )
    assert (job.layout.dp, job.layout.ep, len(job.stages), job.num_ranks) == (8, 2, 2, 16)
    assert job.layout.is_optimizer_distributed
    assert job.bucket_parameters == 40_000_000
    assert (job.is_grouped, job.active_share, job.train_iterations) == (True, 2 / 8, 7)
    assert (job.persists, job.persist_interval, job.replication_factor) == (True, 10, 1)
    assert (job.byte_model.weights, job.byte_model.master, job.byte_model.moments) == (2, 4, 8)


def test_default_bucket_grows_with_the_data_parallel_ranks() -> None:
    flags = (*LARGE_OF_8, "--overlap-grad-reduce")
    assert planned_job(*flags, world_size=64).bucket_parameters == 64_000_000
    given = planned_job(*flags, "--ddp-bucket-size", "5", world_size=64)
    assert given.bucket_parameters == 5
    assert planned_job(*LARGE, "--ddp-bucket-size", "5").bucket_parameters is None


def test_samples_and_their_batches_are_iterations_too() -> None:
    flags = ("--train-samples", "1000", "--global-batch-size", "16")
    assert planned_job(*LARGE, *flags).train_iterations == 62
    assert planned_job(*LARGE).train_iterations is None


def test_bytes_of_text_need_no_vocabulary() -> None:
    flags = [word for word in model_flags(vocab_size=False, tokenizer_type=False)]
    shape = shape_of(read_command([*flags, "--text-dir", "DIR"]).args)
    assert shape.vocab_size == 256


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), (4, 4, 8)),
        (("--fp16",), (2, 4, 8)),
        (("--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"), (2, 4, 6)),
        (("--bf16", "--moe-ft-state-dtype", "exp_avg=bf16,exp_avg_sq=fp8-e4m3-block"), (2, 4, 3)),
        (("--bf16", "--moe-ft-state-dtype", "master=split"), (2, 4, 8)),
        (("--main-params-dtype", "fp16", "--exp-avg-sq-dtype", "fp8"), (4, 2, 5)),
    ],
)
def test_bytes_follow_from_precision_and_formats(
    flags: tuple[str, ...], expected: tuple[int, int, int]
) -> None:
    plain = [word for word in LARGE if word != "--bf16"]
    model = planned_job(*plain, *flags).byte_model
    assert (model.weights, model.master, model.moments) == expected


def test_sharding_is_that_of_the_flag() -> None:
    plain = [word for word in LARGE if word != "--use-distributed-optimizer"]
    layout = planned_job(*plain, "--moe-ft-sharding", "none").layout
    assert (layout.sharding, layout.is_optimizer_distributed) == (Sharding.NONE, False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-layers", "0"), "--num-layers=0 must be a whole number, at least 1. Give a larger"),
        (
            ("--num-attention-heads", "7"),
            "--num-attention-heads=7 must divide --hidden-size=1024. Ch",
        ),
        (
            ("--group-query-attention", "--num-query-groups", "5"),
            "--num-query-groups=5 must divide --num-attention-heads=16. Change one",
        ),
        (
            ("--moe-layer-freq", "[1]*3"),
            "--moe-layer-freq lists 3 layers, --num-layers=24. .* change",
        ),
        (("--moe-layer-freq", "0"), "--moe-layer-freq=0 must be at least 1. Give a larger"),
        (
            ("--moe-router-topk", "17"),
            "--moe-router-topk=17 must be at most --num-experts=16. Lower",
        ),
        (
            ("--tensor-model-parallel-size", "2"),
            "--tensor-model-parallel-size=2 cannot be planned: .* Use",
        ),
        (
            ("--expert-tensor-parallel-size", "2"),
            "--expert-tensor-parallel-size=2 cannot be planned",
        ),
        (
            ("--pipeline-model-parallel-size", "5"),
            "--pipeline-model-parallel-size=5 must divide --num-layers=24. Change one",
        ),
        (
            ("--context-parallel-size", "3"),
            "world size 8 must be a multiple of .*=1 x --context-parallel-size=3 = 3. Start another",
        ),
        (
            ("--expert-model-parallel-size", "16"),
            "world size 8 must be a multiple of .* x --expert-model-parallel-size=16 x .*=1 = 16. Start",
        ),
        (
            ("--num-experts", "12", "--expert-model-parallel-size", "8"),
            "--num-experts=12 must be a multiple of --expert-model-parallel-size=8: .* Change one",
        ),
        (
            ("--num-experts", "0", "--expert-model-parallel-size", "8"),
            "--expert-model-parallel-size=8 needs a model with experts. Add --num-experts, or use --exp",
        ),
        (("--position-embedding-type", "relative"), "relative cannot be planned: .* Use rope"),
        (("--optimizer", "sgd"), "--optimizer=sgd cannot be planned: .* Use adam"),
        (
            ("--moe-ft-replication-factor", "1"),
            "--moe-ft-replication-factor=1 must be less than the 1 nodes that 8 ranks .* Lower one",
        ),
    ],
)
def test_flags_that_cannot_be_planned_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_job(*LARGE, *flags)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("--hidden-size", "--hidden-size not given: .* Give the whole command line after the --"),
        ("--max-position-embeddings", "--max-position-embeddings not given: .* or --position-emb"),
        (
            "--padded-vocab-size",
            "the size of the vocabulary is not known: .* Add --padded-vocab-size",
        ),
    ],
)
def test_flag_that_is_needed_and_missing_is_named(missing: str, message: str) -> None:
    place = LARGE.index(missing)
    with pytest.raises(ConfigError, match=message):
        planned_job(*LARGE[:place], *LARGE[place + 2 :])


def test_vocabulary_of_a_tokenizer_is_not_guessed() -> None:
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--vocab-size", "32000")
    place = LARGE.index("--padded-vocab-size")
    with pytest.raises(ConfigError, match="vocabulary is not known: plan opens no tokenizer"):
        planned_job(*LARGE[:place], *LARGE[place + 2 :], *flags)


def test_storage_bandwidth_without_storage_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--storage-bandwidth=1e.09 needs .* --moe-ft-persist-dir"
    ):
        planned_job(*LARGE, iteration_s=1, storage_bandwidth=1e9)
