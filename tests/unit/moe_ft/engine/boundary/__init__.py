"""Tests of the boundary log."""
