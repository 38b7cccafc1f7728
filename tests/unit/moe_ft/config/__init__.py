"""Tests of moe_ft/config."""
