"""Megatron's flags as `plan` reads them, without importing Megatron and torch.

The flags that decide sizes are declared here a second time, because Megatron's parser cannot be had without
torch; a test compares every word of the declaration with that parser. All other flags are known by name only:
flag_table.py has them, and this file says which of them change nothing that is saved.
"""

import argparse
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from moe_ft.config.flag_table import Kind, flag_classes
from moe_ft.errors import ConfigError

_POSITIONS = ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
_OPTIMIZERS = ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")
_TOKENIZERS = (
    *("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer"),
    *("GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer"),
    *("MultimodalTokenizer", "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"),
)
_FORMATS = ("fp32", "fp16", "bf16", "fp8")

# Flags with a number: the default.
_NUMBERS: Mapping[str, int | None] = {
    **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "kv_channels"), None),
    **dict.fromkeys(("ffn_hidden_size", "moe_ffn_hidden_size", "num_experts"), None),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "max_position_embeddings"), None),
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "ddp_bucket_size"), None),
    **dict.fromkeys(("train_iters", "train_samples", "global_batch_size"), None),
    **dict.fromkeys(("q_lora_rank", "mtp_num_layers"), None),
    **dict.fromkeys(
        ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), None
    ),
    **dict.fromkeys(("qk_head_dim", "v_head_dim"), 128),
    "kv_lora_rank": 32,
    "qk_pos_emb_head_dim": 64,
    **dict.fromkeys(("micro_batch_size", "seq_length"), None),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
    **dict.fromkeys(("context_parallel_size", "expert_model_parallel_size"), 1),
    "expert_tensor_parallel_size": None,
    "num_query_groups": 1,
    "moe_router_topk": 2,
    "make_vocab_size_divisible_by": 128,
}
# Flags with a word: the default, and the words that there are.
_WORDS: Mapping[str, tuple[str | None, Sequence[str] | None]] = {
    "normalization": ("LayerNorm", ("LayerNorm", "RMSNorm")),
    "position_embedding_type": ("learned_absolute", _POSITIONS),
    "optimizer": ("adam", _OPTIMIZERS),
    "tokenizer_type": (None, _TOKENIZERS),
    "tokenizer_model": (None, None),
    "pipeline_model_parallel_layout": (None, None),
    "main_params_dtype": ("fp32", _FORMATS[:2]),
    "exp_avg_dtype": ("fp32", _FORMATS),
    "exp_avg_sq_dtype": ("fp32", _FORMATS),
}
_SWITCHES = (
    *("add_qkv_bias", "group_query_attention", "qk_layernorm", "swiglu", "moe_grouped_gemm"),
    *("moe_shared_expert_gate", "untie_embeddings_and_output_weights"),
    *("use_rotary_position_embeddings", "use_distributed_optimizer", "overlap_grad_reduce"),
    *("use_precision_aware_optimizer", "bf16", "fp16", "multi_latent_attention"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("fp32_residual_connection",),
)

# Flags whose spelling is not their ``dest`` with dashes.
_NO = """
    align_param_gather bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
    check_for_nan_in_loss_and_grad ckpt_fully_parallel_save create_attention_mask_in_dataloader
    data_sharding gradient_accumulation_fusion gradient_reduce_div_fusion masked_softmax_fusion
    mmap_bin_files pin_cpu_grads pin_cpu_params use_layer_wise_param_layout"""
_NO_OR_DISABLE = """
    align_grad_reduce ckpt_load_validate_sharding_integrity clone_scatter_output_in_embedding
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu flight_recorder_dump_on_timeout
    flight_recorder_extra_dump_on_exec flight_recorder_include_only_active fp8_wgrad
    log_loss_scale_to_tensorboard manual_gc_eval pad_vocab_size strict_fsdp_dtensor_load
    stream_ckpt_dequant tokenizer_sentencepiece_ignore_extra_whitespaces tp_comm_bulk_dgrad
    tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag tp_comm_split_rs
    use_tokenizer_model_from_checkpoint_args"""
_BOTH_WAYS = """
    inference_disable_ep_consensus inference_text_gen_server_logging
    inference_use_synchronous_zmq_collectives inference_wandb_logging rl_inference_logprobs_is_correction
    rl_offload_inference_model_weights_when_idle rl_partial_rollouts rl_persist_cuda_graphs
    rl_skip_bos_token rl_training_cuda_graphs rl_use_sequence_packing rl_verify_model_weights_swap
    yarn_correction_range_round_to_int"""
_SPELLED: Mapping[str, str] = {
    "help": "-h --help",
    "perform_initialization": "--no-initialization",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_bias_linear": "--disable-bias-linear",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
    "add_position_embedding": "--no-position-embedding",
    "bert_binary_head": "--bert-no-binary-head",
    "muon_split_qkv": "--muon-no-split-qkv",
    "apply_rope_fusion": "--no-rope-fusion",
    "deprecated_use_mcore_models": "--use-mcore-models",
    "override_opt_param_scheduler": "--override-opt_param-scheduler --override-opt-param-scheduler",
    "use_checkpoint_opt_param_scheduler": (
        "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler"
    ),
    "save_interval": "--save-interval --persistent-save-interval",
    "use_dist_ckpt_deprecated": "--use-dist-ckpt",
    "dist_ckpt_format_deprecated": "--dist-ckpt-format",
    "ckpt_fully_parallel_save_deprecated": "--ckpt-fully-parallel-save",
    "use_gloo_process_groups": "--disable-gloo-process-groups",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "nccl_ub": "--use-nccl-ub",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
    "metadata_path": "--tokenizer-metadata",
    "special_tokens": "--tokenizer-special-tokens",
    "barrier_with_L1_time": "--no-barrier-with-level-1-timing",
    "cuda_graph_scope_deprecated": "--cuda-graph-scope",
    "inference_dynamic_batching_enable_prefix_caching": (
        "--inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching"
    ),
    "offset_sampling_seed_by_dp_rank": "--use-same-sampling-seed-across-dp-ranks",
    "enable_one_logger": "--no-one-logger",
    "disable_msc_deprecated": "--disable-msc",
}

# Flags that are in the fingerprint of a run and change no size.
_SAME_SIZE = """
    activation_func_clamp_value add_position_embedding apply_query_key_layer_scaling
    apply_wd_to_qk_layernorm data_args_path data_path decoder_seq_length decoupled_lr
    encoder_seq_length glu_linear_offset inference_rng_tracker layernorm_epsilon
    layernorm_zero_centered_gamma mock_data moe_apply_probs_on_input moe_mlp_glu_interleave_size
    moe_router_group_topk moe_router_num_groups moe_router_pre_softmax moe_router_score_function
    moe_router_topk_scaling_factor moe_shared_expert_glu_interleave_size mrope_section mscale
    mscale_all_dim mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
    mup_output_mult mup_width_mult no_rope_freq no_weight_decay_cond_type
    overlap_param_gather_with_optimizer_step pad_vocab_size per_split_data_args_path qk_l2_norm
    rope_scaling_factor rope_type rotary_base rotary_interleaved rotary_percent
    rotary_scaling_factor rotary_seq_len_interpolation_factor seed split squared_relu
    te_rng_tracker train_data_path transformer_impl use_grouped_gemm_for_dense_mlp
    use_grouped_gemm_for_shared_expert use_mup use_rope_scaling use_transformer_engine_op_fuser
    window_attn_skip_freq window_size yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int yarn_original_max_position_embeddings"""
# Flags of other classes that can change a size.
_OTHER_SIZE = """
    heterogeneous_layers_config_path model_parallel_size use_checkpoint_args
    use_mp_args_from_checkpoint_args"""
# Flags whose effect on sizes is small or a matter of places: a plan names it.
_VIRTUAL = "each stage is planned as if its layers were consecutive and one chunk"
_QUANTIZED = "the scales and histories of its modules are not counted"
_NOTED: Mapping[str, str] = {
    "num_layers_per_virtual_pipeline_stage": _VIRTUAL,
    "num_virtual_stages_per_pipeline_rank": _VIRTUAL,
    "fp8": _QUANTIZED,
    "fp4": _QUANTIZED,
    "te_precision_config_file": _QUANTIZED,
    "moe_router_enable_expert_bias": "the biases of routers, one number an expert, are not counted",
    "ddp_pad_buckets_for_high_nccl_busbw": "the padding of buckets is not counted",
}


def moe_layer_pattern(text: str) -> int | list[int]:
    """Return the value of --moe-layer-freq: every so many layers, or a 0 or 1 for each.

    Raises:
        ValueError: if it is neither a number nor a list such as ([0]*1+[1]*3)*2.
    """
    if "[" not in text:
        return int(text)
    if re.search(r"[^,\d\[\]()+*]", text):
        raise ValueError(f"not a list of layers: {text}")
    try:
        pattern = eval(text, {"__builtins__": {}})  # of digits, commas, brackets, + and * only
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"not a list of layers: {text}") from error
    if not isinstance(pattern, list) or not all(each in (0, 1) for each in pattern):
        raise ValueError(f"not a list of layers: {text}")
    return pattern


