"""Iterations without some ranks: their data-parallel peers play their roles (docs/degraded.md)."""
