"""Recipes that are small enough for four processes on CPUs: same features, other sizes.

Left out is what only Transformer Engine, NCCL or a GPU can do (_NEEDS_A_GPU, _WITH_VALUES), and the places of
data and files. Everything else is the recipe's own: attention, routing, losses, schedules, stages, overlaps.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tests.recipes.recipe import Recipe

NUM_RANKS = 4
_NEEDS_A_GPU = frozenset(
    (
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--cross-entropy-loss-fusion",
        "--use-flash-attn",
        "--tp-comm-overlap",
        "--delay-wgrad-compute",
        "--overlap-moe-expert-parallel-comm",
        "--fp8-param-gather",
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "--moe-router-padding-for-fp8",
        "--moe-router-padding-for-quantization",
        "--use-precision-aware-optimizer",
        "--moe-enable-deepep",
        "--moe-permute-fusion-into-hybridep",
        "--te-rng-tracker",
        "--fine-grained-activation-offloading",
        "--optimizer-cpu-offload",
        "--overlap-cpu-optimizer-d2h-h2d",
        "--use-persistent-ckpt-worker",
        "--mock-data",
        "--no-mmap-bin-files",
        "--finetune",
        "--auto-detect-ckpt-format",
        "--no-load-optim",
        "--no-load-rng",
        "--no-save-optim",
        "--recompute-activations",
        "--enable-experimental",
    )
)
_WITH_VALUES = re.compile(
    r"--(transformer-impl|cross-entropy-fusion-impl|moe-token-dispatcher-type|moe-flex-.*|moe-hybridep-.*|"
    r"moe-deepep-.*|fp8-.*|recompute-.*|cuda-graph-.*|offload-modules|main-.*|exp-avg-.*|tokenizer-.*|"
    r"data-.*|split|save|save-interval|load|ckpt-.*|dist-ckpt-.*|tensorboard-dir|vocab-size|padded-vocab-size|"
    r"make-vocab.*|tiktoken-.*|train-.*|lr-decay-.*|lr-warmup-.*|eval-.*|num-workers|.*virtual.*|"
    r"distributed-timeout-minutes|pipeline-model-parallel-layout|account-for-.*|log-interval|softmax-type|"
    r"window-.*)$"
)
# Sizes by flag; a flag that a recipe does not have stays out.
_SIZES: Mapping[str, object] = MappingProxyType(
    {
        "--num-layers": 4,
        "--hidden-size": 32,
        "--ffn-hidden-size": 64,
        "--num-attention-heads": 4,
        "--kv-channels": 8,
        "--num-query-groups": 2,
        "--q-lora-rank": 16,
        "--kv-lora-rank": 16,
        "--qk-head-dim": 8,
        "--qk-pos-emb-head-dim": 8,
        "--v-head-dim": 8,
        "--seq-length": 32,
        "--max-position-embeddings": 32,
        "--num-experts": 4,
        "--moe-router-topk": 2,
        "--moe-router-num-groups": 2,
        "--moe-router-group-topk": 1,
        "--moe-ffn-hidden-size": 32,
        "--moe-shared-expert-intermediate-size": 32,
        "--moe-layer-freq": "[0,1,1,1]",
        "--global-batch-size": 8,
        "--micro-batch-size": 1,
        "--tensor-model-parallel-size": 1,
        "--pipeline-model-parallel-size": 2,
        "--expert-model-parallel-size": 2,
        "--context-parallel-size": 1,
    }
)


def small_words(recipe: Recipe, num_iterations: int) -> list[str]:
    """Return the command line of a small job with the features of a recipe, without data."""
    return [
        *_kept(recipe),
        *("--transformer-impl", "local", "--moe-token-dispatcher-type", "alltoall"),
        *("--train-iters", str(num_iterations), "--lr-decay-iters", "20", "--log-interval", "1"),
        *("--no-gradient-accumulation-fusion", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", "256", "--eval-interval", "4", "--eval-iters", "1"),
    ]


def _kept(recipe: Recipe) -> Iterator[str]:
    has_context = "--context-parallel-size 8" in recipe.flags
    sizes = {**_SIZES, **({"--context-parallel-size": 2} if has_context else {})}
    for line in recipe.flags.strip().splitlines():
        flag, *values = line.split()
        if flag in _NEEDS_A_GPU or _WITH_VALUES.match(flag):
            continue
        yield from (flag, *map(str, [sizes[flag]] if flag in sizes else values))