def add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron that decide sizes, as Megatron's own parser has them."""
    group = parser.add_argument_group("Megatron")
    for name, number in _NUMBERS.items():
        group.add_argument(_spelling(name)[0], dest=name, type=int, default=number)
    for name, (word, choices) in _WORDS.items():
        kind: Any = None if name.endswith("_dtype") else str
        group.add_argument(_spelling(name)[0], dest=name, type=kind, default=word, choices=choices)
    for name in _SWITCHES:
        group.add_argument(_spelling(name)[0], dest=name, action="store_true")
    group.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    group.add_argument("--moe-layer-freq", type=moe_layer_pattern, default=1)


@functools.cache
def spellings() -> Mapping[str, str]:
    """Return the ``dest`` of every flag of Megatron, by each way to write it."""
    return {spelled: name for name in flag_classes() for spelled in _spelling(name)}


def spelling(name: str) -> str:
    """Return the way to write a flag of Megatron, from its ``dest``."""
    return _spelling(name)[0]


@functools.cache
def _special() -> Mapping[str, tuple[str, ...]]:
    found = {name: tuple(forms.split()) for name, forms in _SPELLED.items()}
    for names, forms in (
        (_NO, ("--no-{}",)),
        (_NO_OR_DISABLE, ("--no-{}", "--disable-{}")),
        (_BOTH_WAYS, ("--{}", "--no-{}")),
    ):
        for name in names.split():
            found[name] = tuple(form.format(name.replace("_", "-")) for form in forms)
    return found


