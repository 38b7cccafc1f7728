"""Recovery: the phases of a start of checkpointing, composed in start.py."""
