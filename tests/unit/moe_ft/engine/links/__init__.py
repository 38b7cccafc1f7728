"""Tests of moe_ft/engine/links."""
