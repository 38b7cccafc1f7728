"""Unit tests of kernels."""
