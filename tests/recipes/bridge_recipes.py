"""Recipes of Megatron-Bridge, each as the configuration that a job on its number of GPUs has.

No model is built and nothing is downloaded: sizes of models come from transformers' classes and the table
here. What only checks whether Transformer Engine is there is answered as if it were.
"""

import importlib
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from megatron.bridge import perf_recipes, recipes
from megatron.bridge.models.conversion import auto_bridge
from megatron.bridge.training import comm_overlap
from megatron.bridge.training.config import runtime_config_update
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

from megatron.fault_tolerance.seams.patching import Patches

# Packages of recipes that are looked at: GPTs, most of them with experts.
_FAMILIES = ("deepseek", "glm", "gpt_oss", "kimi", "moonlight", "olmoe", "qwen")
_TE_VERSION = Version("2.14.0")
_KERNELS = (
    (rope_utils, ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")),
    (moe_utils, ("fused_permute", "fused_permute_with_probs", "fused_unpermute")),
    (moe_utils, ("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs")),
)
# Name of a model -> its class in transformers, and what differs from the defaults of that class.
_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "DeepSeek-V2-Lite": (
        "DeepseekV2",
        {"num_hidden_layers": 27, "n_routed_experts": 64, "num_experts_per_tok": 6},
    ),
    "DeepSeek-V2": (
        "DeepseekV2",
        {"num_hidden_layers": 60, "n_routed_experts": 160, "num_experts_per_tok": 6},
    ),
    "DeepSeek-V3": ("DeepseekV3", {}),
    "DeepSeek-V4-Flash": ("DeepseekV4", {}),
    "DeepSeek-V4-Pro": ("DeepseekV4", {}),
    "Moonlight-16B-A3B": (
        "DeepseekV3",
        {"num_hidden_layers": 27, "n_routed_experts": 64, "num_nextn_predict_layers": 0},
    ),
    "Kimi-K2-Instruct": (
        "DeepseekV3",
        {"num_hidden_layers": 61, "n_routed_experts": 384, "num_nextn_predict_layers": 0},
    ),
    "GLM-5.2": ("GlmMoeDsa", {}),
    "GLM-4.5-Air": ("Glm4Moe", {"num_hidden_layers": 46, "n_routed_experts": 128}),
    "GLM-4.5": ("Glm4Moe", {"num_hidden_layers": 92, "n_routed_experts": 160}),
    "OLMoE-1B-7B-0924": ("Olmoe", {}),
    "gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("GptOss", {}),
    "Qwen3-Next-80B-A3B-Instruct": ("Qwen3Next", {}),
    "Qwen3.5-9B-Base": ("Qwen3_5Text", {}),
    "Qwen3.5-35B-A3B-Base": ("Qwen3_5MoeText", {}),
    "Qwen3-30B-A3B": ("Qwen3Moe", {"num_hidden_layers": 48}),
    "Qwen3-235B-A22B": ("Qwen3Moe", {"num_hidden_layers": 94}),
    **{
        f"{kind}-{size}": (kind.partition(".")[0], {"num_hidden_layers": layers})
        for kind, sizes in {
            "Qwen2": {"0.5B": 24, "1.5B": 28, "7B": 28, "72B": 80},
            "Qwen2.5": {"0.5B": 24, "1.5B": 28, "7B": 28, "14B": 48, "32B": 64, "72B": 80},
            "Qwen3": {"0.6B": 28, "1.7B": 28, "4B": 36, "8B": 36, "14B": 40, "32B": 64},
        }.items()
        for size, layers in sizes.items()
    },
}


@dataclass(frozen=True, slots=True)
class BridgeRecipe:
    """A function of Bridge that returns a configuration.

    Attributes:
        family: of models, as its package is called.
        collection: "recipes" or "perf_recipes".
    """

    name: str
    family: str
    collection: str
    make: Callable[[], Any]

    @property
    def gpus(self) -> int:
        """Number that its name states."""
        found = re.search(r"_(\d+)gpu_", self.name)
        return int(found[1]) if found else 8


@dataclass(frozen=True, slots=True)
class Built:
    """The configuration of a recipe.

    Attributes:
        config: a ConfigContainer.
        invalid: why Bridge refuses it with this Megatron; empty if it does not.
    """

    config: Any
    gpus: int
    invalid: str = ""


