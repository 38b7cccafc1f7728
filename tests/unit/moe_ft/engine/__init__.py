"""Unit tests of moe_ft.engine."""
