"""Unit tests of moe_ft.recovery."""
