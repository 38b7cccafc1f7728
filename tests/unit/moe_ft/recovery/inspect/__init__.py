"""Tests of moe_ft/recovery/inspect."""
