"""Tests of moe_ft/engine/persist."""
