"""Pretraining scripts under moe_ft: the launcher `moe_ft run`, and the functions that a script can import."""
