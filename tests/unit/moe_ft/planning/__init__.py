"""Unit tests of moe_ft.planning."""
