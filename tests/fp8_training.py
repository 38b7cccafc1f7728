"""Training with FP8 parameters on a CPU: stock Megatron with stand-ins for Transformer Engine's tensors.

Megatron's own code for FP8 parameters runs: its buffers, the distributed optimizer, gathers, contexts. Its
local linear layers take the place of Transformer Engine's: they multiply with the numbers that the bytes
stand for, by rows in a forward pass and by columns in a backward pass.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import fp8_utils, utils
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from packaging.version import Version

import pretrain_gpt_moe
from tests import few_bits_adam, fp8_tensors

VERSION = "2.20.0"
WEIGHT = 1  # of a layer's input, weight and output
HISTORY = 4
_layers: list[Any] = []


class _Recipe(SimpleNamespace):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


class DelayedScaling(_Recipe):
    """Also Megatron's own class of this recipe."""


def _quantizer(recipe: Any, layer: Any) -> Any:
    if recipe == "delayed":
        state = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(HISTORY, 3))
        layer.fp8_meta = {"scaling_fwd": state}
        _layers.append(layer)
        part = slice(WEIGHT, WEIGHT + 1)
        return fp8_tensors.Float8Quantizer(state.scale[part], state.amax_history[0, part])
    kinds = {
        "tensorwise": fp8_tensors.Float8CurrentScalingQuantizer,
        "blockwise": fp8_tensors.Float8BlockQuantizer,
        "mxfp8": fp8_tensors.MXFP8Quantizer,
    }
    return kinds[recipe]()


@contextmanager
def fp8_autocast(
    enabled: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> Iterator[None]:
    """Update the scales of delayed scaling at the end, as the outermost context does in training."""
    yield
    if not torch.is_grad_enabled():
        return
    for layer in _layers:
        state = layer.fp8_meta["scaling_fwd"]
        amax = state.amax_history.amax(0)
        state.amax_history.copy_(torch.roll(state.amax_history, -1, 0))
        state.amax_history[0].zero_()
        state.scale.copy_(torch.where(amax > 0, fp8_tensors.E4M3_MOST / amax, state.scale))


def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """Make nothing: `quantized` replaces weights once the model is built."""
    return mock.MagicMock()


def quantized(model: Any, recipe: str) -> None:
    """Replace the weights of linear layers by FP8 parameters, which keep the numbers they were made of."""
    for name, layer in model.named_modules():
        if ".layers." not in name or not isinstance(
            layer, ColumnParallelLinear | RowParallelLinear
        ):
            continue
        before = layer.weight
        numbers = before.detach().clone()
        weight: Any = torch.nn.Parameter(_quantizer(recipe, layer).make(numbers))
        for attribute, value in vars(before).items():
            setattr(weight, attribute, value)
        weight._high_precision_init_val = numbers
        weight.get_high_precision_init_val = lambda weight=weight: weight._high_precision_init_val
        weight.clear_high_precision_init_val = lambda: None
        layer.weight = weight


def _modules() -> dict[str, Any]:
    recipe = ModuleType("transformer_engine.common.recipe")
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(recipe, name, _Recipe)
    recipe.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    recipe.Format = SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")  # type: ignore[attr-defined]
    pytorch: Any = ModuleType("transformer_engine.pytorch")
    pytorch.fp8_autocast, pytorch.fp8_model_init = fp8_autocast, fp8_model_init
    optimizers: Any = ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = few_bits_adam.FewBitsAdam
    states: Any = ModuleType("transformer_engine.pytorch.fp8")
    states.FP8GlobalStateManager = mock.MagicMock()
    package: Any = ModuleType("transformer_engine")
    package.__version__, package.pytorch = VERSION, pytorch
    package.common = SimpleNamespace(recipe=recipe)
    found = {each.__name__: each for each in (package, recipe, pytorch, optimizers, states)}
    tensor = "transformer_engine.pytorch.tensor"
    names = ("", ".float8_tensor", ".float8_blockwise_tensor", ".mxfp8_tensor", ".utils")
    for each in found.values():
        each.__spec__ = ModuleSpec(each.__name__, None)
    return found | {f"{tensor}{name}": fp8_tensors for name in names}


def install() -> None:
    """Put the stand-ins where Megatron looks for Transformer Engine's tensors, in this process."""
    modules = _modules()
    for name in ("tensor", "fp8", "optimizers"):
        setattr(
            modules["transformer_engine.pytorch"],
            name,
            modules[f"transformer_engine.pytorch.{name}"],
        )
    sys.modules.update(modules)
    utils._te_version = Version(VERSION)
    importlib.reload(fp8_utils)  # functions that others have imported look into the same module
    buffers._coalescing_manager = _one_by_one
    fp8_utils.TEDelayedScaling = DelayedScaling


@contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    """Stand for a context that makes one collective of several: gloo's mixes up bytes and BF16 numbers."""
    works: list[Any] = []
    made = [buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func]

    def kept(make: Any) -> Any:
        return lambda *args, **kwargs: works.append(make(*args, **kwargs))

    buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func = map(kept, made)
    try:
        yield SimpleNamespace(wait=lambda: [each.wait() for each in works])
    finally:
        buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func = made


def train_with_fp8_parameters(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with FP8 parameters in the recipe of its flags."""
    install()
    recipe = flags[flags.index("--fp8-recipe") + 1] if "--fp8-recipe" in flags else "delayed"
    build = Float16Module.__init__

    def built(self: Any, config: Any, module: Any) -> None:
        build(self, config, module)
        quantized(self, recipe)

    with mock.patch.object(Float16Module, "__init__", built):
        few_bits = "--use-precision-aware-optimizer" in flags
        (few_bits_adam.train_with_few_bits if few_bits else pretrain_gpt_moe.main)(flags)
