"""The seams into Megatron's training loop."""