def _spelling(name: str) -> tuple[str, ...]:
    return _special().get(name) or ("--" + name.replace("_", "-"),)


def select_flags(
    words: Sequence[str], parser: argparse.ArgumentParser, *, has_script: bool = False
) -> tuple[list[str], list[str]]:
    """Return the words that a parser reads, and a line on each other flag that changes sizes a little.

    Args:
        words: flags with their values.
        parser: of Megatron's flags that decide sizes, and of other flags.
        has_script: whether a script reads them too: unknown flags are then taken as its own.

    Raises:
        ConfigError: if a flag is unknown, or changes sizes in a way that is not counted.
    """
    read, notes = [], []
    for flag, group in _by_flag(words):
        if flag in parser._option_string_actions:
            read += group
        elif has_script and flag not in spellings() and not flag.startswith("--moe-ft-"):
            notes.append(f"{flag}: taken as a flag of the script, and not counted")
        elif note := _note(flag, [*spellings(), *parser._option_string_actions]):
            notes.append(f"{flag}: {note}")
    return read, notes


def _by_flag(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with its words: the flag itself and its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("-") and not re.match(r"-[\d.]", word):
            if group:
                yield group[0].partition("=")[0], group
            group = []
        elif not group:
            raise ConfigError(
                f"'{word}' is no flag. Begin with a flag, or with the launcher's command."
            )
        group.append(word)
    if group:
        yield group[0].partition("=")[0], group


def _note(flag: str, known: Sequence[str]) -> str:
    """Return a line on a flag that is not read, empty if it changes no size."""
    name = spellings().get(flag)
    if name is None:
        close = difflib.get_close_matches(flag, known, 1)
        hint = f" Is it {close[0]}?" if close else ""
        raise ConfigError(f"{flag} is neither a flag of Megatron nor of moe_ft.{hint} Correct it.")
    if name in _NOTED:
        return _NOTED[name]
    kind = flag_classes()[name].kind
    if kind is Kind.REFUSED:
        raise ConfigError(
            f"{flag} cannot be planned: training refuses it, or most values of it. Leave it out."
        )
    is_sized = kind is Kind.FINGERPRINT and name not in _SAME_SIZE.split()
    if name == "help":
        raise ConfigError(
            f"{flag} starts no training. For help, leave out the command line of training."
        )
    if is_sized or name in _OTHER_SIZE.split():
        raise ConfigError(
            f"{flag} cannot be planned: it changes what is saved in a way that plan does not count. Leave it "
            "out to plan a job without it."
        )
    return ""


def refuse(message: str) -> NoReturn:
    """Raise ConfigError instead of printing argparse's usage, which has hundreds of lines."""
    raise ConfigError(f"{message}. Correct it, or look at --help of the program.")
