"""Conversion of checkpoints into formats that others read: `python -m moe_ft convert`.

From a source (source.py), the tensors of the whole model are named (tensors.py) and read one at a time
there. A format writes them in shards (safetensors_set.py, torch_dist.py) into a destination that can
be continued after an interruption (destination.py). conversion.py composes them. All raise ConfigError for
what cannot be converted and CorruptStateError for what is damaged, which end the conversion.
"""
