"""Local attention for the models that Megatron's own refuses, or trains incorrectly.

Megatron's DotProductAttention supports neither heads whose keys and values differ in size (multi-latent
attention) nor a part of the sequence (context parallelism). Transformer Engine supports both, on GPUs. The
attention here prepares both for Megatron's computation, which it inherits. model.py puts it into the model.
"""

import argparse
import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import get_default_causal_mask, get_sliding_window_causal_mask
from megatron.core.utils import divide

from megatron.fault_tolerance.seams.versions import later
from moe_ft.errors import ConfigError

_QKNormConfigResolver = later(
    "megatron.core.transformer.mla_qk_norm_config", "QKNormConfigResolver"
)


class LocalAttention(DotProductAttention):  # type: ignore[misc]
    """Softmax attention with heads of any size, over a sequence that the ranks of a group may share.

    Every rank of the context-parallel group gathers the keys and values of the whole sequence and computes
    the rows of its own queries. The backward pass sums the gradients of keys and values over the group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        """Build attention; Megatron calls it with these argument names.

        Args:
            layer_number: from 1.
            attn_mask_type: says which keys a query sees when `forward` gets no mask.
            k_channels, v_channels: size of a head's queries and keys, and of its values.
            pg_collection: groups tp and cp; None for Megatron's global ones.
            options: `cp_comm_type` changes nothing here: keys and values are always gathered.
        """
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        has_parts = config.context_parallel_size > 1
        # The parent class only checks the size, to refuse it.
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        # A part of the sequence has fewer queries than keys: a mask selects the causal rows.
        mask_type = AttnMaskType.padding if has_parts else attn_mask_type
        if k_channels is not None and options.get("softmax_scale") is None:
            options["softmax_scale"] = k_channels**-0.5
        super().__init__(
            whole, layer_number, mask_type, attention_type, pg_collection=groups, **options
        )
        self.config = config
        self.attn_mask_type = attn_mask_type
        self._cp_group = groups.cp if has_parts else None
        self._window_size = self.scale_mask_softmax.window_size
        if has_parts:
            self.scale_mask_softmax.window_size = None
        if v_channels is not None:
            heads = divide(config.num_attention_heads, groups.tp.size())
            self.hidden_size_per_partition = heads * v_channels

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend; called by all ranks of the context-parallel group.

        Args:
            query: [seq, micro_batch, heads, k_channels]; seq is this rank's two chunks of the sequence.
            key: [seq, micro_batch, key heads, k_channels].
            value: [seq, micro_batch, key heads, v_channels].
            attention_mask: True where a key is not seen, [micro_batch or 1, 1, seq, whole sequence] in the
                order of the sequence; None for the mask that `attn_mask_type` names.

        Returns:
            [seq, micro_batch, heads * v_channels].
        """
        if self._cp_group is not None:
            key, value = _gather_sequence(key, value, self._cp_group)
            attention_mask = self._rows(attention_mask, key.size(0), self._cp_group)
        result: torch.Tensor = super().forward(query, key, value, attention_mask, **options)
        return result

    def _rows(self, given: torch.Tensor | None, length: int, group: Any) -> torch.Tensor | None:
        """Return a mask of the keys that this rank's queries do not see, [1, 1, seq, length]."""
        if self._window_size is not None:
            whole = get_sliding_window_causal_mask(length, length, self._window_size)
        elif given is not None or self.attn_mask_type is not AttnMaskType.causal:
            return given
        else:
            whole = get_default_causal_mask(length)
        own = list(chunks_of(group.rank(), group.size()))
        return torch.as_tensor(whole).view(2 * group.size(), -1, length)[own].view(1, 1, -1, length)


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-latent attention whose queries have a norm only where they are compressed.

    Without --q-lora-rank, as in DeepSeek-V2-Lite, --qk-layernorm is for keys and values alone. Megatron's
    local implementation refuses that, and Transformer Engine's normalizes the queries' input a second time
    (Megatron 0.19.2).
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return Megatron's norms and projections of compressed queries; others use the projection alone."""
        compressed = copy.copy(self.config)
        compressed.q_lora_rank = self.config.q_lora_rank or self.config.hidden_size
        classes: dict[str, Any] = _QKNormConfigResolver(compressed, submodules).resolve()
        return {**classes, "linear_q_proj": submodules.linear_q_proj}


class LocalLatentAttention(LatentAttention):
    """Multi-latent attention whose rotary keys get the gradients of all heads under tensor parallelism.

    All heads share the rotary part of the keys. The local implementation divides the projection that computes
    it over the tensor-parallel ranks, and gathers the result. In the backward pass of Megatron's gather, each
    rank gets only the contribution of its own heads: nothing adds the others (Megatron 0.19.2).
    """

    def _qkv_down_projection(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent queries, and latent keys and values with the rotary keys.

        Both are whole, [seq / tensor-parallel size, micro_batch, rank], as if the projection were not
        divided. Megatron then gathers the sequence of the rotary keys, and the backward pass sums their
        gradients.
        """
        queries, keys_and_values = super()._qkv_down_projection(hidden_states)
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if keys_and_values.size(-1) != width:
            whole = gather_from_tensor_model_parallel_region(keys_and_values, group=self.tp_group)
            keys_and_values = scatter_to_sequence_parallel_region(whole, group=self.tp_group)
        return queries, keys_and_values


def check_latent_attention(args: argparse.Namespace) -> None:
    """Raise ConfigError where the local multi-latent attention of Megatron gets wrong gradients.

    Without sequence parallelism the ranks sum the gradients of `q_layernorm`, which are already complete, and
    do not sum the gradients of the rotary keys, which are incomplete (Megatron 0.19.2).
    """
    tp = args.tensor_model_parallel_size
    is_local = args.multi_latent_attention and args.transformer_impl == "local"
    if is_local and _QKNormConfigResolver is None:
        raise ConfigError(
            "--multi-latent-attention with --transformer-impl=local needs megatron-core 0.19 or newer in "
            "pretrain_gpt_moe.py. Install it, or use --transformer-impl transformer_engine."
        )
    if is_local and tp > 1 and not args.sequence_parallel:
        raise ConfigError(
            f"--multi-latent-attention with --transformer-impl=local and --tensor-model-parallel-size={tp} "
            "needs --sequence-parallel: without it Megatron's gradients are wrong. Add the flag, or use "
            "--tensor-model-parallel-size 1."
        )


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the two of the ``2 * size`` chunks of a sequence that a context-parallel rank has.

    Rank 0 has the first and the last chunk, rank 1 the next from both ends, and so on: with a causal mask all
    ranks compute equally much. Megatron's `get_batch_on_this_cp_rank` divides a sequence in the same way.
    """
    return rank, 2 * size - 1 - rank


def _gather_sequence(
    key: torch.Tensor, value: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[whole sequence, ...]`` in the order of the sequence, from all ranks."""
    size = group.size()
    parts = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=group)
    gathered = [chunk for rank in range(size) for chunk in chunks_of(rank, size)]
    order = [gathered.index(chunk) for chunk in range(2 * size)]
    whole = parts.view(2 * size, -1, *parts.shape[1:])[order].view(parts.shape)
    keys, values = whole.split((key.size(-1), value.size(-1)), dim=-1)
    return keys.contiguous(), values.contiguous()
