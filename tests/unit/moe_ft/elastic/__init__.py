"""Unit tests of moe_ft.elastic."""
