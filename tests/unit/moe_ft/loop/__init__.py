"""Tests of moe_ft/loop."""
