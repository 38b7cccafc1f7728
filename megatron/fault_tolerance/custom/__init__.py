"""Training loops on `megatron.core` other than Megatron's own: their facts and settings."""
