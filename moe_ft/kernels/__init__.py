"""Packing training state: kernels for the GPU, each next to the torch reference that defines its result."""
