"""Reads and writes Megatron objects: parameters, optimizer tensors, digests. No collectives."""
