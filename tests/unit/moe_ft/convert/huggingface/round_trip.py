"""A small random model of transformers on its way to Megatron and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from moe_ft.convert.conversion import ConversionRequest, convert
from tests.megatron_logits import megatron_logits

TOLERANCE = 1e-5
NUM_TOKENS = 24
# 101 tokens, which Megatron pads; heads in groups; a size of a head that does not follow from the others.
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500},
}
# The files are small, and there are several.
SHARD_BYTES = 60_000


def random_model(config: PreTrainedConfig, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Return a model whose every tensor is random, also its norms and biases."""
    generator = torch.Generator().manual_seed(5)
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = torch.randn(tensor.shape, generator=generator)
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3
            tensor.copy_(values * scale + ("norm" in name))
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder of safetensors."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def converted(source: Path, to: str, **options: Any) -> tuple[Path, str]:
    """Return the folder of a conversion and what it has printed."""
    folder = source.with_name(f"{source.name}_{to}")
    options = {"shard_bytes": SHARD_BYTES, **options}
    printed = convert(
        ConversionRequest(source=str(source), destination=str(folder), to=to, **options)
    )
    return folder, printed


def loaded(folder: Path) -> PreTrainedModel:
    """Return the model that transformers loads, which must need every tensor and miss none."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def check_is_equal(folder: Path, expected: Path) -> None:
    """Check that two folders have the same tensors, bit for bit."""
    ours, theirs = tensors_of(folder), tensors_of(expected)
    assert set(ours) == set(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((first - second).abs().max() / second.abs().max())


def check_round_trip(config: PreTrainedConfig, folder: Path, *flags: str) -> Path:
    """Check that Megatron gives the logits of a model, and that it comes back bit for bit.

    Args:
        folder: an empty one.
        flags: further ones of Megatron.

    Returns:
        The folder of the model that came back.
    """
    model = random_model(config)
    saved = folder / "saved"
    checkpoint, tokens, expected = check_logits(model, folder, *flags)
    back, _ = converted(checkpoint, "hf")
    check_is_equal(back, saved)
    with torch.no_grad():
        assert torch.equal(loaded(back)(tokens).logits, expected)
    return back


def check_logits(
    model: PreTrainedModel,
    folder: Path,
    *flags: str,
    prepare: Callable[[], None] | None = None,
) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """Check that Megatron gives the logits of a model, which is saved in a folder.

    Args:
        prepare: as that of `all_logits`.

    Returns:
        The folder of Megatron's checkpoint, tokens, and their logits.
    """
    saved, size = folder / "saved", model.get_input_embeddings().weight.shape[0]
    model.save_pretrained(saved)
    tokens = torch.arange(2 * NUM_TOKENS).view(2, -1) * 7 % size
    with torch.no_grad():
        expected = model(tokens).logits
    checkpoint, printed = converted(saved, "torch_dist")
    printed_flags = printed.splitlines()[-1].split()
    words, run = [*printed_flags, *flags], folder / "run"
    logits = megatron_logits(words, checkpoint, tokens, run, prepare)
    assert logits[..., size:].abs().max() == 0
    assert difference(logits[..., :size], expected) < TOLERANCE
    return checkpoint, tokens, expected
