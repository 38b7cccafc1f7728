"""Tests of moe_ft/engine/updates."""
