"""The buffers of the model that a record holds."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from moe_ft.errors import ConfigError
from moe_ft.state.record import apply, unpack
from moe_ft.state.tensors import buffer_places
from tests.unit.moe_ft.builders import make_record


class Tables(RotaryEmbedding):  # type: ignore[misc]
    """The tables of sines that multi-latent attention has in each layer."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.register_buffer("cos_cached", torch.zeros(4), persistent=False)


def model() -> torch.nn.Module:
    """Return a layer with a router's bias and tables."""
    layer = torch.nn.Module()
    layer.router = torch.nn.Module()
    layer.router.register_buffer("expert_bias", torch.zeros(2))
    layer.router.register_buffer("local_tokens", torch.zeros(2), persistent=False)
    layer.rotary_pos_emb = Tables()
    return layer


def test_record_holds_what_training_changes_and_no_tables_of_sines() -> None:
    names = ["chunk0.router.expert_bias", "chunk0.router.local_tokens"]
    assert list(buffer_places([model()])) == names


def test_tables_of_sines_that_an_earlier_version_has_noted_are_passed_over() -> None:
    packed = make_record(3).buffers["layer.0.expert_bias"]
    buffers = {"chunk0.rotary_pos_emb.cos_cached": packed, "chunk0.router.expert_bias": packed}
    record = msgspec.structs.replace(make_record(3), buffers=buffers, optimizers=())
    live, scheduler, optimizer = model(), SimpleNamespace(), SimpleNamespace(chained_optimizers=[])
    apply(record, [live], optimizer, scheduler, [])
    assert torch.equal(live.rotary_pos_emb.cos_cached, torch.zeros(4))
    assert torch.equal(live.router.expert_bias, unpack(packed))


def test_record_of_a_model_with_other_buffers_is_refused() -> None:
    packed = make_record(3).buffers["layer.0.expert_bias"]
    record = msgspec.structs.replace(make_record(3), buffers={"chunk0.other": packed})
    with pytest.raises(
        ConfigError, match=r"iteration 3 holds chunk0\.other, which this model lacks"
    ):
        apply(record, [model()], None, None, [])
