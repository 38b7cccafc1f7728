"""Tests of moe_ft/doctor."""