def read_recipes() -> list[BridgeRecipe]:
    """Return all recipes for pretraining of the families, by name."""
    found = {
        (recipe.collection, recipe.name): recipe
        for package in (recipes, perf_recipes)
        for family in _FAMILIES
        for recipe in _recipes_of(package, family)
    }
    return [found[key] for key in sorted(found)]


def _recipes_of(package: ModuleType, family: str) -> Iterator[BridgeRecipe]:
    collection = package.__name__.rpartition(".")[2]
    for folder in (
        f"{each}/{family}" for each in package.__path__ if os.path.isdir(f"{each}/{family}")
    ):
        for module in pkgutil.walk_packages([folder], f"{package.__name__}.{family}."):
            contents = vars(importlib.import_module(module.name))
            for name, make in contents.items():
                is_own = getattr(make, "__module__", "") == module.name and name[0] != "_"
                if is_own and "_pretrain_" in name and name.endswith("_config"):
                    yield BridgeRecipe(name, family, collection, make)


def build(recipe: BridgeRecipe) -> Built:
    """Return the configuration of a recipe as `pretrain` completes it.

    Raises:
        Exception: of Bridge or transformers, if the recipe has no configuration here.
    """
    lent = _transformer_engine()
    with patch.dict(os.environ), patch.dict(sys.modules, lent), Patches() as patches:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        patches.set(auto_bridge, "safe_load_config_with_retry", _described)
        whole = SimpleNamespace  # of a model with vision, whose text part is trained
        patches.set(
            transformers.AutoConfig,
            "from_pretrained",
            lambda path: whole(text_config=_described(path)),
        )
        patches.set(utils, "_te_version", _TE_VERSION)
        patches.set(comm_overlap, "HAVE_TE", True)
        patches.set(torch.cuda, "get_device_properties", lambda *_: _device_of(recipe))
        for owner, names in _KERNELS:
            for name in names:
                patches.set(owner, name, _Adam)
        config = recipe.make()
        if config.dataset.path_to_cache is None:  # of the user's machine; some recipes want one
            config.dataset.path_to_cache = "/cache"
        gpus = _divisible(recipe.gpus, config.model)
        os.environ["WORLD_SIZE"] = str(gpus)
        try:
            runtime_config_update(config)
        except (AssertionError, ValueError) as error:
            return Built(config, gpus, str(error).partition("\n")[0])
    few = "its sizes of parallelism do not divide its number of GPUs: asked with a multiple of it"
    return Built(config, gpus, few if gpus > recipe.gpus else "")


def _divisible(gpus: int, model: Any) -> int:
    """Return the first multiple of a number of GPUs that the sizes of a model divide."""
    sizes = (model.tensor_model_parallel_size, model.context_parallel_size)
    expert_tp = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    pipelines = model.pipeline_model_parallel_size
    return math.lcm(
        gpus, pipelines * math.prod(sizes), pipelines * expert_tp * model.expert_model_parallel_size
    )


def _described(path: Any, **_: Any) -> Any:
    """Return the configuration of a model by the last part of its name."""
    kind, sizes = _MODELS[str(path).rpartition("/")[2]]
    described = getattr(transformers, f"{kind}Config")(**sizes)
    described.architectures = [f"{kind}ForCausalLM"]
    return described


def _device_of(recipe: BridgeRecipe) -> SimpleNamespace:
    name = recipe.name.rpartition("gpu_")[2].partition("_")[0].upper()
    return SimpleNamespace(name=f"NVIDIA {name}", major=9 if name == "H100" else 10, minor=0)


class _Adam:
    def __init__(
        self,
        master_weight_dtype: Any,
        exp_avg_dtype: Any,
        exp_avg_sq_dtype: Any,
        use_decoupled_grad: bool,
    ) -> None: ...


def _transformer_engine() -> dict[str, Any]:
    names = ("", ".pytorch", ".pytorch.optimizers")
    modules = {f"transformer_engine{name}": ModuleType(name) for name in names}
    vars(modules["transformer_engine.pytorch.optimizers"])["FusedAdam"] = _Adam
    return modules
