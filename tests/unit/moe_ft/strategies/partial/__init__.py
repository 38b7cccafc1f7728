"""Tests of moe_ft/strategies/partial."""
