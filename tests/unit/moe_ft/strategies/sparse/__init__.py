"""Tests of moe_ft/strategies/sparse."""
