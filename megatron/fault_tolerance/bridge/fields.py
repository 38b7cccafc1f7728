"""Table of the fields of Megatron-Bridge's configuration by section and class, and the settings of a job.

It has the fields without the name of one of Megatron's flags, and those that mean something else than the
flag. All others have the class of their flag (moe_ft/config/flag_table.py) and are settings under its name;
those of the table are settings such as `model.activation_func`. A name that is in several sections is read
from the one whose part of the table lacks it (bridge/view.py). A field that nobody has classified is part of
the fingerprint, with a line at the start. seams/flag_classes.py explains the classes.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

from megatron.fault_tolerance.seams.contents import last_part
from megatron.fault_tolerance.seams.flag_classes import (
    UNKNOWN,
    as_json,
    lines_by_subject,
    names_in_value,
)
from megatron.fault_tolerance.seams.megatron_loop import megatron_parser
from moe_ft.config.flag_table import (
    DERIVED,
    TESTED_VALUES,
    FlagClass,
    Kind,
    classes_in,
    flag_classes,
)
from moe_ft.format.identity import EVALUATION, digest_setting

FIELDS: dict[str, dict[str, str]] = {
    "model": {
        "fingerprint": "activation_func gated_linear_unit params_dtype transformer_layer_spec",
        "fingerprint untested": """
            apply_residual_connection_post_layernorm beta_fast beta_slow dense_grouped_gemm
            expert_gtp_weight_remat_size fp4_param fp8_param gtp_weight_remat_size
            heterogeneous_block_specs hybrid_{attention_ratio layer_pattern mlp_ratio stack_spec}
            is_hybrid_model keep_mtp_spec_in_bf16 mamba_{chunk_size head_dim num_groups num_heads
            stack_spec state_dim training_ssm_states_dtype} mtp_enabled mtp_hybrid_override_pattern
            original_max_position_embeddings post_wrap_hooks pre_wrap_hooks quant_recipe
            softmax_scale use_arbitrary_attention_mask use_kitchen
            use_transformer_engine_full_layer_spec yarn_{mscale mscale_all_dim
            rotary_scaling_factor}""",
        "replay": "bias_activation_fusion pipeline_dtype",
        "replay untested": """
            activation_func_fp8_input_store autocast_dtype enable_autocast
            fp8_dot_product_attention fp8_multi_head_attention fused_single_qkv_rope
            memory_efficient_layer_norm moe_router_topk_limited_devices moe_token_dropping
            parallel_output scatter_embedding_sequence_parallel tp_comm_atomic_{ag rs}
            tp_comm_overlap_disable_{fc1 qkv} tp_only_amax_red use_mamba_mem_eff_path
            variable_seq_lengths""",
        "beginning": "embedding_init_method init_method output_layer_init_method",
        # Functions that setup, the optimizer and the loop put there; made into others; copies; and one that
        # recipes set and nothing reads.
        "neutral": """
            experimental_attention_variant_loss_scale_func finalize_model_grads_func
            grad_scale_func grad_sync_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
            param_sync_func timers barrier_with_L1_time hybrid_override_pattern
            inference_rng_tracker should_pad_vocab use_te_rng_tracker deallocate_pipeline_outputs
            extra_checkpoint_metadata generation_config hetereogenous_dist_checkpoint hf_model_id
            hf_model_revision inference_sampling_seed moe_a2a_overlap use_inference_optimized_layers""",
        "neutral untested": """
            batch_p2p_comm batch_p2p_sync cpu_offloading cpu_offloading_{activations
            double_buffering weights} cuda_graph_retain_backward_graph
            cuda_graph_use_single_mempool disable_parameter_transpose_cache
            num_microbatches_with_partial_activation_checkpoints""",
        "refused": "restore_modelopt_state",
    },
    "train": {
        "replay untested": "check_optimizer_step_success",
        "neutral": "eval_interval eval_iters skip_sync_grad_norm_across_mp skip_train",
        "refused": "num_epochs",
    },
    # Bridge reads the other two in the section of the data.
    "validation": {"neutral": "full_validation multiple_validation_sets test_mode"},
    "optimizer": {
        "fingerprint": "bf16 fp16 params_dtype",
        "fingerprint untested": """
            adaptive_muon_moment2_method store_param_remainders
            use_layer_wise_distributed_optimizer""",
        "replay untested": """
            adaptive_muon_beta2 adaptive_muon_eps decoupled_weight_decay fp8_recipe
            grad_norm_skip_threshold soap_{precondition_frequency shampoo_beta use_kl_shampoo}""",
        "neutral": """
            config_logger_dir overlap_param_gather timers
            use_precision_aware_optimizer_no_fp8_or_ds_fp8""",
    },
    "scheduler": {
        "record untested": "max_steps",
        "neutral": "lr_decay_steps lr_warmup_steps wd_incr_steps wsd_decay_steps",
    },
    "ddp": {
        "replay untested": "delay_wgrad_compute reuse_grad_buf_for_mxfp8_param_ag",
        "neutral": """
            check_for_nan_in_grad fsdp_all_gather_in_start_param_sync
            megatron_fsdp_{cuda_graph_mode use_decoupled_grad} use_custom_fsdp
            use_distributed_optimizer""",
    },
    "dataset": {
        "fingerprint": "blend blend_per_split mock random_seed",
        "fingerprint untested": """
            add_extra_token_to_sequence fim_{data extra_tokens fragment_rate no_prefix rate
            split_sample spm_rate} inter_document_masking""",
        "replay": "skip_getting_attention_mask_from_dataset",
        "replay untested": "drop_last",
        # `finalize` makes the path into a blend, and the split into a matrix.
        "neutral": """
            context_parallel_size data_parallel_size data_path dataloader_load dataloader_save
            drop_last_partial_validation_sequence hybrid_context_parallel
            per_dataset_sequences_path persistent_workers pin_memory seq_length sequence_length
            sequence_parallel_size sequences_per_dataset split_matrix token_dtype_code tokenizer
            trust_remote_code""",
    },
    "tokenizer": {
        "fingerprint": "vocab_size",
        "fingerprint untested": "vocab_extra_ids",
        "replay untested": """
            force_system_message hf_tokenizer_kwargs image_tag_type sp_tokenizer_kwargs
            tiktoken_special_tokens tokenizer_prompt_format""",
        "neutral": """
            chat_template_path make_vocab_size_divisible_by rank tensor_model_parallel_size
            use_tokenizer_vocab_size""",
    },
    "checkpoint": {
        "neutral": """
            also_save_hf_checkpoint async_write_results_mp_mode custom_manager_class
            hf_{distributed_save save_every_n_ranks source_path trust_remote_code} most_recent_k
            save_tokenizer_assets storage_writers_per_rank""",
    },
    "logger": {
        "neutral": """
            barrier_with_L1_time comet_{api_key experiment_name project tags workspace}
            filter_warnings log_{l2_norm_grad_to_tensorboard max_attention_logit
            num_zeros_in_grad runtime_to_tensorboard throughput_to_tensorboard} memory_keys
            mlflow_{description experiment log_artifacts run_name tags tracking_uri}
            modules_to_filter runtime_time_unit save_config_filepath set_level_for_all_loggers
            skip_train_metrics_log throughput_window_size""",
    },
    "dist": {
        "neutral": "external_gpu_device_mapping",
        "beginning untested": "lazy_mpu_init",
        "refused": "eval_context_parallel_size use_decentralized_pg",
    },
    "rng": {},
    "rerun_state_machine": {"neutral untested": "check_for_spiky_loss spiky_loss_factor"},
    "profiling": {"neutral": "use_nsys_profiler"},
    "straggler": {"neutral": "enable_straggler_on_startup log_straggler"},
    "ft": {"neutral": "simulate_fault simulated_fault_{base_delay rank type}"},
    "nvrx_straggler": {
        "neutral": """
            calc_{individual_gpu_perf relative_gpu_perf} enable_logging enabled
            gpu_{individual_perf_threshold relative_perf_threshold} logger_name
            num_gpu_perf_scores_to_print profiling_interval report_time_interval
            stop_if_detected""",
    },
    "tensor_inspect": {
        "replay untested": "allow_custom_feature_dirs enabled feature_dirs features",
        "neutral": "init_training_step log_dir",
    },
    "inprocess_restart": {
        "neutral": """
            active_world_size barrier_timeout completion_timeout empty_cuda_cache granularity
            hard_timeout heartbeat_interval heartbeat_timeout last_call_wait max_iterations
            max_rank_faults monitor_process_interval monitor_process_logdir
            monitor_thread_interval progress_watchdog_interval soft_timeout
            termination_grace_time""",
        "refused": "enabled",
    },
    "peft": {"refused": "params_to_save"},
}
# `runtime_config_update` has copied their fields to the others; of the third the class counts.
COPIED = ("mixed_precision", "comm_overlap", "optimizer_config_override_provider", "env_vars")

# Flags whose field has another name; after `not` the field is true where the flag is not given.
RENAMED = {
    "accumulate_allreduce_grads_in_fp32": "ddp.grad_reduce_in_fp32",
    "check_for_nan_in_loss_and_grad": "rerun_state_machine.check_for_nan_in_loss",
    "ckpt_fully_parallel_load": "checkpoint.fully_parallel_load",
    "ckpt_fully_parallel_save": "checkpoint.fully_parallel_save",
    "create_attention_mask_in_dataloader": "dataset.create_attention_mask",
    "cuda_graph_scope_deprecated": "model.cuda_graph_scope",
    "data_cache_path": "dataset.path_to_cache",
    "dataloader_defer_npy_index_mmap": "dataset.defer_npy_index_mmap",
    "dataloader_fast_cache_load": "dataset.fast_cache_load",
    "ddp_average_in_collective": "ddp.average_in_collective",
    "ddp_bucket_size": "ddp.bucket_size",
    "ddp_num_buckets": "ddp.num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw": "ddp.pad_buckets_for_high_nccl_busbw",
    "ddp_param_name_patterns_for_fp32_local_accumulation": (
        "ddp.param_name_patterns_for_fp32_local_accumulation"
    ),
    "ddp_reduce_scatter_with_fp32_accumulation": "ddp.reduce_scatter_with_fp32_accumulation",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "enable_experimental": "dist.enable_megatron_core_experimental",
    "no_load_optim": "not checkpoint.load_optim",
    "no_load_rng": "not checkpoint.load_rng",
    "no_persist_layer_norm": "not model.persist_layer_norm",
    "no_save_optim": "not checkpoint.save_optim",
    "no_save_rng": "not checkpoint.save_rng",
    "num_experts": "model.num_moe_experts",
    "rotary_seq_len_interpolation_factor": "model.seq_len_interpolation_factor",
    "untie_embeddings_and_output_weights": "not model.share_embeddings_and_output_weights",
    "use_rope_scaling": "model.rope_scaling",
}
_FLAGS = {place.removeprefix("not "): flag for flag, place in RENAMED.items()}
_BLENDS = ("blend", "blend_per_split")
_SPLITS = ("train", "valid", "test")
_INNER = "transformer"  # settings of Megatron Core in those of some models
_WITH_CLASS = (
    "model",
    "dataset",
    "optimizer_config_override_provider",
)  # one's own may do anything
_FILLED_IN = frozenset(  # where they are not given, so their values tell nothing
    {
        *("model.autocast_dtype", "model.embedding_init_method_std", "tokenizer.pad_vocab_size"),
        "model.microbatch_group_size_per_vp_stage",
    }
)
_SECRET = "tokenizer.hf_tokenizer_kwargs"  # may hold a token: a digest is compared


class Field(NamedTuple):
    """One field of a section.

    Attributes:
        of: what has it: the section, or the settings of Megatron Core in it.
        flag: the flag of Megatron that it is; empty if it is a setting of its own.
    """

    section: str
    name: str
    of: Any
    flag: str
    of_class: FlagClass

    @property
    def key(self) -> str:
        """The field as people write it."""
        return f"{self.section}.{self.name}"

    @property
    def value(self) -> Any:
        """The value that the configuration has now."""
        return getattr(self.of, self.name)


def fields_of(config: Any) -> Iterator[Field]:
    """Yield the fields of all sections of a ConfigContainer, and further public attributes that they have."""
    seen = set()
    for section, of in _parts(config):
        for name in {each.name: None for each in fields(of)} | dict.fromkeys(vars(of)):
            if name.startswith("_") or name == _INNER or not hasattr(of, name):
                continue
            flag, own = _class_of(section, name)
            if (section, name) not in seen:
                yield Field(section, name, of, flag, own)
            else:  # Bridge reads the other one, and Megatron Core perhaps this one
                yield Field(f"{section}.{_INNER}", name, of, "", own)
            seen.add((section, name))


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sections that a configuration has, in the order in which names are looked up."""
    names = [*FIELDS, *(each.name for each in fields(config) if each.name not in COPIED)]
    for section in dict.fromkeys(names):
        found = getattr(config, section, None)
        for of in (found, getattr(found, _INNER, None)):
            if is_dataclass(of):
                yield section, of


