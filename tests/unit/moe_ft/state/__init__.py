"""Unit tests of moe_ft.state."""
