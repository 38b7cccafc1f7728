"""Optimizer steps that peers repeat, in place of state that is sent."""
