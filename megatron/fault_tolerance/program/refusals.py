"""Flags of Megatron that pretrain_gpt_moe.py does not support, each with the reason and the remedy.

A script of your own may support them. seams/refusals.py has the rules that hold for every program.
"""

from megatron.fault_tolerance.seams.refusals import SEAM_REFUSALS, refused_flag
from moe_ft.config.rules import Rule

_IGNORED = "pretrain_gpt_moe.py would ignore it"
_UNREAD = "nothing in Megatron reads it, so it would have no effect"
_NOT_GPT = "pretrain_gpt_moe.py trains GPTs only, and would ignore it"

PROGRAM_REFUSALS: tuple[Rule, ...] = (
    # Features that a training program must implement, and this one does not.
    refused_flag("sft", _IGNORED),
    refused_flag("fim_data", _IGNORED),
    refused_flag("dataloader_inter_document_masking", _IGNORED),
    refused_flag("per_dataset_sequences_path", _IGNORED),
    refused_flag("check_for_spiky_loss", _IGNORED),
    refused_flag(
        "logits_load_dir",
        "pretrain_gpt_moe.py has no loss for it, and would train without the teacher",
        "Leave it out, or distill with Megatron's own pretrain_gpt.py",
    ),
    refused_flag(
        "log_straggler",
        _IGNORED,
        "Leave it out; --timing-log-level 2 --timing-log-option all shows the times of every rank",
    ),
    refused_flag(
        "vision_pretraining", _NOT_GPT, "Leave it out, or use Megatron's own program for it"
    ),
    *(
        refused_flag(dest, _NOT_GPT, "Describe the model with --num-layers and --moe-layer-freq")
        for dest in (
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "mtp_hybrid_override_pattern",
            "is_hybrid_model",
        )
    ),
    refused_flag(
        "lazy_mpu_init", "Megatron then leaves the process groups to its caller, which builds none"
    ),
    # Flags that nothing reads, although a user would expect an effect.
    refused_flag("apply_residual_connection_post_layernorm", _UNREAD),
    refused_flag("openai_gelu", _UNREAD),
    Rule(
        "sample_rate",
        "--sample-rate",
        lambda args: args.sample_rate != 1.0,
        _UNREAD,
    ),
    # Flags on which Megatron itself fails, later and with a traceback.
    refused_flag(
        "init_method_xavier_uniform",
        "Megatron 0.19.2 passes it to a configuration that does not know it, and fails",
        "Use --init-method-std",
    ),
    Rule(
        "full_validation",
        "--full-validation without --multiple-validation-sets",
        lambda args: args.full_validation and not getattr(args, "multiple_validation_sets", 0),
        "Megatron 0.19.2 fails in the first evaluation, with one validation set",
        "Add --multiple-validation-sets, or use --eval-iters",
    ),
)

REFUSALS = (*SEAM_REFUSALS, *PROGRAM_REFUSALS)
