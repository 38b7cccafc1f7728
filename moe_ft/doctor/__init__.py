"""Checks before an expensive run: `python -m moe_ft doctor`."""
