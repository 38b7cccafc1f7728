"""Tests of moe_ft/commands."""
