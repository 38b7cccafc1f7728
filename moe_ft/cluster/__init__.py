"""Ranks that are forked from a process which has imported torch and Megatron already."""
