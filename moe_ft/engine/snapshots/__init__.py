"""Snapshots and windows: copying live state, packing it, and committing it."""