@functools.cache
def _own_classes() -> Mapping[tuple[str, str], FlagClass]:
    """Return the classes of the table by section and name."""
    return {
        (section, name): each
        for section in FIELDS
        for name, each in classes_in({section: FIELDS[section]}).items()
    }


def _class_of(section: str, name: str) -> tuple[str, FlagClass]:
    """Return the flag that a field is, or none, and its class."""
    if own := _own_classes().get((section, name)):
        return "", own
    flag = _FLAGS.get(f"{section}.{name}", name)
    if flag in DERIVED["fingerprint"].split():
        return flag, FlagClass(section, Kind.FINGERPRINT, True)
    unknown = FlagClass(UNKNOWN, Kind.FINGERPRINT, False)
    return (flag, flag_classes()[flag]) if flag in flag_classes() else ("", unknown)


def own_settings(config: Any, kind: Kind) -> dict[str, Any]:
    """Return the settings of a class that are no flags of Megatron, by field, as JSON values."""
    found = {
        each.key: as_json(each.value)
        for each in fields_of(config)
        if not each.flag and each.of_class.kind is kind and each.name not in _BLENDS
    }
    if _SECRET in found:
        found[_SECRET] = digest_setting(_SECRET, str(found[_SECRET]))
    if kind is Kind.FINGERPRINT:
        for name in _WITH_CLASS:
            found[name] = type(getattr(config, name, None)).__qualname__
        for key, words in data_words(config).items():
            if key not in EVALUATION:
                found[key] = [*map(last_part, words)]
    return found


