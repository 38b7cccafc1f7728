"""Layers that predict further tokens: random ones in files as they are on the hub, and their logits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.megatron_logits import all_logits
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    NUM_TOKENS,
    TOLERANCE,
    check_is_equal,
    converted,
    difference,
    loaded,
    random_model,
    tensors_of,
)


def add_further_layers(saved: Path, config: PreTrainedConfig, num: int) -> None:
    """Add layers as they are on the hub: like the last of the decoder, and what only they have."""
    tensors, last = tensors_of(saved), f"model.layers.{config.num_hidden_layers - 1}."
    generator = torch.Generator().manual_seed(7)
    hidden = config.hidden_size
    for number in range(num):
        layer = f"model.layers.{config.num_hidden_layers + number}."
        shapes: dict[str, tuple[int, ...]] = {
            name.replace(last, layer): tensor.shape
            for name, tensor in tensors.items()
            if name.startswith(last)
        }
        shapes |= {f"{layer}{each}.weight": (hidden,) for each in ("enorm", "hnorm")}
        shapes[f"{layer}shared_head.norm.weight"] = (hidden,)
        shapes[f"{layer}eh_proj.weight"] = (hidden, 2 * hidden)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            tensors[name] = values + ("norm" in name)
        tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})


def save_with_further_layers(
    config: PreTrainedConfig,
    base: type[PreTrainedModel],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Save a random model with its layers of further tokens, and return its folder.

    Args:
        base: of the model's class, which names these layers by their numbers in a published model.
    """
    number = f"[{config.num_hidden_layers}-9]"
    monkeypatch.setattr(base, "_keys_to_ignore_on_load_unexpected", [rf"layers\.{number}\."])
    saved = folder / "saved"
    random_model(config).save_pretrained(saved)
    add_further_layers(saved, config, config.num_nextn_predict_layers)
    return saved


def further_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [layer, batch, sequence, vocabulary] of transformers, the decoder's first."""
    places = torch.arange(NUM_TOKENS).expand_as(tokens)
    further = MtpModel.from_pretrained(model).eval()
    outputs = model(tokens, output_hidden_states=True)
    logits, state = [outputs.logits], outputs.hidden_states[-1]
    for number in range(len(further.layers)):
        tokens = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), dim=1)
        state = further.forward_layer(number, state, places, None, input_ids=tokens)
        logits.append(model.lm_head(state))
    return torch.stack(logits)


def check_further_tokens(
    config: PreTrainedConfig,
    base: type[PreTrainedModel],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    logits_of: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] = further_logits,
) -> None:
    """Check that all layers give the same logits in Megatron, and that the model comes back bit for bit.

    Args:
        config, base: as those of `save_with_further_layers`.
        folder: an empty one.
        logits_of: as `further_logits`.
    """
    saved, num = (
        save_with_further_layers(config, base, folder, monkeypatch),
        config.num_nextn_predict_layers,
    )
    tokens = torch.arange(2 * NUM_TOKENS).view(2, -1) * 7 % config.vocab_size
    with torch.no_grad():
        expected = logits_of(loaded(saved), tokens)
    checkpoint, printed = converted(saved, "torch_dist")
    flags = printed.splitlines()[-1].split()
    logits = all_logits(flags, checkpoint, tokens, folder / "run")[..., : config.vocab_size]
    assert len(logits) == len(expected) == 1 + num
    known = NUM_TOKENS - num  # the tokens after the last are not
    for ours, theirs in zip(logits, expected, strict=True):
        assert difference(ours[:, :known], theirs[:, :known]) < TOLERANCE
    back, _ = converted(checkpoint, "hf")
    check_is_equal(back, saved)
