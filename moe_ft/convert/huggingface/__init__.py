"""Checkpoints of Hugging Face: families of models, and the tensors of Megatron that theirs are.

mapping.py has the interface. A family is a file in families/. Only `config.json` and safetensors are read and
written here: `transformers` is not needed.
"""
