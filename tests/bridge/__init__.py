"""Jobs that train with Megatron-Bridge."""
