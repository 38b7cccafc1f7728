"""Training with a substitute for Transformer Engine's FusedAdam, which needs a GPU.

The substitute keeps its state in the same places and types: masters as 16-bit remainders or scaled FP16;
moments in BF16, scaled FP16 or FP8 tensors that pretend to be fp32; scales next to the state. Parsing, the
distributed optimizer and the loop are stock Megatron. The arithmetic is torch's and need not equal that of
TE.
"""

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import optimizer_config

import pretrain_gpt_moe

_FP8_MOST = 448.0


class Fp8Tensor(torch.Tensor):
    """FP8 numbers with one scale, in bytes; claims to be fp32. Only `wide` converts it to fp32."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> "Fp8Tensor":
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=torch.float32, device=like.device
        )
        self._data = torch.zeros(like.shape, dtype=torch.uint8)
        self._scale_inv = torch.ones(1)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(
            f"an FP8 tensor was read with {func}: its bytes are to be taken as they are"
        )

    def wide(self) -> torch.Tensor:
        return self._data.view(torch.float8_e4m3fn).to(torch.float32) * self._scale_inv

    def fill(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self._scale_inv.copy_(scale)
        self._data.copy_((numbers / scale).to(torch.float8_e4m3fn).view(torch.uint8))


class FewBitsAdam(torch.optim.Optimizer):
    """AdamW that keeps its state as TE's FusedAdam does and accepts gradients in `decoupled_grad`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )
        self.store_param_remainders = store_param_remainders and master_weights
        self.store_param_remainders &= master_weight_dtype is torch.float32
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self._dtypes["master_param"] = master_weight_dtype
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Make all state of a parameter: moments of 0, masters that are the weights."""
        state = self.state[param]
        for key, dtype in self._dtypes.items():
            if dtype is not torch.float32:
                self._scales.setdefault(param, {})[key] = torch.ones(1)
            if dtype is torch.uint8:
                state[key] = Fp8Tensor(param)
            elif key == "master_param" and store_param_remainders:
                state[key] = torch.zeros_like(param, dtype=torch.int16)
            else:
                state[key] = torch.zeros_like(param, dtype=dtype)
        if "master_param" in state and not store_param_remainders:
            self._keep(param, "master_param", param.detach().float())

    def _wide(self, param: torch.Tensor, key: str) -> torch.Tensor:
        kept = self.state[param][key]
        if isinstance(kept, Fp8Tensor):
            return kept.wide()
        if kept.dtype is torch.int16:
            upper = param.detach().view(torch.int16).to(torch.int32) - (kept < 0).to(torch.int32)
            bits = (upper << 16) | (kept.to(torch.int32) & 0xFFFF)
            wide: torch.Tensor = bits.view(torch.float32)
            return wide
        scale = self._scales.get(param, {}).get(key) if kept.dtype is torch.float16 else None
        whole: torch.Tensor = kept.clone() if kept.dtype is torch.float32 else kept.float()
        return whole if scale is None else whole * scale

    def _keep(self, param: torch.Tensor, key: str, numbers: torch.Tensor) -> None:
        kept = self.state[param][key]
        most = _FP8_MOST if isinstance(kept, Fp8Tensor) else torch.finfo(torch.float16).max / 2
        largest = numbers.abs().max() / most if numbers.numel() else torch.tensor(0.0)
        scale = torch.where(largest > 0, largest, 1.0).view(1)
        if isinstance(kept, Fp8Tensor):
            self._scales[param][key].copy_(scale)
            kept.fill(numbers, scale)
        elif kept.dtype is torch.int16:
            kept.copy_((numbers.view(torch.int32) & 0xFFFF).to(torch.int16))
        elif kept.dtype is torch.float16:
            self._scales[param][key].copy_(scale)
            kept.copy_(numbers / scale)
        else:
            kept.copy_(numbers)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                grad = param.grad if grad is None else grad
                if grad is not None:
                    self._update(group, param, grad.float())

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        if not self.state[param]:
            is_short = param.dtype is torch.bfloat16
            self.initialize_state(param, self.store_param_remainders and is_short)
        first, second = group["betas"]
        master = self._wide(param, "master_param") if "master_param" in self._dtypes else param.data
        mean = self._wide(param, "exp_avg").mul_(first).add_(grad, alpha=1 - first)
        square = self._wide(param, "exp_avg_sq").mul_(second).addcmul_(grad, grad, value=1 - second)
        master.mul_(1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        master.addcdiv_(mean / (1 - first ** group["step"]), root, value=-group["lr"])
        self._keep(param, "exp_avg", mean)
        self._keep(param, "exp_avg_sq", square)
        if "master_param" in self._dtypes:
            self._keep(param, "master_param", master)
            param.data.copy_(
                _weights(
                    master, param, is_split=self.state[param]["master_param"].dtype is torch.int16
                )
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
                param.decoupled_grad = None


def _weights(master: torch.Tensor, param: torch.Tensor, *, is_split: bool) -> torch.Tensor:
    """Return the weights of masters: the upper half of split ones, with halves rounded up."""
    if not is_split:
        return master.to(param.dtype)
    bits = master.view(torch.int32)
    upper = (bits >> 16) + ((bits >> 15) & 1)
    return upper.to(torch.int16).view(torch.bfloat16)


def train_with_few_bits(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with the substitute where Megatron asks for Transformer Engine's Adam."""
    package = ModuleType("transformer_engine.pytorch.optimizers")
    package.FusedAdam = FewBitsAdam  # type: ignore[attr-defined]
    names = ("transformer_engine", "transformer_engine.pytorch")
    modules = {**{name: ModuleType(name) for name in names}, package.__name__: package}
    check = optimizer_config.OptimizerConfig.__post_init__

    def checked(config: Any) -> None:
        with mock.patch.dict(sys.modules, modules):
            check(config)

    for module in (megatron_optimizer, optimizer_config):
        module.is_te_min_version = lambda *args, **kwargs: True
    megatron_optimizer.Adam = FewBitsAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer_config.OptimizerConfig.__post_init__ = checked
    pretrain_gpt_moe.main(flags)
