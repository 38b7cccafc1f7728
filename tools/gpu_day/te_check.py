"""Transformer Engine on this GPU: does it load, and are its layers, permutation and FP8 recipes right?"""

from collections.abc import Callable

import torch  # before Transformer Engine, whose library is linked to the NCCL that torch loads

from moe_ft.state.quantized import quantized_parts
from tools.gpu_day.results import note

_TOKENS, _IN, _OUT = 256, 512, 256


def main() -> None:
    """Try each part and leave what works."""
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    version = f"Transformer Engine {transformer_engine.__version__}, torch {torch.__version__}"
    if not torch.cuda.is_available():
        note("te-import", f"imported, no GPU: {version}")
        return
    value = torch.randn(_TOKENS, _IN, device="cuda", dtype=torch.bfloat16)

    def linear(fp8: object = None) -> str:
        layer = te.Linear(_IN, _OUT, bias=False, params_dtype=torch.bfloat16).cuda()
        with te.fp8_autocast(enabled=fp8 is not None, fp8_recipe=fp8):
            out = layer(value)
        out.sum().backward()
        expected = value.double() @ layer.weight.double().T
        return f"error {float((out.double() - expected).norm() / expected.norm()):.1e}"

    def grouped() -> str:
        layer = te.GroupedLinear(4, _IN, _OUT, bias=False, params_dtype=torch.bfloat16).cuda()
        layer(value, [_TOKENS // 4] * 4).sum().backward()
        return "ok"

    def weights() -> str:
        with te.fp8_model_init(enabled=True, recipe=recipe.Float8BlockScaling()):
            layer = te.Linear(_IN, _OUT, bias=False, params_dtype=torch.bfloat16).cuda()
        return " ".join(name for name, _ in quantized_parts(layer.weight))

    def permute() -> str:
        from transformer_engine.pytorch.permutation import moe_permute, moe_unpermute

        routing = torch.zeros(_TOKENS, 4, dtype=torch.int32, device="cuda")
        routing[torch.arange(_TOKENS), torch.arange(_TOKENS) % 4] = 1
        moved, places = moe_permute(value, routing, num_out_tokens=_TOKENS, map_type="mask")
        back = moe_unpermute(moved, places, restore_shape=value.shape, map_type="mask")
        return "ok" if torch.equal(back, value) else "WRONG"

    parts: dict[str, Callable[[], str]] = {
        "linear": linear,
        "grouped": grouped,
        "permute": permute,
        "FP8 delayed": lambda: linear(recipe.DelayedScaling()),
        "FP8 current": lambda: linear(recipe.Float8CurrentScaling()),
        "FP8 blockwise": lambda: linear(recipe.Float8BlockScaling()),
        "FP8 parameters": weights,
    }
    found = {}
    for name, part in parts.items():
        try:
            found[name] = part()
            torch.cuda.synchronize()
        except Exception as error:  # the others are tried all the same
            found[name] = f"FAILED {type(error).__name__}: {str(error)[:160]}"
    text = ", ".join(f"{name} {result}" for name, result in found.items())
    # Later steps say themselves what a broken recipe means; without plain layers they need not begin.
    note("te-import", f"{version}: {text}", is_good="FAILED" not in found["linear"])


if __name__ == "__main__":
    main()
