"""Fault tolerance for Mixture-of-Experts pretraining on Megatron-LM."""

__version__ = "0.1.0"
