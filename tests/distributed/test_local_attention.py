"""The local attention is softmax attention, forward and backward, even where two ranks share a sequence."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.program.local_attention import LocalAttention
from tests.harness import run_ranks

RANKS, LENGTH, BATCH, HEADS = 2, 16, 3, 4
DOCUMENTS = torch.tensor([0] * 5 + [1] * 11)


def unseen_keys(kind: str) -> torch.Tensor:
    """Return ``[query, key]``: True where a query does not see a key."""
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    unseen = keys > queries
    if kind == "documents":
        unseen |= DOCUMENTS[:, None] != DOCUMENTS[None, :]
    if kind == "window":
        unseen |= keys < queries - 3
    return unseen


def softmax_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    """Return attention ``[seq, batch, heads * size]`` by its definition."""
    repeats = HEADS // key.size(2)
    key, value = (each.repeat_interleave(repeats, dim=2) for each in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / query.size(-1) ** 0.5
    shares = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhqk,kbhd->qbhd", shares, value).flatten(2)


def inputs(key_heads: int, key_size: int, value_size: int) -> list[torch.Tensor]:
    """Return queries, keys, values and the gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    shapes: list[tuple[int, ...]] = [
        (HEADS, key_size),
        (key_heads, key_size),
        (key_heads, value_size),
    ]
    shapes.append((HEADS * value_size,))
    return [
        torch.randn(LENGTH, BATCH, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]


def own_rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows that Megatron gives this rank of a sequence that several ranks share."""
    if size == 1:
        return tensor
    batch = {"tokens": tensor.transpose(0, 1)}  # [batch, seq], as a data loader has it
    group = parallel_state.get_context_parallel_group()
    own = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)["tokens"]
    rows: torch.Tensor = own.transpose(0, 1).contiguous()
    return rows


def check_case(kind: str, key_heads: int, key_size: int, value_size: int, size: int) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * key_size,
        num_attention_heads=HEADS,
        num_query_groups=key_heads,
        attention_dropout=0.0,
        context_parallel_size=size,
        masked_softmax_fusion=False,
        window_size=(3, 0) if kind == "window" else None,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    attention = LocalAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        k_channels=key_size,
        v_channels=value_size,
        pg_collection=groups,
    )
    whole = inputs(key_heads, key_size, value_size)
    for each in whole[:3]:
        each.requires_grad_()
    unseen = unseen_keys(kind)
    queries, keys, values = whole[:3]
    expected = softmax_attention(queries, keys, values, unseen)
    expected.backward(whole[3])
    *parts, gradient = (own_rows(each.detach(), size).float() for each in whole)
    for each in parts:
        each.requires_grad_()
    given = own_rows(unseen, size)[None, None] if kind == "documents" else None
    output = attention(*parts, given)
    output.backward(gradient)
    found = [output, *(each.grad for each in parts)]
    wanted = [expected, *(each.grad for each in whole[:3])]
    for one, other in zip(found, wanted, strict=True):
        assert other is not None
        wanted_rows = own_rows(other.detach(), size).float()
        torch.testing.assert_close(one.detach(), wanted_rows, rtol=1e-5, atol=1e-5)


def check_attention() -> None:
    cpu_device.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    model_parallel_cuda_manual_seed(1)
    for size in (1, RANKS):
        for kind in ("causal", "documents", "window"):
            check_case(kind, HEADS, 8, 12, size)
            check_case(kind, 2, 8, 8, size)


def test_attention_and_its_gradients_are_those_of_the_definition(tmp_path: Path) -> None:
    run_ranks(check_attention, RANKS, log_dir=tmp_path).check()
