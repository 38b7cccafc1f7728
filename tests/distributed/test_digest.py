"""The state digest covers every bit of the state that it claims to cover."""

from pathlib import Path
from typing import Any

import torch

import pretrain_gpt_moe
from moe_ft.state.digest import digest_state
from moe_ft.state.tensors import named_buffers, named_optimizer_tensors, named_parameters
from tests.demo_model import model_flags
from tests.harness import run_ranks
from tests.stock import recorded_build


def digest_notices_every_kind_of_change() -> None:
    bias: dict[str, Any] = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }
    with recorded_build() as built:
        pretrain_gpt_moe.main([*model_flags(train_iters=1, **bias), "--mock-data"])
    model, optimizer, scheduler = built["state"]

    def digest(samples: int = 16) -> tuple[str, str]:
        found = digest_state(model, optimizer, scheduler, {"samples": samples})
        return found.sha256, found.sha256_all

    reference = digest()
    assert digest() == reference
    assert digest(samples=0)[0] == reference[0] and digest(samples=0)[1] != reference[1]
    named = [*named_parameters(model), *named_optimizer_tensors(model, optimizer)]
    assert {name.rsplit("/", 1)[-1] for name, _ in named} >= {
        "param",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    for name, tensor in named:
        bits = tensor.detach().view(-1).view(torch.uint8)
        bits[-1] ^= 1
        assert digest()[0] != reference[0], name
        bits[-1] ^= 1
    for name, buffer in named_buffers(model):
        bits = buffer.view(-1).view(torch.uint8)
        bits[-1] ^= 1
        changed = digest()
        assert changed[0] == reference[0] and changed[1] != reference[1], name
        bits[-1] ^= 1
    torch.rand(1)
    assert digest()[0] == reference[0] and digest()[1] != reference[1]


def test_digest_notices_one_bit_in_every_tensor(tmp_path: Path) -> None:
    run_ranks(digest_notices_every_kind_of_change, 1, log_dir=tmp_path).check()
