"""Checkpointing strategies, one folder each; nothing else knows them by name."""
