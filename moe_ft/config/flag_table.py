"""Table of Megatron's flags by subject and class, each once, as argparse calls them (``dest``).

megatron/fault_tolerance/seams/flag_classes.py explains the classes. A test compares the table with the
installed parser: a flag of a new Megatron version must be examined and added here before it is accepted.
Neutral flags with a common beginning are written as in a shell: `rl_{profile profile_dir}`.
"""

import functools
import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

NEWER = "of newer versions and branches alone"
# Scripts of other authors may read these, and those that only other programs or refused data need.
REFUSED_HERE = "refused by pretrain_gpt_moe.py alone"
OF_SCRIPTS = (REFUSED_HERE, "only with refused kinds of data", "only of other programs")

FLAGS: dict[str, dict[str, str]] = {
    "layout": {
        "fingerprint": """
            context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
            pipeline_model_parallel_layout pipeline_model_parallel_size tensor_model_parallel_size""",
        "fingerprint untested": """
            account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers mtp_standalone
            use_tp_pp_dp_mapping""",
        "replay": "sequence_parallel",
        "replay untested": """
            cp_comm_type hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
            microbatch_group_size_per_vp_stage""",
        "neutral": "model_parallel_size num_layers_per_virtual_pipeline_stage",
        "neutral untested": "num_virtual_stages_per_pipeline_rank",
        "refused": """
            expert_tensor_parallel_num_weight_shards hybrid_context_parallel
            num_distributed_optimizer_instances tensor_parallel_num_weight_shards
            use_megatron_fsdp use_torch_fsdp2""",
    },
    "model": {
        "fingerprint": """
            activation_func_clamp_value add_bias_linear add_qkv_bias ffn_hidden_size
            glu_linear_offset group_query_attention hidden_size kv_channels kv_lora_rank
            layernorm_epsilon max_position_embeddings mscale mscale_all_dim mtp_num_layers
            multi_latent_attention normalization num_attention_heads num_layers num_query_groups
            padded_vocab_size position_embedding_type q_lora_rank qk_head_dim qk_layernorm
            qk_pos_emb_head_dim quick_geglu rope_type rotary_base rotary_percent
            rotary_scaling_factor rotary_seq_len_interpolation_factor seq_length softmax_type spec
            swiglu transformer_impl untie_embeddings_and_output_weights use_rope_scaling v_head_dim
            vocab_size window_attn_skip_freq window_size yarn_beta_fast yarn_beta_slow
            yarn_correction_range_round_to_int yarn_original_max_position_embeddings""",
        "fingerprint untested": """
            add_position_embedding apply_query_key_layer_scaling attention_output_gate
            decoder_seq_length dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_n_heads
            dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
            dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq encoder_num_layers
            encoder_seq_length experimental_attention_variant freeze_all_layers
            heterogeneous_layers_config_encoded_json layernorm_zero_centered_gamma
            linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
            linear_num_value_heads linear_value_head_dim mla_down_proj_fusion mrope_section
            mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim mup_base_hidden_size
            mup_embedding_mult mup_output_mult mup_width_mult no_rope_freq pad_vocab_size qk_l2_norm
            relative_attention_max_distance relative_attention_num_buckets rope_scaling_factor
            rotary_interleaved squared_relu use_mup use_transformer_engine_op_fuser""",
        "replay": """
            attention_backend attention_dropout calculate_per_token_loss hidden_dropout
            mtp_loss_scaling_factor""",
        "replay untested": """
            dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
            dsa_kernel_backend enable_experimental flash_attention_version
            heterogeneous_layers_config_path kitchen_attention_backend mtp_detach_heads qk_clip
            qk_clip_alpha qk_clip_threshold use_kitchen_attention""",
        "beginning": "init_method_std",
        "beginning untested": "embedding_init_method_std init_model_with_meta_device",
        "neutral": """
            decoder_num_layers deprecated_use_mcore_models make_vocab_size_divisible_by
            mamba_{head_dim num_groups num_heads state_dim training_ssm_states_dtype} onnx_safe
            use_mamba_mem_eff_path use_rotary_position_embeddings""",
    },
    "experts": {
        "fingerprint": """
            moe_ffn_hidden_size moe_layer_freq moe_router_enable_expert_bias moe_router_group_topk
            moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
            moe_router_topk_scaling_factor moe_shared_expert_gate
            moe_shared_expert_intermediate_size num_experts""",
        "fingerprint untested": """
            moe_apply_probs_on_input moe_grouped_gemm moe_latent_size moe_mlp_glu_interleave_size
            moe_shared_expert_glu_interleave_size use_grouped_gemm_for_dense_mlp
            use_grouped_gemm_for_shared_expert""",
        "replay": """
            moe_aux_loss_coeff moe_expert_capacity_factor moe_input_jitter_eps
            moe_pad_expert_input_to_capacity moe_router_bias_update_rate moe_router_dtype
            moe_router_load_balancing_type moe_token_dispatcher_type moe_token_drop_policy
            moe_z_loss_coeff""",
        "replay untested": """
            moe_enable_deepep moe_enable_routing_replay moe_expert_rank_capacity_factor
            moe_flex_dispatcher_backend moe_hybridep_pad_uneven_dispatch_inputs
            moe_ncclep_static_shape moe_ncclep_zero_copy moe_permute_fusion
            moe_permute_fusion_into_hybridep moe_router_force_biased
            moe_router_force_load_balancing moe_router_fusion moe_router_padding_for_fp8
            moe_router_padding_for_quantization moe_router_quantile_balancing_ema
            moe_shared_expert_overlap""",
        "beginning untested": "moe_upcycling_granularity moe_use_upcycling",
        "neutral": """
            moe_layer_recompute moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging""",
        "neutral untested": """
            moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_{blocks_permute
            blocks_unpermute sms sms_preprocessing} moe_paged_stash
            moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
            moe_paged_stash_page_size moe_routing_trace_{capture_hidden_states capture_logits
            dump_weights max_training_iters path}""",
        "refused": "moe_single_grouped_bias moe_single_grouped_weight",
    },
    "precision": {
        "fingerprint": "bf16 fp16",
        "fingerprint untested": "exp_avg_dtype exp_avg_sq_dtype main_params_dtype",
        "replay": """
            accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32""",
        "replay untested": """
            batch_invariant_mode deterministic_mode disable_bf16_reduced_precision_matmul
            first_last_layers_bf16 fp16_lm_cross_entropy fp32_residual_connection fp4
            fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len
            fp8_interval fp8_margin fp8_output_proj fp8_param_gather fp8_quantizer_factory
            fp8_recipe fp8_wgrad
            grad_reduce_in_bf16 main_grads_dtype num_layers_at_end_in_bf16
            num_layers_at_start_in_bf16 reuse_grad_buf_for_mxfp8_param_ag te_precision_config_file""",
        "record": """
            hysteresis initial_loss_scale loss_scale loss_scale_window min_loss_scale""",
        "refused": "fp4_param_gather",
    },
    "kernels": {
        "replay": """
            apply_rope_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
            gradient_accumulation_fusion masked_softmax_fusion no_persist_layer_norm""",
        "replay untested": """
            cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl cuda_graph_modules
            cuda_graph_scope_deprecated defer_embedding_wgrad_compute delay_wgrad_compute
            disable_jit_fuser enable_cuda_graph external_cuda_graph fused_residual_rmsnorm
            mlp_chunks_for_training symmetric_ar_type test_mode tp_comm_bulk_dgrad
            tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_cfg
            tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
            use_fused_weighted_squared_relu use_te_activation_func wgrad_deferral_limit""",
        "neutral": "clone_scatter_output_in_embedding use_flash_attn",
        "neutral untested": "cuda_graph_warmup_steps tp_comm_bootstrap_backend",
        "refused": "optimizer_cuda_graph",
    },
    "activation memory": {
        "neutral": """
            checkpoint_activations distribute_saved_activations empty_unused_memory_level
            recompute_{activations granularity method modules num_layers}""",
        "neutral untested": """
            activation_offload_fraction cpu_offloading_num_layers
            cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph
            delta_offload_bytes_across_pp_ranks fine_grained_activation_offloading
            fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size
            offload_modules""",
    },
    "communication": {
        "fingerprint": "ddp_bucket_size ddp_num_buckets use_distributed_optimizer",
        "fingerprint untested": """
            ddp_pad_buckets_for_high_nccl_busbw overlap_param_gather_with_optimizer_step""",
        "replay": "distributed_backend overlap_grad_reduce",
        "replay untested": """
            ddp_average_in_collective ddp_param_name_patterns_for_fp32_local_accumulation
            ddp_reduce_scatter_with_fp32_accumulation gradient_reduce_div_fusion
            nccl_communicator_config_path nccl_ub overlap_dispatch_backward_with_experts_wgrad
            overlap_moe_expert_parallel_comm sharp_enabled_group use_sharp""",
        "neutral": """
            align_grad_reduce align_param_gather distributed_timeout_minutes
            distributed_timeout_seconds_after_init local_rank overlap_p2p_comm
            overlap_param_gather""",
        "neutral untested": """
            create_all_gather_group disable_symmetric_registration
            ep_overlap_early_attn_memory_release flight_recorder_{dump_on_timeout dump_path
            extra_dump_on_exec include_only_active include_stack_trace trace_buffer_size}
            high_priority_a2a_comm_stream high_priority_stream_groups
            overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend
            use_gloo_process_groups use_ring_exchange_p2p""",
        "refused": "fake_process_group",
    },
    "data": {
        "fingerprint": """
            data_args_path data_path mock_data seed split tokenizer_type""",
        "fingerprint untested": """
            merge_file metadata_path per_split_data_args_path tokenizer_model train_data_path
            vocab_file""",
        "record untested": "phase_transition_iterations",
        "replay": """
            data_sharding dataloader_type eod_mask_loss reset_attention_mask reset_position_ids""",
        "replay untested": """
            allow_ambiguous_pad_tokens create_attention_mask_in_dataloader
            mid_level_dataset_surplus null_tokenizer_eod_id null_tokenizer_pad_id special_tokens
            tiktoken_num_special_tokens tiktoken_pattern tokenizer_hf_no_include_special_tokens
            tokenizer_hf_no_use_fast tokenizer_sentencepiece_ignore_extra_whitespaces
            tokenizer_sentencepiece_legacy""",
        "neutral": """
            chat_template data_cache_path mmap_bin_files num_dataset_builder_threads num_workers
            test_data_path trust_remote_code valid_data_path""",
        "neutral untested": """
            dataloader_defer_npy_index_mmap dataloader_fast_cache_load disable_msc_deprecated
            enable_msc object_storage_cache_path""",
    },
    "batches and length": {
        "replay": """
            global_batch_size micro_batch_size rampup_batch_size step_batch_size_schedule
            train_iters train_samples""",
        "replay untested": "decrease_batch_size_if_needed",
        "record": """
            eval_global_batch_size eval_interval eval_iters eval_micro_batch_size
            exit_duration_in_mins exit_interval exit_signal exit_signal_handler iterations_to_skip
            start_eval_at_iter""",
        "record untested": "multiple_validation_sets",
        "neutral": """
            batch_size exit_signal_handler_for_dataloader exit_signal_handler_for_training
            skip_train validation_set_names""",
    },
    "optimizer": {
        "fingerprint": """
            optimizer optimizer_cpu_offload optimizer_offload_fraction use_layer_wise_param_layout""",
        "fingerprint untested": """
            apply_wd_to_qk_layernorm decoupled_lr inference_rng_tracker muon_scalar_optimizer
            no_weight_decay_cond_type te_rng_tracker use_precision_aware_optimizer
            use_torch_optimizer_for_cpu_offload""",
        "replay": "clip_grad",
        "replay untested": """
            muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_nesterov
            muon_num_ns_steps muon_scale_mode muon_split_qkv muon_tp_mode""",
        "record": """
            adam_beta1 adam_beta2 adam_eps end_weight_decay lr lr_decay_iters lr_decay_samples
            lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples
            lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style min_lr
            override_opt_param_scheduler start_weight_decay use_checkpoint_opt_param_scheduler
            weight_decay weight_decay_incr_style""",
        "record untested": """
            decoupled_min_lr lion_beta1 lion_beta2 muon_momentum sgd_momentum""",
        "neutral": "overlap_cpu_optimizer_d2h_h2d warmup",
        "neutral untested": "dump_param_to_param_group_map pin_cpu_grads pin_cpu_params",
    },
    REFUSED_HERE: {
        "record untested": "full_validation",
        "refused": """
            apply_residual_connection_post_layernorm check_for_spiky_loss
            dataloader_inter_document_masking fim_data hybrid_layer_pattern
            hybrid_override_pattern init_method_xavier_uniform is_hybrid_model lazy_mpu_init
            log_straggler logits_load_dir mtp_hybrid_override_pattern openai_gelu
            per_dataset_sequences_path sample_rate sft vision_pretraining""",
    },
    "only with FSDP, which is refused": {
        "neutral": """
            data_parallel_sharding_strategy enable_full_sharding_in_hsdp
            fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration
            keep_fp8_transpose_cache megatron_fsdp_{enable_fine_grained_param_gather
            grad_comm_dtype main_grads_dtype main_params_dtype max_pool_double_buffer}
            outer_dp_sharding_strategy strict_fsdp_dtensor_load suggested_communication_unit_size
            torch_fsdp2_reshard_after_forward""",
    },
    "only with refused kinds of data": {
        "neutral": """
            fim_{eod_token fragment_rate middle_token no_prefix pad_token prefix_token rate
            split_sample spm_rate suffix_token} sft_tokenizer_prompt_format""",
    },
    "Megatron's checkpoints": {
        "beginning": """
            ckpt_step data_parallel_random_init finetune load no_load_optim no_load_rng
            perform_initialization pretrained_checkpoint use_cpu_initialization""",
        "beginning untested": """
            load_main_params_from_ckpt override_ckpt_iteration use_checkpoint_args
            use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args""",
        "neutral": """
            async_{ckpt_cpu_priority ckpt_io_priority ckpt_use_cpu_shm save strategy}
            auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_save ckpt_format
            ckpt_fully_parallel_{load load_exchange_algo load_process_group save save_deprecated
            save_process_group} ckpt_load_validate_sharding_integrity dist_ckpt_{format_deprecated
            optim_fully_reshardable save_pre_mcore_014 strictness workers}
            distrib_optim_fully_reshardable_mem_efficient exit_on_missing_checkpoint no_save_optim
            no_save_rng non_persistent_{global_ckpt_dir local_ckpt_algo local_ckpt_dir}
            replication_factor replication_jump save save_interval save_retain_interval
            stream_ckpt_dequant use_dist_ckpt_deprecated use_persistent_ckpt_worker
            verify_integrity""",
        "neutral untested": """
            ckpt_convert_format ckpt_convert_update_legacy_dist_opt_format
            non_persistent_ckpt_type non_persistent_save_interval replication
            save_{activations_interval dgrads_interval params_interval tokens_per_expert_interval
            wgrads_interval}""",
    },
    "logging and profiling": {
        "neutral": """
            app_tag_run_name app_tag_run_version barrier_with_L1_time config_logger_dir
            disable_straggler_on_startup enable_one_logger help log_{device_memory_used energy
            interval loss_scale_to_tensorboard memory_interval memory_to_tensorboard
            num_zeros_in_grad params_norm progress throughput timers_to_tensorboard
            validation_ppl_to_tensorboard world_size_to_tensorboard} logging_level
            memory_snapshot_path nvtx_ranges one_logger_{async project run_name} profile
            profile_ranks profile_step_end profile_step_start pytorch_profiler_collect_{callstack
            chakra shapes} record_memory_history record_shapes straggler_ctrlr_port
            straggler_minmax_count tensorboard_{dir log_interval queue_size} timing_log_level
            timing_log_option use_pytorch_profiler wandb_entity wandb_exp_name wandb_project
            wandb_save_dir""",
        "neutral untested": """
            log_max_attention_logit logits_save_{dir dtype top_k top_p top_p_min_k}
            run_workload_inspector_server""",
    },
    "faults and restarts": {
        "neutral": """
            check_for_large_grads check_for_nan_in_loss_and_grad
            check_weight_hash_across_dp_replicas_interval error_injection_rate
            error_injection_type inprocess_{active_world_size barrier_timeout completion_timeout
            empty_cuda_cache granularity hard_timeout heartbeat_interval heartbeat_timeout
            last_call_wait max_iterations monitor_process_interval monitor_thread_interval
            progress_watchdog_interval soft_timeout termination_grace_time} manual_gc
            manual_gc_eval manual_gc_interval result_rejected_tracker_filename train_sync_interval""",
        "neutral untested": """
            adlr_autoresume adlr_autoresume_interval calc_ft_timeouts enable_ft_package
            fault_injector_{delay_start_iteration fault_delay fault_probabilities fault_types
            mtti_seconds num_ranks offset_seconds ranks seed} ft_num_warmup_iters
            gpu_sniff_test_interval rerun_mode""",
        "refused": "inprocess_restart",
    },
    "only of other programs": {
        "neutral": """
            bert_binary_head bert_embedder_type bert_load biencoder_projection_dim
            biencoder_shared_query_context_model block_data_path classes_fraction
            data_per_class_fraction dino_{bottleneck_size freeze_last_layer head_hidden_size
            local_crops_number local_img_size norm_last_layer teacher_temp warmup_teacher_temp
            warmup_teacher_temp_epochs} embedding_path evidence_data_path grpo_{clamp_eps_lower
            clamp_eps_upper entropy_term_weight filter_groups_with_same_reward group_size
            iterations kl_beta prompts_per_step} head_lr_mult ict_head_size ict_load img_h img_w
            indexer_batch_size indexer_log_interval iter_per_epoch langrl_env_config
            logits_load_{decode_threads ignore_errors kd_loss_alpha msc_prefetch_depth
            prefetch_factor} mask_factor mask_prob mask_type num_channels num_classes
            output_bert_embeddings patch_dim query_in_block_prob refit_method
            retriever_report_topk_accuracies retriever_score_scaling rl_{consumption_granularity
            default_temperature default_top_k default_top_p generation_lag
            importance_sampling_truncation_coef inference_expert_model_parallel_size
            inference_expert_tensor_model_parallel_size inference_logprobs_is_correction
            inference_model_unified_memory_level inference_parsers
            inference_pipeline_model_parallel_size inference_tensor_model_parallel_size
            kv_cache_management_mode offload_inference_model_weights_when_idle
            offload_optimizer_during_inference partial_rollouts persist_cuda_graphs profile
            profile_dir prompts_per_eval sequence_packing_algo
            sequence_packing_max_sequences_per_bin skip_bos_token submission_granularity
            training_cuda_graphs use_sequence_packing verify_model_weights_swap} short_seq_prob
            swin_backbone_type titles_data_path use_one_sent_docs vision_backbone_type
            vision_pretraining_type vocab_extra_ids""",
        "refused": "perform_rl_step yaml_cfg",
    },
    "only for inference": {
        "neutral": """
            cache_mla_latents decode_only_cuda_graphs enable_chunked_prefill flash_decode
            inference_{batch_times_seqlen_threshold coordinator_port cuda_graph_all_prefills
            cuda_graph_max_tokens cuda_graph_scope disable_ep_consensus
            disable_triton_nvls_kernels dynamic_batching}
            inference_dynamic_batching_{async_sched_mode block_size buffer_size_gb
            cuda_graph_mixed_prefill_count cuda_graph_sizing_distribution enable_prefix_caching
            logprobs_mode mamba_memory_ratio max_requests max_tokens num_cuda_graphs
            paused_buffer_size_gb prefix_caching_coordinator_policy prefix_caching_eviction_policy
            prefix_caching_mamba_gb prefix_caching_routing_alpha sampling_backend
            track_generated_token_events track_paused_request_events unified_memory_level}
            inference_{fuse_tp_communication grouped_gemm_backend logging_step_interval
            max_requests max_seq_length moe_disable_fused_quant_kernels moe_token_dispatcher_type
            shards text_gen_server_logging use_synchronous_zmq_collectives wandb_logging}
            mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype max_tokens_to_oom
            mlp_chunks_for_prefill nccl_all_reduce_for_prefill num_speculative_tokens
            offset_sampling_seed_by_dp_rank use_legacy_static_engine""",
    },
    NEWER: {
        "neutral untested": """
            chunked_optimizer_state_offload offload_optimizer_states
            optimizer_state_offload_chunk_size_mb optimizer_state_offload_fraction""",
        "refused": "disable_param_buffers_cpu_backup dynamic_context_parallel",
    },
}

