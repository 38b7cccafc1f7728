"""Packing training state: kernels for the GPU, each beside the torch reference that defines its result."""
