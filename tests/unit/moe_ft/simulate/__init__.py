"""Unit tests of moe_ft.simulate."""
