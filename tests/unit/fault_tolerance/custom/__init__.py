"""Tests of fault_tolerance/custom."""
