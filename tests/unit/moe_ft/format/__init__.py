"""Tests of moe_ft/format."""
