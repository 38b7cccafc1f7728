"""Commands of `python -m moe_ft`."""
