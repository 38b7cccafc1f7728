"""Stock Megatron on a machine without a GPU."""
