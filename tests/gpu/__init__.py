"""Tests that need a GPU, marked gpu and skipped without one."""
