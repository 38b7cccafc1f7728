"""Slots of experts and homes of their state, in Megatron's MoE layers."""
