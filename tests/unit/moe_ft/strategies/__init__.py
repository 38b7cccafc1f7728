"""Tests of moe_ft/strategies."""
