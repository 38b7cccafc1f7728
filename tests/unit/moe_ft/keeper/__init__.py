"""Tests of moe_ft/keeper."""