# Values that tests run with, of tested flags whose values are names.
_VALUES = """
    attention_backend=unfused ckpt_format=torch_dist dataloader_type=cyclic,single
    distributed_backend=gloo lr_decay_style=constant,cosine,linear lr_wsd_decay_style=exponential
    moe_router_dtype=fp32 moe_router_load_balancing_type=aux_loss,none,seq_aux_loss
    moe_router_score_function=sigmoid,softmax moe_token_dispatcher_type=allgather,alltoall
    moe_token_drop_policy=position,probs normalization=LayerNorm,RMSNorm
    optimizer=adam,muon,sgd,soap position_embedding_type=learned_absolute,rope,yarn
    recompute_granularity=full,selective
    recompute_method=uniform recompute_modules=core_attn,moe rope_type=rope,yarn
    softmax_type=learnable,vanilla tokenizer_type=NullTokenizer transformer_impl=local
    weight_decay_incr_style=constant
"""
TESTED_VALUES = {
    name: frozenset(values.split(","))
    for name, _, values in (word.partition("=") for word in _VALUES.split())
}

# Of these paths the name and the content are kept (seams/contents.py): where files lie may change.
PATHS = frozenset(
    {
        *("tokenizer_model", "vocab_file", "merge_file", "metadata_path"),
        *("te_precision_config_file", "heterogeneous_layers_config_path"),
        *("nccl_communicator_config_path", "tp_comm_overlap_cfg"),
    }
)

