"""Tests of the strategy dense."""
