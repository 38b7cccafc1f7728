"""Tests of fault_tolerance/launch."""
