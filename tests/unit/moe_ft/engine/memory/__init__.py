"""Tests of moe_ft/engine/memory."""
