"""Tests of moe_ft/engine/snapshots."""