def script_settings(config: Any) -> dict[str, str]:
    """Return digests of the environment variables of the configuration: nobody knows what reads them."""
    found = {
        f"env_vars.{name}": str(text)
        for name, text in (getattr(config, "env_vars", None) or {}).items()
    }
    return {key: digest_setting(key, text) for key, text in sorted(found.items())}


def data_words(config: Any) -> dict[str, list[str]]:
    """Return the words of each list of data sets: paths, each after its weight if there are weights."""
    whole, parts = (getattr(config.dataset, name, None) for name in _BLENDS)
    blends = {"dataset.blend": whole} | {
        f"dataset.blend_per_split[{split}]": blend
        for split, blend in zip(_SPLITS, parts or (), strict=False)
    }
    return {key: _words(*blend) for key, blend in blends.items() if blend}


def _words(paths: Sequence[Any], weights: Sequence[float] | None = None) -> list[str]:
    words = [(path,) for path in paths] if weights is None else zip(weights, paths, strict=True)
    return [str(word) for each in words for word in each]


def untested_lines(args: Any, config: Any) -> list[str]:
    """Return one text with the untested and unknown fields and values of a job by subject, or none.

    Args:
        args: the view of the configuration.
    """
    usual = vars(megatron_parser().parse_args([]))  # with which most tests run
    found: dict[str, list[str]] = {}
    for each in fields_of(config):
        names: list[str] = []
        value = getattr(args, each.flag or "", each.value)
        if each.flag in TESTED_VALUES:
            names = sorted({*names_in_value(value)} - TESTED_VALUES[each.flag])
            is_named = bool(names)
        else:
            own = _default(each)
            default = usual.get(each.flag, own)
            is_on = value is True and not default  # by default on in Bridge alone
            is_other = as_json(value) not in map(as_json, (own, default)) and bool(value or own)
            is_untested = not each.of_class.is_tested and each.key not in _FILLED_IN
            is_named = is_untested and (is_on or is_other)
        if is_named:
            found.setdefault(each.of_class.subject, []).append(" ".join([each.key, *names]))
    return lines_by_subject(found)


def _default(each: Field) -> Any:
    """Return the value of a field that is not given; None where there must be one."""
    field = next((own for own in fields(each.of) if own.name == each.name), None)
    if field is not None and field.default_factory is not MISSING:
        return field.default_factory()
    return None if field is None or field.default is MISSING else field.default
