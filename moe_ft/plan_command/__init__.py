"""The command ``python -m moe_ft plan``: what a strategy will cost, before a job is started."""
