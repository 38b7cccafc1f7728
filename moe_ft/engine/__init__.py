"""Moves bytes while training runs: snapshot, replicate, persist."""
