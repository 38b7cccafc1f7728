"""Tests of moe_ft/cluster."""
