"""Tests of moe_ft/files."""
