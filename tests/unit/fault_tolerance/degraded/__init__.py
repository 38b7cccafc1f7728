"""Tests of fault_tolerance/repair."""
