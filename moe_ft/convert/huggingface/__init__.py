"""Checkpoints of Hugging Face: families of models, and the tensors of Megatron that theirs are.

mapping.py has the interface of a family, deepseek.py and query_groups.py the families. Only `config.json` and
safetensors are read and written here: `transformers` is not needed.
"""