# Not flags: what Megatron derives from several of them, or from the launcher.
DERIVED = {"fingerprint": "virtual_pipeline_model_parallel_size world_size"}


class Kind(Enum):
    """Meaning of a flag for checkpoints; see flag_classes.py."""

    NEUTRAL = "neutral"
    FINGERPRINT = "fingerprint"
    REPLAY = "replay"
    RECORD = "record"
    BEGINNING = "beginning"
    REFUSED = "refused"


class FlagClass(NamedTuple):
    """Subject of one flag, its meaning for checkpoints, and whether it is without the mark ``untested``."""

    subject: str
    kind: Kind
    is_tested: bool


def names_in(text: str) -> list[str]:
    """Return the names of flags in a text of the table; each ``a_{b c}`` stands for ``a_b a_c``."""

    def written_out(match: re.Match[str]) -> str:
        return " ".join(match["begin"] + end for end in match["ends"].split())

    return re.sub(r"(?P<begin>\w+)\{(?P<ends>[^}]*)\}", written_out, text).split()


@functools.cache
def flag_classes() -> Mapping[str, FlagClass]:
    """Return the class of every flag, by argparse's ``dest``."""
    return classes_in(FLAGS)


def classes_in(table: Mapping[str, Mapping[str, str]]) -> dict[str, FlagClass]:
    """Return the classes of a table by name."""
    return {
        name: FlagClass(subject, Kind(heading.split()[0]), not heading.endswith(" untested"))
        for subject, classes in table.items()
        for heading, names in classes.items()
        for name in names_in(names)
    }
